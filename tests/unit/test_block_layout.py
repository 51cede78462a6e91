"""Blocks with residual adds whose parts have any names, and those that only look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stepscope
from accelerated_models import WIDTH, Gated, Model, Norm, Plain, assert_same_training, batch
from stepscope.acceleration.pieces.block_layout import Branch, Marked, layout_of

PIECE = "residual block"


class Mixer(nn.Module):
    """Takes what attention does: an argument by position or name, a flag, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, scale: Any = None, twice: bool = False, **others: Tensor
    ) -> Tensor:
        out: Tensor = self.inner(x) * (1.0 if scale is None else scale) * (1 + twice)
        return out + sum(others.values())


class Block(nn.Module):
    """As many people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.mix, self.drop = nn.LayerNorm(WIDTH), Mixer(), nn.Dropout(0.1)
        self.n2, self.ffn = nn.LayerNorm(WIDTH), Plain()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x)))
        out: Tensor = x + self.ffn(self.n2(x))
        return out


class OfLlama(nn.Module):
    """The names of Llama's own code, with a marked argument, a flag and others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(), Mixer()
        self.ffn_norm, self.feed_forward = Norm(), Gated()

    def forward(
        self, x: Tensor, freqs: Tensor | None = None, twice: bool = False, **others: Tensor
    ) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs, twice=twice, **others)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class OfTorchvision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.dropout, self.mlp = nn.Dropout(0.0), Plain()

    def forward(self, input: Tensor) -> Tensor:
        torch._assert(input.dim() == 3, "expected a batch of sequences")
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + input
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


def test_the_layout_of_a_block() -> None:
    layout = layout_of(OfLlama(), ["attention_norm", "ffn_norm"])
    assert layout is not None
    assert layout.flags == {"twice": False}
    first, second = layout.branches
    assert first._replace(named=None) == Branch(
        "attention_norm", ("attention",), (Marked("freqs"),), {"twice": False}, "", None
    )
    assert (second.norm, second.parts, second.named) == ("ffn_norm", ("feed_forward",), None)


@pytest.mark.parametrize("block", [Block, OfLlama, OfTorchvision])
def test_blocks_that_are_replaced(block: Callable[[], nn.Module]) -> None:
    report = assert_same_training(block)
    assert report.replaced[PIECE] == ["blocks.0", "blocks.1"]


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an argument": lambda block, x: block(x, torch.tensor(0.5)),
    "an argument by name": lambda block, x: block(x, freqs=torch.tensor(0.5)),
    "the tensor by name": lambda block, x: block(x=x),
    "others": lambda block, x: block(x, torch.tensor(0.5), bias=torch.tensor(0.1)),
    "a flag": lambda block, x: block(x, None, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_a_block_are_passed_on(name: str) -> None:
    torch.manual_seed(0)
    block, x = OfLlama(), torch.randn(2, 3, WIDTH)
    call = CALLS[name]
    plain, expected = block(x).detach(), call(block, x).detach()
    report = stepscope.accelerate(block)
    for _ in range(2):
        torch.testing.assert_close(block(x).detach(), plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(call(block, x).detach(), expected, rtol=1e-4, atol=1e-5)
    assert report.replaced[PIECE] == [""]
    report.undo()
    assert torch.equal(call(block, x).detach(), expected)


def test_settings_that_change_later_are_used() -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop.p = 0.0
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.factor * self.drop(self.mix(self.n1(x)))
            out: Tensor = x + self.ffn(self.n2(x))
            return out

    torch.manual_seed(0)
    block, x = Scaled(), torch.randn(2, 3, WIDTH)
    report = stepscope.accelerate(block)
    block(x)
    assert report.replaced[PIECE] == [""]
    block.factor = 2.0
    torch.testing.assert_close(block(x), Scaled.forward(block, x), rtol=1e-4, atol=1e-5)


class HalfAdded(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.drop(self.mix(self.n1(x)))
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + functional.dropout(self.drop(self.mix(self.n1(x))), 0.1, self.training)
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.mix(self.n1(x))) + self.ffn(self.n2(x))
        return out


class NormAfter(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.drop(self.mix(x)))
        return self.n2(x + self.ffn(x))  # type: ignore[no-any-return]


class FromTheNorm(Block):
    """The second residual is the output of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x)))
        read = self.n2(x)
        return read + self.ffn(read)  # type: ignore[no-any-return]


class WithParameter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))


class ReadsAPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x))) * self.mix.inner.bias[0]
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


class ReadTwice(Block):
    """Two branches of one norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x)))
        return x + self.ffn(self.n2(x)) + self.mix(self.n2(x))  # type: ignore[no-any-return]


class WithBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x), self.angles))
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "block",
    [HalfAdded, Dropped, Parallel, NormAfter, FromTheNorm, WithParameter, ReadsAPart, ReadTwice],
)
def test_blocks_that_compute_something_else_are_left(block: Callable[[], nn.Module]) -> None:
    report = assert_same_training(block)
    assert PIECE not in report.replaced


def test_a_block_that_passes_on_a_tensor_of_its_own_is_left() -> None:
    assert PIECE not in assert_same_training(WithBuffer).replaced


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self._added(x)

    def _added(self, x: Tensor) -> Tensor:
        branch: Tensor = checkpoint(self._branch, x, use_reentrant=False)  # type: ignore[no-untyped-call]
        x = x + branch
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]

    def _branch(self, x: Tensor) -> Tensor:
        return self.drop(self.mix(self.n1(x)))  # type: ignore[no-any-return]


def test_a_block_that_recomputes_activations_is_left() -> None:
    assert PIECE not in assert_same_training(Checkpointed).replaced


def test_hooks_leave_a_block() -> None:
    torch.manual_seed(0)
    model = Model(Block)
    seen = []
    model.blocks[0].mix.register_forward_hook(lambda *_: seen.append(1))
    report = stepscope.accelerate(model)
    model(*batch())
    assert report.replaced[PIECE] == ["blocks.1"]
    assert seen


class Counted(nn.LayerNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("exclude", ["LayerNorm", "blocks.0.n2", Counted])
def test_a_block_with_an_excluded_norm_is_left(exclude: Any) -> None:
    torch.manual_seed(0)
    model = Model(Block)
    model.blocks[0].n2 = Counted(WIDTH)
    report = stepscope.accelerate(model, exclude=[exclude])
    model(*batch())
    Counted.calls = 0
    model(*batch())
    assert Counted.calls == 1
    assert report.replaced.get(PIECE, []) == ([] if exclude == "LayerNorm" else ["blocks.1"])
