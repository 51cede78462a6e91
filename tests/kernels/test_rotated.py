"""The out-of-place rotary kernel against float64: layouts of pairs, strides, dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_fused_layers import DEVICE, DTYPES, check, draw, tables
from torch import Tensor

from stepscope.kernels.rope import plain_rotate, rotated
from stepscope.kernels.triton import rope as triton_rope

LAYOUTS = [True, False]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each launch, whether it was that of a backward pass."""
    seen: list[bool] = []
    launch = triton_rope.rotate_tiles

    def watched(*arguments: Tensor, interleaved: bool, back: bool) -> None:
        seen.append(back)
        launch(*arguments, interleaved=interleaved, back=back)

    monkeypatch.setattr(triton_rope, "rotate_tiles", watched)
    return seen


def plain_of(cos: Tensor, sin: Tensor, interleaved: bool) -> Callable[[Tensor], Tensor]:
    def plain(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return plain_rotate(x, cos.to(wide), sin.to(wide), interleaved)

    return plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize(
    ("batch", "heads", "seq", "d", "pairs"),
    [
        (1, 1, 1, 2, 1),
        (2, 3, 5, 16, 8),
        (1, 5, 19, 24, 12),
        (2, 1, 70, 40, 20),
        (1, 3, 7, 20, 6),
        (2, 2, 3, 9, 4),
        (1, 33, 2, 64, 32),
    ],
)
def test_heads_of_every_size(
    batch: int,
    heads: int,
    seq: int,
    d: int,
    pairs: int,
    interleaved: bool,
    dtype: torch.dtype,
    launches: list[bool],
) -> None:
    cos, sin = tables(2 * pairs, seq)

    def fused(x: Tensor) -> Tensor:
        return rotated(x, cos, sin, interleaved=interleaved)

    x = draw(batch, heads, seq, d, dtype=dtype)
    check(fused, plain_of(cos, sin, interleaved), [x], [draw(batch, heads, seq, d, seed=1)])
    assert launches == [False, True]


def test_pairs_are_adjacent_or_halves_and_the_rest_stays() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=DEVICE).view(1, 1, 1, 5)
    cos = torch.zeros(1, 2, device=DEVICE)
    quarter = {"cos": cos, "sin": cos + 1}
    assert rotated(x, **quarter, interleaved=True).flatten().tolist() == [-2, 1, -4, 3, 5]
    assert rotated(x, **quarter, interleaved=False).flatten().tolist() == [-3, -4, 1, 2, 5]


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_strides_of_x_and_of_its_gradient(interleaved: bool, launches: list[bool]) -> None:
    """Heads of a projection, every other token of a longer sequence, and heads of a fused QKV
    projection."""
    cos, sin = tables(8, 6)
    plain = plain_of(cos, sin, interleaved)

    def of_heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 8)).transpose(1, 2)

    views = {
        "heads": lambda x: of_heads(x),
        "every other token": lambda x: of_heads(x[:, ::2]),
        "a part": lambda x: of_heads(x[..., 8:40]),
    }
    for name, view in views.items():
        x = draw(2, 12 if "other" in name else 6, 48)
        out = rotated(view(x), cos, sin, interleaved=interleaved)
        # As attention reads it: heads of a token are adjacent.
        assert out.stride()[1:] == (8, 8 * out.shape[1], 1), name

        def fused(x: Tensor, view: Callable[[Tensor], Tensor] = view) -> Tensor:
            return rotated(view(x), cos, sin, interleaved=interleaved)

        grad = draw(*out.shape, seed=1)
        for upstream in (grad, grad.transpose(1, 2).contiguous().transpose(1, 2)):
            check(fused, lambda x, view=view: plain(view(x)), [x], [upstream])
    # An expanded gradient, and one whose entries are not adjacent.
    x = draw(2, 3, 6, 8).requires_grad_()
    for upstream in (
        torch.ones((), device=DEVICE).expand(x.shape),
        draw(2, 3, 8, 6).transpose(-1, -2),
    ):
        (actual,) = torch.autograd.grad(rotated(x, cos, sin, interleaved=interleaved), x, upstream)
        (expected,) = torch.autograd.grad(plain(x), x, upstream)
        torch.testing.assert_close(actual, expected)
    assert launches == [False, *[False, True] * 2] * 3 + [False, True] * 2


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_a_result_of_another_dtype(interleaved: bool, launches: list[bool]) -> None:
    cos, sin = tables(8, 5)
    x = draw(2, 3, 5, 8, dtype=torch.float16).requires_grad_()
    out = rotated(x, cos, sin, interleaved=interleaved, dtype=torch.float32)
    exact = plain_rotate(x.double(), cos.double(), sin.double(), interleaved)
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)
    grad = draw(2, 3, 5, 8, seed=1)
    (d_x,) = torch.autograd.grad(out, x, grad)
    (d_exact,) = torch.autograd.grad(exact, x, grad.double())
    assert d_x.dtype == torch.float16
    torch.testing.assert_close(d_x, d_exact, rtol=1e-3, atol=1e-3)
    assert launches == [False, True]


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_later_calls_and_tables_with_strides(interleaved: bool, launches: list[bool]) -> None:
    """Other positions and lengths in the next call; cosines and sines in one tensor."""
    x = draw(2, 3, 9, 8)
    for start, seq in ((0, 9), (4, 9), (2, 3), (0, 9)):
        both = torch.stack([table[start : start + seq] for table in tables(8, 20)], -1)
        cos, sin = both[..., 0], both[..., 1]
        heads = x[:, :, :seq]
        expected = plain_rotate(heads, cos, sin, interleaved)
        torch.testing.assert_close(rotated(heads, cos, sin, interleaved=interleaved), expected)
        # Tables with different strides.
        other = rotated(heads, cos.contiguous(), sin, interleaved=interleaved)
        torch.testing.assert_close(other, expected)
    assert launches == [False] * 8


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_tables_of_each_sequence(interleaved: bool, launches: list[bool]) -> None:
    """More sequences than tokens, in the kernel and in plain PyTorch."""
    cos, sin = (torch.stack([t[n : n + 3] for n in range(5)]) for t in tables(8, 9))
    x = draw(5, 2, 3, 8).requires_grad_()
    expected = torch.cat(
        [plain_rotate(x[n : n + 1], cos[n], sin[n], interleaved) for n in range(5)]
    )
    grad = draw(5, 2, 3, 8, seed=1)
    (d_x,) = torch.autograd.grad(expected, x, grad)
    for heads in (x, x.double()):
        out = rotated(heads, cos, sin, interleaved=interleaved, dtype=torch.float32)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], d_x)
    assert launches == [False, True]


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_what_the_kernel_does_not_take(interleaved: bool, launches: list[bool]) -> None:
    cos, sin = tables(8, 5)
    x = draw(2, 3, 5, 8)
    across = draw(2, 3, 8, 5).transpose(-1, -2)
    empty = draw(2, 0, 5, 8)
    for heads in (x.double(), across, empty):
        out = rotated(heads, cos, sin, interleaved=interleaved)
        assert out.dtype == heads.dtype
        torch.testing.assert_close(out, plain_rotate(heads, cos, sin, interleaved))
    learned = cos.clone().requires_grad_()
    out = rotated(x, learned, sin, interleaved=interleaved, dtype=torch.float16)
    assert out.dtype == torch.float16
    assert torch.autograd.grad(out.sum(), learned)[0].abs().sum() > 0
    assert launches == []


def test_a_second_derivative_raises() -> None:
    x = draw(1, 2, 5, 8).requires_grad_()
    out = rotated(x, *tables(8, 5), interleaved=True).sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        grad.square().sum().backward()


def test_tables_of_another_length_raise() -> None:
    with pytest.raises(ValueError, match=r"tables \(6, 4\) and \(6, 4\) do not fit x"):
        rotated(draw(1, 2, 5, 8), *tables(8, 6))
    with pytest.raises(ValueError, match=r"do not fit x \(1, 2, 5, 6\)"):
        rotated(draw(1, 2, 5, 6), *tables(8, 5))
