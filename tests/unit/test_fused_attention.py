"""Naive attention of a model runs as one call of SDPA; everything else stays eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from attention_spellings import (
    HEADS,
    LENGTH,
    VARIANTS,
    Attention,
    added_mask,
    bias,
    divided_in_place,
    inputs,
    later,
    maximum_before_the_mask,
    operators,
    other_sum,
    outcome,
    positions,
    sum_of_columns,
    window,
    without_the_sum,
)
from stepscope.acceleration.forward_registry import layer_owners
from stepscope.acceleration.fused_attention import FusedAttention
from stepscope.acceleration.passes.sdpa import Sdpa

WIDTH = 16
Called = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The masks and flags of the calls of SDPA."""
    calls: Called = []
    plain = functional.scaled_dot_product_attention

    def recorded(q: Any, k: Any, v: Any, mask: Any, p: Any, is_causal: Any, **more: Any) -> Any:
        calls.append({"mask": mask, "dropout": p, "is_causal": is_causal})
        return plain(q, k, v, mask, p, is_causal, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    return calls


class Attend(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.attend(*tensors)


def fused(model: nn.Module, *batch: Tensor) -> FusedAttention:
    attention = FusedAttention()
    with attention.watched():
        model(*batch)
    attention.replace()
    return attention


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_every_spelling_gives_the_same_result(variant: Attention) -> None:
    tensors, model = inputs(), Attend(variant)
    attention = fused(model, *tensors)
    changed = outcome(model, tensors)
    assert attention.applied == 1
    assert attention.why_not() is None
    for one, other in zip(outcome(variant, tensors), changed, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (without_the_sum, ""), (other_sum, ""), (sum_of_columns, ""),
        (positions, "form that is not known"), (maximum_before_the_mask, ""),
        (lambda q, k, v: (q @ k.mT).relu() @ v, ""),
    ],
)  # fmt: skip
def test_other_matmuls_of_batches_stay_as_they_are(variant: Attention, reason: str) -> None:
    tensors, model = [x.detach() for x in inputs()], Attend(variant)
    attention = fused(model, *tensors)
    changed = model(*tensors)
    assert reason in str(attention.why_not())
    torch.testing.assert_close(changed, variant(*tensors))
    attention.replace()
    assert not layer_owners(model), "it runs as it is again"


def causal_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q @ k.mT).masked_fill(EARLIER == 0, -1e9), -1) @ v


def hidden_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The third query sees no key."""
    return torch.softmax((q @ k.mT).masked_fill(HIDDEN, -1e9), -1) @ v


def slight(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT + -later().to(q.dtype), -1) @ v


EARLIER = torch.ones(LENGTH, LENGTH).tril()
HIDDEN = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
HIDDEN[2], HIDDEN[4, :3] = True, True


@pytest.mark.parametrize(
    ("variant", "is_causal"),
    [(operators, True), (added_mask, True), (causal_buffer, True), (window, False), (bias, False),
     (slight, False), (hidden_buffer, False)],
)  # fmt: skip
def test_a_causal_mask_is_detected(variant: Attention, is_causal: bool, called: Called) -> None:
    tensors, model = inputs(), Attend(variant)
    fused(model, *tensors)
    expected = outcome(variant, tensors)
    for one, other in zip(expected, outcome(model, tensors), strict=True):
        torch.testing.assert_close(one, other)
    assert [(one["is_causal"], one["mask"] is None) for one in called] == [(is_causal, is_causal)]


def test_masks_that_change_are_looked_at_in_each_call() -> None:
    """A batch without padding has a causal mask; the next one has padding."""
    call = Sdpa(False, None, 0.0, True)
    q, k, v = (x.detach() for x in inputs())
    padded = EARLIER.bool().clone()
    padded[:, -2:] = False
    for mask in (EARLIER.bool(), padded, EARLIER.bool()):
        naive = torch.softmax((q @ k.mT / WIDTH**0.5).masked_fill(~mask, -torch.inf), -1) @ v
        torch.testing.assert_close(call(q, k, v, mask), naive)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_of_the_weights_is_that_of_the_call(training: bool, called: Called) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.dropout(torch.softmax(q @ k.mT, -1), 0.25, training) @ v

    tensors, model = inputs(), Attend(attend)
    attention = fused(model, *tensors)
    assert model(*tensors).isfinite().all()
    assert attention.applied == 1
    assert [one["dropout"] for one in called] == [0.25 if training else 0.0]


def test_a_bias_is_not_scaled_with_the_scores() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT).masked_fill(later(), -1e9) * 1e-9, -1) @ v

    tensors, model = inputs(), Attend(attend)
    fused(model, *tensors)
    torch.testing.assert_close(model(*tensors), attend(*tensors))


def test_written_scores() -> None:
    with torch.no_grad():
        tensors, model = inputs(), Attend(divided_in_place)
        attention = fused(model, *tensors)
        torch.testing.assert_close(model(*tensors), divided_in_place(*tensors))
    assert attention.applied == 1


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.weights, self.sum, self.both = Weights(), Sum(), WithWeights()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.kind == "children":
            out = self.sum(self.weights(q, k), v)
        elif self.kind == "returned weights":
            out, _ = self.both(q, k, v)
        else:
            out = causal_buffer(q, k, v)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Weights(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT).masked_fill(EARLIER == 0, -1e9), -1)


class Sum(nn.Module):
    def forward(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v


class WithWeights(nn.Module):
    """As modules of transformers return them, for no reader."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax((q @ k.mT).masked_fill(EARLIER == 0, -1e9), -1)
        return weights @ v, weights


class Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.mlp(x)


class Operators(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["", "children", "returned weights"])
def test_only_modules_with_attention_are_traced(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(2, LENGTH, WIDTH)
    expected = outcome(model, [x.requires_grad_()])
    attention = fused(model, x)
    with Operators() as operators:
        changed = outcome(model, [x])
    for one, other in zip(expected, changed, strict=True):
        torch.testing.assert_close(one, other)
    assert {module for module in model.modules() if layer_owners(module)} == {*model.blocks}
    assert attention.applied == 1, "blocks share a graph"
    flash = [name for name in operators.names if "flash_attention_for_cpu.default" in name]
    assert len(flash) == 3
    assert not any("bmm" in name for name in operators.names)
    attention.switch(False)
    assert not any(layer_owners(block) for block in model.blocks)
    attention.switch(True)
    assert all(layer_owners(block) for block in model.blocks)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_segment_has_it_in_forward_and_recomputation(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    expected = outcome(model, [x])
    fused(model, x)
    with Operators() as operators:
        out = x
        for block in model.blocks:
            out = torch.utils.checkpoint.checkpoint(block, out, use_reentrant=reentrant)
        out = model.mlp(out)
        out.square().sum().backward()
    torch.testing.assert_close(x.grad, expected[1])
    flash = [name for name in operators.names if "flash_attention_for_cpu.default" in name]
    assert len(flash) == 6


def test_what_dynamo_cannot_trace_is_named() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT, -1)
        print(end="")  # noqa: T201
        torch._dynamo.graph_break()
        return weights @ v

    tensors, model = inputs(), Attend(attend)
    attention = fused(model, *tensors)
    torch.testing.assert_close(model(*tensors), attend(*tensors))
    assert "Dynamo cannot trace" in str(attention.why_not())


def test_a_model_without_attention() -> None:
    attention = fused(nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH))
    assert "no module has a softmax" in str(attention.why_not())


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (0, 1, 0, 0), (0, None, 0, 1), (2, 0, 0, None)])
def test_a_mapped_call_is_one_call(dims: tuple[int | None, ...], called: Called) -> None:
    drawn = [torch.randn(5, 2, HEADS, LENGTH, WIDTH) for _ in range(3)]
    q, k, v = (
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(drawn, dims, strict=False)
    )
    masks = torch.rand(5, LENGTH, LENGTH) < 0.7
    mask = masks[0] if dims[3] is None else masks.movedim(0, dims[3])
    call = Sdpa(False, None, 0.0, True)
    mapped = torch.vmap(call, dims)(q, k, v, mask)
    assert len(called) == 1
    for index in range(5):
        one = [
            x if dim is None else x.select(dim, index)
            for x, dim in zip((q, k, v, mask), dims, strict=True)
        ]
        torch.testing.assert_close(mapped[index], call(*one), equal_nan=True)


def test_no_mask_and_one_head(called: Called) -> None:
    """Three dimensions."""
    tensors = [x[:, 0] for x in inputs()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    model = Attend(attend)
    fused(model, *tensors)
    torch.testing.assert_close(model(*tensors), attend(*tensors))
    assert len(called) == 1
