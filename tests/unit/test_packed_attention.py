"""Self-attention that `stepscope.accelerate` recognizes by what it computes, and what only looks
like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import WIDTH, assert_same_training, batch, created
from stepscope.acceleration import checks
from stepscope.acceleration.pieces import packed_attention
from stepscope.attention.packed import split_heads
from stepscope.kernels.weight_copies import WeightCopies

HEADS = 4


class Packed(nn.Module):
    """Attention with one projection, as timm and nanoGPT write it, and as GPT-NeoX packs it."""

    def __init__(self, by_head: bool = False, causal: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.by_head, self.causal, self.drop = by_head, causal, nn.Dropout(0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        p = self.drop.p if self.training else 0.0
        causal = self.causal and mask is None
        return functional.scaled_dot_product_attention(q, k, v, mask, p, causal)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = split_heads(self.qkv(x), HEADS, self.by_head)
        out: Tensor = self.proj(self.attend(q, k, v, attn_mask).transpose(1, 2).flatten(2))
        return out


class Separate(nn.Module):
    """Attention with three projections, in any order; `weighted` also returns its weights."""

    def __init__(
        self, order: str = "kvq", output: bool = True, scale: float = 0.5, weighted: bool = False
    ) -> None:
        super().__init__()
        for name in order:
            self.add_module(f"{name}_proj", nn.Linear(WIDTH, WIDTH))
        if output:
            self.out = nn.Linear(WIDTH, WIDTH)
        self.scaling, self.weighted = scale, weighted

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = (
            self.get_submodule(f"{name}_proj")(hidden_states)
            .unflatten(-1, (HEADS, -1))
            .transpose(1, 2)
            for name in "qkv"
        )
        weights = (q @ k.mT * self.scaling).softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        out = self.out(out) if hasattr(self, "out") else out
        return out, weights if self.weighted else None


class Residual(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(x)
        return x + (out[0] if isinstance(out, tuple) else out)  # type: ignore[no-any-return]


FORMS: dict[str, Callable[[], nn.Module]] = {
    "causal": Packed,
    "not causal": lambda: Packed(causal=False),
    "by head": lambda: Packed(by_head=True),
    "no bias": lambda: Packed(bias=False),
    "separate": lambda: Separate("qkv"),
    "other order": Separate,
    "no output projection": lambda: Separate(output=False),
    "other scale": lambda: Separate(scale=1.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_replaced(form: str) -> None:
    report = assert_same_training(lambda: Residual(FORMS[form]()))
    assert len(report.replaced["attention"]) == 2
    assert "linear" not in report.replaced
    assert not report.left


class Windowed(Packed):
    sliding_window = 3

    def __init__(self) -> None:
        super().__init__()
        self.window_size = 64


class Banded(Packed):
    """Local attention whose window is longer than a short input."""

    def __init__(self) -> None:
        super().__init__(causal=False)
        ones = torch.ones(32, 32, dtype=torch.bool)
        self.register_buffer("mask", ones.tril() & ~ones.tril(-16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        length = x.shape[1]
        return super().forward(x, self.mask[:length, :length])


class Biased(Packed):
    """Attention with a learned bias of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        del mask
        return functional.scaled_dot_product_attention(q, k, v, self.table.expand(1, q.shape[2]))


class Normalized(Packed):
    """Attention with norms of queries and keys that have no parameters."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (functional.normalize(part, dim=-1) for part in (q, k))
        return super().attend(q, k, v, mask)


class Dropping(Packed):
    """Attention with dropout of the weights and of the output, or of the queries."""

    def __init__(self, weights: float, output: float = 0.0, queries: float = 0.0) -> None:
        super().__init__()
        self.drop.p = weights
        self.of_output, self.of_queries = nn.Dropout(output), nn.Dropout(queries)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(self.of_queries(q), k, v, mask)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.of_output(super().forward(x, attn_mask))
        return out


@pytest.mark.parametrize(("weights", "output"), [(0.5, 0.0), (0.0, 0.25), (0.5, 0.25), (0.1, 0.1)])
def test_dropout_is_that_of_torch(weights: float, output: float) -> None:
    """The same random numbers as before, in training only."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(Dropping(weights, output))
    x = torch.randn(2, 6, WIDTH, requires_grad=True)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        out = model(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]

    expected = {}
    for training in (True, False):
        model.train(training)
        expected |= {(training, seed): run(seed) for seed in (1, 2)}
    assert not torch.equal(expected[True, 1][0], expected[True, 2][0])
    report = stepscope.accelerate(model)
    for (training, seed), values in expected.items():
        model.train(training)
        for _ in range(2):
            torch.testing.assert_close(run(seed), values)
    assert len(report.replaced["attention"]) == 1
    assert report.unchecked == 0


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Windowed, "it has a window_size"),
        (Banded, "its buffer mask is not a causal mask"),
        (Biased, ""),
        (Normalized, ""),
        (lambda: Dropping(0.5, queries=0.5), "it has dropout of another form"),
        (lambda: Separate(weighted=True), "it returns attention weights"),
    ],
)
def test_forms_that_are_left(form: Callable[[], nn.Module], reason: str) -> None:
    model = nn.ModuleList(form() for _ in range(2))
    replacements, left = packed_attention.find(model, WeightCopies())
    assert not replacements
    assert [one.reason for one in left] == ([reason] * 2 if reason else [])


def test_a_dropout_with_another_mode_than_its_module() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Dropping(0.0, 0.5))
    x = torch.randn(2, 6, WIDTH, requires_grad=True)
    report = stepscope.accelerate(model, sample=x)
    assert len(report.replaced["attention"]) == 1
    for training in (True, False):
        model.train(training)
        model[0].of_output.train(not training)
        outputs = []
        for forward in (model, lambda x: Dropping.forward(model[0], x)):
            torch.manual_seed(1)
            outputs.append(forward(x))
        torch.testing.assert_close(*outputs)
        assert bool((outputs[0] == 0).any()) is not training


def test_a_module_with_hooks_is_left() -> None:
    module = Packed()
    module.qkv.register_forward_hook(lambda *_: None)
    replacements, left = packed_attention.find(nn.ModuleList([module]), WeightCopies())
    assert not replacements
    assert [one.reason for one in left] == ["it has hooks"]


def _with_dropout(module: Any) -> None:
    module.drop.p = 0.5


def _with_another_setting(module: Any) -> None:
    module.causal = False


def _with_an_adapter(module: Any) -> None:
    module.qkv = nn.Sequential(module.qkv, nn.Identity())


def _with_a_hook(module: Any) -> None:
    module.proj.register_forward_hook(lambda *given: 2 * given[2])


def _with_other_parameters(module: Any) -> None:
    module.proj.weight = nn.Parameter(2 * module.proj.weight.detach())


@pytest.mark.parametrize(
    "change",
    [_with_dropout, _with_another_setting, _with_an_adapter, _with_a_hook, _with_other_parameters],
)
def test_changes_after_the_call_are_used(change: Callable[[Any], None]) -> None:
    values = []
    for accelerate in (False, True):
        model: Any = created(lambda: Residual(Packed()))
        if accelerate:
            report = stepscope.accelerate(model, sample=batch())
            assert len(report.replaced["attention"]) == 2
        for block in model.blocks:
            change(block.attention)
        torch.manual_seed(0)
        values.append(float(model(*batch()).detach()))
    assert values[1] == pytest.approx(values[0], rel=1e-5)


def test_a_mask_of_the_caller_is_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Packed())
    x, mask = torch.randn(2, 6, WIDTH), torch.ones(6, 6, dtype=torch.bool).tril(1)
    expected, plain = model[0](x, mask), model[0](x)
    report = stepscope.accelerate(model)
    torch.testing.assert_close(model(x), plain)
    torch.testing.assert_close(model[0](x, mask), expected)
    torch.testing.assert_close(model[0](x, attn_mask=mask), expected)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        model[0](x, another=None)
    assert len(report.replaced["attention"]) == 1
    report.undo()
    assert torch.equal(model(x), plain)


class Flagged(Packed):
    """Attention that is causal unless the caller says otherwise."""

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:  # type: ignore[override]
        everything = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        return super().forward(x, None if is_causal else everything)


def test_a_flag_that_the_caller_unsets_is_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Flagged())
    x = torch.randn(2, 6, WIDTH)
    expected = model[0](x, is_causal=False)
    report = stepscope.accelerate(model, sample=x)
    assert len(report.replaced["attention"]) == 1
    torch.testing.assert_close(model[0](x, is_causal=False), expected)
    torch.testing.assert_close(model[0](x, False), expected)


def test_the_number_of_heads_is_found_without_an_attribute() -> None:
    match = packed_attention._match(Packed(), list(packed_attention._candidates(Packed())))
    assert isinstance(match, packed_attention.Match)
    assert (match.heads, match.by_head, match.causal) == (HEADS, False, True)
    assert match.scale == pytest.approx((WIDTH // HEADS) ** -0.5)


@pytest.mark.parametrize(("error", "reason"), [(0.0, ""), (1.0, "the gradients differ")])
def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_the_largest(
    error: float, reason: str
) -> None:
    """Softmax ignores a constant, such as the bias of a key."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.shift).softmax(-1)

    def replaced(x: Tensor) -> Tensor:
        shift = module.shift / 3
        out = (module.linear(x) + shift + shift + shift).softmax(-1)
        return out + error * (shift - shift.detach())

    torch.manual_seed(0)
    module = Shifted()
    found = checks.difference(module, module.forward, replaced, (torch.randn(8, WIDTH),), {})
    assert found.partition(":")[0] == reason
