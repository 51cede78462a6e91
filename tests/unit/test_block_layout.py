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
from stepscope.acceleration.pieces import residual_block
from stepscope.acceleration.pieces.block_layout import NOT_A_SUM, Layout, Marked, layout_of
from stepscope.acceleration.replacement import Left

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


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.mix(self.n1(x))) + self.ffn(self.n2(x))
        return out


class ReadTwice(Block):
    """Two branches of one norm after another branch."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x)))
        return x + self.ffn(self.n2(x)) + self.mix(self.n2(x))  # type: ignore[no-any-return]


class OneNorm(nn.Module):
    """As Phi; the norm is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.ffn = nn.LayerNorm(WIDTH), Mixer(), Plain()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        out: Tensor = self.drop(self.mix(read)) + self.drop(self.ffn(read)) + x
        return out


def test_the_layout_of_a_block() -> None:
    layout = layout_of(OfLlama(), ["attention_norm", "ffn_norm"])
    assert isinstance(layout, Layout)
    assert layout.fixed == layout.settings == {}
    first, second = layout.branches
    assert (first.norm, first.parts) == ("attention_norm", ("attention",))
    given, x = {"freqs": 2, "twice": True}, torch.ones(1)
    args, kwargs = first.arguments({**given, "": x})
    assert args == [x, 2]
    assert kwargs.pop("twice")
    assert [type(one) for one in kwargs.values()] == [Marked]
    assert (second.norm, second.parts, second.kwargs) == ("ffn_norm", ("feed_forward",), {})


@pytest.mark.parametrize("block", [Block, OfLlama, OfTorchvision, Parallel, ReadTwice, OneNorm])
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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x))) * self.gamma
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


class ReadsAPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x))) * self.mix.inner.bias[0]
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


class Interleaved(Block):
    """Dropout of the second branch draws its random numbers first."""

    def forward(self, x: Tensor) -> Tensor:
        mixed, wide = self.mix(self.n1(x)), self.drop(self.ffn(self.n2(x)))
        return x + self.drop(mixed) + wide  # type: ignore[no-any-return]


class Clamped(Block):
    """Has no effect on small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1e4, 1e4)


class ReadsItsLargest(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().max() < 1e4 else x


class WithBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x), self.angles))
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "block",
    [
        HalfAdded,
        Clamped,
        ReadsItsLargest,
        Dropped,
        NormAfter,
        FromTheNorm,
        WithParameter,
        ReadsAPart,
        Interleaved,
    ],
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


class Instance(Block):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: 2 * Block.forward(self, x)  # type: ignore[method-assign]


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.n1(x)))
        x += self.ffn(self.n2(x))
        return x


class TwoOutputs(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (HalfAdded, NOT_A_SUM),
        (Checkpointed, "it recomputes activations"),
        (Instance, "its forward is not that of its class"),
        (TwoOutputs, NOT_A_SUM),
        (InPlace, NOT_A_SUM),
        (WithParameter, NOT_A_SUM),
    ],
)
def test_the_reason_why_a_block_is_left(block: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(), nn.Identity())
    state = torch.random.get_rng_state()
    report = stepscope.accelerate(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [left for left in report.left if left.piece == PIECE] == [Left(PIECE, "0", reason)]


def test_a_block_that_recomputes_activations_is_left() -> None:
    assert PIECE not in assert_same_training(Checkpointed).replaced


class Conditional(nn.Module):
    """Reads arguments: the class of one, the identity of two others; passes on two."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.mix = nn.LayerNorm(WIDTH), Mixer()
        self.n2, self.ffn = nn.LayerNorm(WIDTH), Plain()

    def forward(
        self,
        x: Tensor,
        kind: Any = None,
        factor: float | None = None,
        doubled: bool | None = False,
        *,
        scale: Any = None,
        twice: bool = False,
    ) -> Tensor:
        x = x + self.mix(self.n1(x), scale, twice=twice)
        if isinstance(kind, str) or factor is not None or doubled is True:
            x = 2 * x
        out: Tensor = x + self.ffn(self.n2(x))
        return out


@pytest.mark.parametrize(
    "given", [{"kind": "text"}, {"factor": 2.0}, {"doubled": True}], ids=lambda given: str(given)
)
def test_arguments_that_a_block_reads(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block, x = Conditional(), torch.randn(2, 3, WIDTH)
    report = stepscope.accelerate(block)
    calls = (given, {"scale": torch.tensor(0.5)}, given, {"twice": True}, given | {"twice": True})
    for number, one in enumerate(calls):
        actual, expected = block(x, **one), Conditional.forward(block, x, **one)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        if number == 0:
            (name,) = given
            reason = f"its argument {name} has another value"
            assert [left for left in report.left if left.piece == PIECE] == [
                Left(PIECE, "", reason)
            ]
    assert report.replaced[PIECE] == [""]


class Crossed(Block):
    """Has cross-attention if there is something to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.cross = nn.LayerNorm(WIDTH), Mixer()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = x + self.drop(self.mix(self.n1(x)))
        if memory is not None:
            x = x + self.cross(self.n3(x), memory)
        return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]


def test_an_argument_that_decides_whether_a_part_runs() -> None:
    torch.manual_seed(0)
    block, x, memory = Crossed(), torch.randn(2, 3, WIDTH), torch.tensor(0.5)
    block.drop.p = 0.0
    report = stepscope.accelerate(block)
    for given in ([memory], [], [memory], [None]):
        expected = Crossed.forward(block, x, *given)
        torch.testing.assert_close(block(x, *given), expected, rtol=1e-4, atol=1e-5)
    assert report.replaced[PIECE] == [""]


def test_equal_blocks_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Block):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.factor * self.drop(self.mix(self.n1(x)))
            return x + self.ffn(self.n2(x))  # type: ignore[no-any-return]

    seen = []
    monkeypatch.setattr(
        residual_block, "layout_of", lambda *one: (seen.append(one[0]), layout_of(*one))[1]
    )
    model = nn.Sequential(*(Scaled() for _ in range(6)))
    for number, block in enumerate(model):
        block.layer_idx = number  # type: ignore[assignment]
    model[4].factor = 2.0
    report = stepscope.accelerate(model)
    assert seen == [model[0], model[4]]
    assert report.replaced[PIECE] == ["0", "1", "2", "3", "5"]


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
