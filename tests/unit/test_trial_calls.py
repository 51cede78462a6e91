"""Changes apply however a program calls its model, also in recomputation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from stepscope.acceleration.changes import blocks_of
from stepscope.advisor.trial import changes as changing
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import Changes

pytestmark = pytest.mark.usefixtures("torch_as_it_was")
HEADS, WIDTH, LENGTH = 2, 16, 8
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
Step = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Block with naive attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.mT).masked_fill(LATER, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


def by_the_model(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def by_a_method(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model.loss(x)  # type: ignore[operator]
    return loss


def block_by_block(model: nn.Module, x: Tensor) -> Tensor:
    for block in model:  # type: ignore[attr-defined]
        x = block(x)
    return x.square().mean()


def checkpointed_blocks(model: nn.Module, x: Tensor) -> Tensor:
    for block in model:  # type: ignore[attr-defined]
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x.square().mean()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "the model": (Model, by_the_model),
    "by a method": (Model, by_a_method),
    "block by block": (lambda: nn.ModuleList(Block() for _ in range(2)), block_by_block),
    "checkpointed blocks": (lambda: nn.ModuleList(Block() for _ in range(2)), checkpointed_blocks),
}


def draw() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


def run(model: nn.Module, step: Step, steps: int, **settings: str) -> Changes:
    """Run steps as a trial does, without an optimizer."""
    seen = Backwards()
    seen.attach()
    changes = Changes(settings, seen)
    changes.on_torch_imported()
    for number in range(1, steps + 1):
        model.zero_grad()
        step(model, draw()).backward()
        if number == 1:
            changes.on_models_known([model])
        changes.end_step(number)
    return changes


@pytest.mark.parametrize("name", PROGRAMS)
def test_change_applies_to_modules_that_the_program_calls(name: str) -> None:
    make, step = PROGRAMS[name]
    model = make()
    formats = []
    blocks_of(model)[0].out.register_forward_hook(  # type: ignore[union-attr]
        lambda *given: formats.append(given[-1].dtype)
    )
    changes = run(model, step, 4, dtype="bfloat16", attention="fused")
    assert changes.without_effect() == {}
    calls = changes._calls[0]
    assert calls.settle()
    assert calls.called == ([model] if name == "the model" else blocks_of(model))
    watched = {part for part in model.modules() if "__call__" in vars(type(part))}
    assert watched - {calls.model} == set(calls.called) - {calls.model}, "inner calls are plain"
    assert not torch.is_autocast_enabled("cpu")
    assert formats[-1] == torch.bfloat16


@pytest.mark.parametrize("name", PROGRAMS)
def test_modules_that_the_program_calls_are_compiled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[nn.Module, str]] = []
    monkeypatch.setattr(
        changing, "compile_own", lambda module, how, _: compiled.append((module, how))
    )
    make, step = PROGRAMS[name]
    model = make()
    changes = run(model, step, 4, compile="model")
    calls_model = name == "the model"
    assert compiled == [(part, "model") for part in ([model] if calls_model else blocks_of(model))]
    assert changes.without_effect() == {}
    assert not any("__call__" in vars(type(part)) for part in model.modules())


def test_torch_jit_modules_are_not_changed() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        part = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    model = nn.ModuleList([Block(), part])
    changes = run(model, block_by_block, 4, attention="fused", dtype="bfloat16")
    assert changes.without_effect() == {}
    assert changes._calls[0].called == list(model)


def test_model_that_is_never_called_is_reported_as_unchanged() -> None:
    weight = nn.Linear(WIDTH, WIDTH)
    changes = run(
        weight,
        lambda one, x: (x @ one.weight).square().mean(),
        5,
        dtype="bfloat16",
        compile="model",
    )
    assert list(changes.without_effect()) == ["compile", "dtype"]


def test_checkpointing_and_fused_attention_together() -> None:
    torch.manual_seed(0)
    model = Model()
    changes = run(model, by_the_model, 3, attention="fused", checkpoint="blocks")
    assert changes.without_effect() == {}
    result = [parameter.grad for parameter in model.parameters()]
    torch.manual_seed(0)
    plain = Model()
    by_the_model(plain, draw()).backward()
    for parameter, one in zip(plain.parameters(), result, strict=True):
        torch.testing.assert_close(parameter.grad, one)
