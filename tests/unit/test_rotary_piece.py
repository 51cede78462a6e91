"""`accelerate` on rotary positions of a user's own class: tables of the module, one kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.acceleration.pieces import rotary
from stepscope.acceleration.pieces.rotary import PIECE
from stepscope.kernels.triton import rope as triton_rope

HEADS, LENGTH, D = 3, 6, 8


def angles(n: int, d: int = D, theta: float = 100.0) -> Tensor:
    return torch.outer(torch.arange(n), theta ** (-torch.arange(0, d, 2) / d))


class RoPE(nn.Module):
    """Adjacent pairs, with positions as an argument."""

    cos: Tensor
    sin: Tensor

    def __init__(self, d: int = D) -> None:
        super().__init__()
        table = angles(32, d)
        self.register_buffer("cos", table.cos(), persistent=False)
        self.register_buffer("sin", table.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = self.cos[positions], self.sin[positions]
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


class RotaryEmbedding(nn.Module):
    """Halves, with positions from zero, in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        table = angles(x.shape[-2], x.shape[-1])
        c, s = (torch.cat((t, t), -1).to(x.dtype) for t in (table.cos(), table.sin()))
        first, second = x.chunk(2, -1)
        return x * c + torch.cat((-second, first), -1) * s


class PartialRotary(RotaryEmbedding):
    """Halves of the first half of a head."""

    def forward(self, x: Tensor) -> Tensor:
        entries = x.shape[-1] // 2
        return torch.cat((super().forward(x[..., :entries]), x[..., entries:]), -1)


class PartialRoPE(RoPE):
    def __init__(self) -> None:
        super().__init__(D // 2)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((super().forward(x[..., : D // 2], positions), x[..., D // 2 :]), -1)


class complex_rotary(nn.Module):  # noqa: N801
    """Adjacent pairs as complex numbers, rotated in the other direction."""

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.polar(torch.tensor(1.0), -angles(x.shape[-2], x.shape[-1]))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class ScaledRoPE(RoPE):
    """Also multiplies by a number, as YaRN does."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return 1.3 * super().forward(x, positions)


class NormedRoPE(RoPE):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x / x.norm(dim=-1, keepdim=True), positions)


class ShiftedRoPE(RoPE):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, positions) + 0.1


class SwappedRoPE(RoPE):
    """The second entry of a pair first."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, positions).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


class SummedRoPE(RoPE):
    """Also adds the sequences before each one: on one sequence it is a rotation."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x, positions).cumsum(0)


class RoPEOfTokensFirst(RoPE):
    """Rotates along the third-last dimension: tokens come before heads."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2), positions).transpose(1, 2)


class Layer(nn.Module):
    """Rotates two projections of x, with one module."""

    def __init__(self, rope: nn.Module, form: Callable[[Tensor], Tensor], positions: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, HEADS * D), nn.Linear(16, HEADS * D)
        self.rope, self.form, self.positions = rope, form, positions
        self.given: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        args = (torch.arange(n),) if self.positions else ()
        heads = (self.form(p(x).unflatten(-1, (HEADS, D))) for p in (self.q, self.k))
        q, k = (self.rope(one, *args, **self.given) for one in heads)
        return q.tanh() * k


def four(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def three(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def layer_of(
    kind: type[nn.Module], form: Callable[[Tensor], Tensor] = four, positions: bool | None = None
) -> Layer:
    torch.manual_seed(0)
    return Layer(kind(), form, issubclass(kind, RoPE) if positions is None else positions)


def results(model: nn.Module, length: int = LENGTH, dtype: torch.dtype | None = None) -> list[Any]:
    x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length))
    x = x.to(dtype).requires_grad_()
    out = model(x)
    gradients = torch.autograd.grad(out.double().square().sum(), [x, *model.parameters()])
    return [out.detach(), *gradients]


def assert_same(model: nn.Module, plain: nn.Module, length: int = LENGTH, **how: Any) -> None:
    """Compare outputs, gradients and dtypes."""
    pairs = zip(results(model, length, **how), results(plain, length, **how), strict=True)
    for actual, expected in pairs:
        close = (1e-4, 1e-5) if expected.dtype == torch.float32 else (2e-2, 2e-2)
        torch.testing.assert_close(actual, expected, rtol=close[0], atol=close[1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each launch of the kernel, whether pairs were adjacent."""
    seen: list[bool] = []
    launch = triton_rope.rotate_tiles

    def watched(*arguments: Tensor, interleaved: bool, back: bool) -> None:
        seen.append(interleaved)
        launch(*arguments, interleaved=interleaved, back=back)

    monkeypatch.setattr(triton_rope, "rotate_tiles", watched)
    return seen


def reasons(report: Any) -> list[str]:
    return [left.reason for left in report.left if left.piece == PIECE]


@pytest.mark.parametrize("form", [four, three])
@pytest.mark.parametrize(
    "kind", [RoPE, RotaryEmbedding, PartialRotary, PartialRoPE, complex_rotary, ScaledRoPE]
)
def test_rotations_of_every_form(
    kind: type[nn.Module], form: Callable[[Tensor], Tensor], launches: list[bool]
) -> None:
    model, plain = layer_of(kind, form), layer_of(kind, form)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert report.replaced[PIECE] == ["rope"]
    assert set(launches) == {kind not in (RotaryEmbedding, PartialRotary)}
    launches.clear()
    # Another call, another length, and evaluation mode with gradients.
    for length in (LENGTH, LENGTH + 5, 2):
        assert_same(model, plain, length)
    assert len(launches) == 3 * 4
    assert_same(model.eval(), plain.eval())
    with torch.no_grad():
        launches.clear()
        x = torch.randn(2, LENGTH, 16)
        torch.testing.assert_close(model(x), plain(x))
        assert not launches
    assert report.replaced[PIECE] == ["rope"]
    assert not reasons(report)


@pytest.mark.parametrize("kind", [RoPE, RotaryEmbedding, complex_rotary])
def test_the_result_has_the_dtype_of_the_original(
    kind: type[nn.Module], launches: list[bool]
) -> None:
    """RoPE has tables in float32, so that it returns float32 for heads in float16."""
    model, plain = (layer_of(kind).half() for _ in range(2))
    for one in (model, plain):
        # `half()` casts buffers.
        one.rope = kind()
    report = stepscope.accelerate(model)
    out = model(torch.randn(2, LENGTH, 16).half())
    assert out.dtype == (torch.float32 if kind is RoPE else torch.float16)
    for _ in range(2):
        assert_same(model, plain, dtype=torch.float16)
    assert report.replaced[PIECE] == ["rope"]
    assert launches


def test_positions_are_those_of_the_call(launches: list[bool]) -> None:
    model, plain = (layer_of(RoPE, positions=False) for _ in range(2))
    report = stepscope.accelerate(model)
    for positions in (torch.arange(LENGTH), torch.arange(LENGTH) + 7, torch.arange(LENGTH)[None]):
        for one in (model, plain):
            one.given = {"positions": positions}
        assert_same(model, plain)
    # Written in place, and of another module state.
    for one in (model, plain):
        one.given["positions"].add_(3)
        one.rope.cos.mul_(0.5)
    assert_same(model, plain)
    assert report.replaced[PIECE] == ["rope"]
    # Of the comparison, one forward and one backward.
    assert len(launches) == 2 + 4 * 4


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", [RoPE, RotaryEmbedding, complex_rotary])
def test_the_result_has_the_strides_of_the_original(
    kind: type[nn.Module], order: int, launches: list[bool]
) -> None:
    """What follows may call `view`, which depends on them."""
    rope, plain = nn.Sequential(kind()), kind()
    stepscope.accelerate(rope)
    # Heads of a projection, and contiguous ones.
    for dims in ((0, 2, 1, 3), (0, 1, 2, 3))[::order]:
        x = torch.randn(2, LENGTH, HEADS, D).permute(dims).requires_grad_()
        more = (torch.arange(x.shape[2]),) if kind is RoPE else ()
        for _ in range(2):
            out, expected = rope[0](x, *more), plain(x, *more)
            assert out.stride() == expected.stride()
    assert launches


def test_heads_as_a_keyword(launches: list[bool]) -> None:
    rope, plain = nn.Sequential(RoPE()), RoPE()
    report = stepscope.accelerate(rope)
    x = torch.randn(2, HEADS, LENGTH, D, requires_grad=True)
    how = {"x": x, "positions": torch.arange(LENGTH)}
    torch.testing.assert_close(rope[0](**how), plain(**how))
    assert report.replaced[PIECE] == ["0"]
    assert launches


@pytest.mark.parametrize("kind", [NormedRoPE, ShiftedRoPE, SwappedRoPE, SummedRoPE])
def test_other_functions_are_left(kind: type[nn.Module], launches: list[bool]) -> None:
    model, plain = layer_of(kind), layer_of(kind)
    report = stepscope.accelerate(model)
    for _ in range(2):
        assert_same(model, plain)
    assert PIECE not in report.replaced
    assert reasons(report) == ["it computes something else than a rotation of pairs"]
    assert not launches


@pytest.mark.parametrize("heads", [HEADS, LENGTH])
def test_tokens_before_heads_are_left(heads: int, launches: list[bool]) -> None:
    """Also with as many heads as tokens, where every shape fits."""
    rope, plain = nn.Sequential(RoPEOfTokensFirst()), RoPEOfTokensFirst()
    report = stepscope.accelerate(rope)
    x = torch.randn(2, LENGTH, heads, D, requires_grad=True)
    torch.testing.assert_close(rope[0](x, torch.arange(LENGTH)), plain(x, torch.arange(LENGTH)))
    assert PIECE not in report.replaced
    assert len(reasons(report)) == 1
    assert not launches


class LearnedRoPE(RoPE):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class DropEdge(RoPE):
    """Its name has the letters."""


def test_modules_that_are_no_candidates() -> None:
    for kind in (LearnedRoPE, DropEdge, nn.Dropout):
        report = stepscope.accelerate(nn.Sequential(kind()))
        assert PIECE not in report.replaced
        assert not reasons(report)


class RoPEOfAngles(RoPE):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        table = positions[..., None] * angles(2)[1]
        c, s = table.cos(), table.sin()
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


SAME = torch.arange(LENGTH).float()


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "other",
    [SAME.clone().requires_grad_(), SAME + torch.arange(HEADS)[:, None]],
    ids=["learned", "of each head"],
)
def test_positions_that_are_learned_or_differ_between_heads(
    other: Tensor, is_first: bool, launches: list[bool]
) -> None:
    """If the first call has them it is left; in a later call the original runs."""
    rope, plain = nn.Sequential(RoPEOfAngles()), RoPEOfAngles()
    report = stepscope.accelerate(rope)
    x = torch.randn(2, HEADS, LENGTH, D, requires_grad=True)

    def compare(positions: Tensor) -> int:
        """Return the number of launches after the comparison of the first call."""
        rope[0](x, positions)
        launches.clear()
        wanted = [x, positions] if positions.requires_grad else [x]
        outs = [module(x, positions) for module in (rope[0], plain)]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), wanted) for out in outs]
        torch.testing.assert_close(*grads)
        return len(launches)

    if is_first:
        assert [compare(one) for one in (other, SAME)] == [0, 0]
        assert PIECE not in report.replaced
        assert reasons(report) == ["its angles are learned, or differ between heads"]
    else:
        assert [compare(one) for one in (SAME, other, SAME)] == [2, 0, 2]
        assert report.replaced[PIECE] == ["0"]


@pytest.mark.parametrize("dims", [3, 4])
def test_positions_of_each_sequence(dims: int, launches: list[bool]) -> None:
    rope, plain = nn.Sequential(RoPEOfAngles()), RoPEOfAngles()
    report = stepscope.accelerate(rope)
    # As many sequences as heads, as tokens, and one.
    for batch in (2, HEADS, LENGTH, 1, 2):
        x = torch.randn(batch, *(HEADS,) * (dims - 3), LENGTH, D, requires_grad=True)
        positions = SAME + 2 * torch.arange(batch).view(batch, *(1,) * (dims - 2))
        launches.clear()
        outs = [module(x, positions) for module in (rope[0], plain)]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), x) for out in outs]
        torch.testing.assert_close(*grads)
        assert len(launches) >= 2
    assert report.replaced[PIECE] == ["0"]


class RotaryTables(nn.Module):
    """Returns cosines and sines, as in Hugging Face's models."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = angles(x.shape[-2])
        return table.cos() * x.mean(), table.sin()


class RotaryIndex(nn.Module):
    """Called with positions."""

    def forward(self, positions: Tensor) -> Tensor:
        return angles(32)[positions]


def test_modules_that_return_tables_are_left() -> None:
    rope = nn.Sequential(RotaryTables(), RotaryIndex())
    report = stepscope.accelerate(rope)
    x = torch.randn(2, HEADS, LENGTH, D, requires_grad=True)
    rope[0](x)
    rope[1](torch.arange(3))
    assert PIECE not in report.replaced
    assert reasons(report) == [
        "it does not return rotated heads",
        "its first argument is not (batch, heads, seq, d_head) or (batch, seq, d_head)",
    ]


def test_a_capture_reads_nothing(monkeypatch: pytest.MonkeyPatch, launches: list[bool]) -> None:
    """In a capture an unknown layout is not searched for, and a known one is used."""
    model, plain = layer_of(RoPE), layer_of(RoPE)
    report = stepscope.accelerate(model)
    found: list[tuple[int, ...]] = []
    search = rotary._matching_layout

    def searched(x: Tensor, call: Any) -> Any:
        found.append(tuple(x.shape))
        return search(x, call)

    monkeypatch.setattr(rotary, "_matching_layout", searched)
    with monkeypatch.context() as capturing:
        capturing.setattr(rotary, "is_capturing", lambda: True)
        assert_same(model, plain)
        assert (found, launches) == ([], [])
    assert_same(model, plain)
    assert len(found) == 1
    launches.clear()
    units = len(rotary._UNITS)
    with monkeypatch.context() as capturing:
        capturing.setattr(rotary, "is_capturing", lambda: True)
        capturing.setattr(torch.Tensor, "item", None)
        capturing.setattr(torch.Tensor, "__bool__", None)
        out = model(torch.randn(2, LENGTH + 1, 16))
        out.sum().backward()
    assert out.shape[-2] == LENGTH + 1
    assert len(launches) == 4
    assert len(found) == 1
    assert len(rotary._UNITS) == units
    assert report.replaced[PIECE] == ["rope"]


def test_a_first_call_that_shows_no_layout(launches: list[bool]) -> None:
    """At position zero nothing rotates; the layout is found in the next call."""
    model, plain = layer_of(RoPE), layer_of(RoPE)
    report = stepscope.accelerate(model)
    assert_same(model, plain, length=1)
    assert not launches
    assert_same(model, plain)
    assert launches == [True] * 4
    assert report.replaced[PIECE] == ["rope"]


class RoPEOfShortSequences(RoPE):
    """Does something else with more than one token."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        out = super().forward(x, positions)
        return out if x.shape[-2] == 1 else out.tanh()


class RoPEOfGradients(RoPE):
    """Refuses random heads of more than one token."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-2] > 1 and not x.requires_grad:
            raise TypeError
        return super().forward(x, positions)


@pytest.mark.parametrize("kind", [RoPEOfShortSequences, RoPEOfGradients])
def test_another_function_in_a_later_call_runs_as_it_is(
    kind: type[RoPE], launches: list[bool]
) -> None:
    model, plain = layer_of(kind), layer_of(kind)
    stepscope.accelerate(model)
    for length in (1, LENGTH, LENGTH):
        assert_same(model, plain, length)
    assert not launches


def test_heads_of_other_sizes_in_later_calls(launches: list[bool]) -> None:
    rope, plain = nn.Sequential(RotaryEmbedding()), RotaryEmbedding()
    report = stepscope.accelerate(rope)
    for batch, d in ((0, D), (2, D), (2, 2 * D), (1, D // 2), (0, D), (3, D)):
        x = torch.randn(batch, HEADS, LENGTH, d, requires_grad=True)
        launches.clear()
        torch.testing.assert_close(rope[0](x), plain(x))
        assert bool(launches) == bool(batch)
    assert report.replaced[PIECE] == ["0"]


def test_exclude_undo_and_copies(launches: list[bool]) -> None:
    model, plain = layer_of(RoPE), layer_of(RoPE)
    for exclude in (PIECE, "attention", "rope", RoPE):
        report = stepscope.accelerate(model, exclude=[exclude])
        assert PIECE not in report.replaced
        assert reasons(report) == ["excluded"]
        report.undo()
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert launches
    copied = copy.deepcopy(model)
    report.undo()
    launches.clear()
    assert_same(model, plain)
    assert_same(copied, plain)
    assert not launches


def test_without_kernels_the_original_runs_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    model, plain = layer_of(RoPE), layer_of(RoPE)
    calls: list[Tensor] = []
    run = RoPE.forward

    def counted(self: RoPE, x: Tensor, positions: Tensor) -> Tensor:
        calls.append(x)
        return run(self, x, positions)

    monkeypatch.setattr(RoPE, "forward", counted)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert report.replaced[PIECE] == ["rope"]
    calls.clear()
    model(torch.randn(2, LENGTH, 16))
    assert len(calls) == 2


class InPlaceRoPE(RoPE):
    """Overwrites its argument."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        with torch.no_grad():
            return x.copy_(super().forward(x, positions))


def test_a_module_that_writes_its_argument_keeps_the_tables_of_others() -> None:
    rotary._UNITS.clear()
    model, plain = layer_of(RoPE), layer_of(RoPE)
    writing = nn.Sequential(InPlaceRoPE())
    stepscope.accelerate(writing)
    for length in (1, LENGTH):
        writing[0](torch.randn(2, HEADS, length, D), torch.arange(length) + 3)
    stepscope.accelerate(model)
    assert_same(model, plain)
    for unit in rotary._UNITS.values():
        assert sorted(unit.unique().tolist()) == [0.0, 1.0]
