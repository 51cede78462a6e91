"""Triton kernels of norm with residual add, SwiGLU and rotary embedding against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accuracy import hold_to_policy
from pairwise import pairwise
from stepscope.kernels import add_rms_norm, rms_norm, rotated_heads_, swiglu
from stepscope.kernels.activation import PLAIN
from stepscope.kernels.norm import MAX_COLUMNS, plain_rms_norm
from stepscope.kernels.rope import plain_rotate
from stepscope.kernels.triton import activation as triton_activation
from stepscope.kernels.triton import norm as triton_norm
from stepscope.kernels.triton import rope as triton_rope
from stepscope.model.layers import RotaryEmbedding

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 incorrectly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
EPS = 1e-5


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(DEVICE, dtype)


def results(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    grads: list[Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    leaves = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
    returned = function(*leaves)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    upstream = [grad.to(out.dtype) for grad, out in zip(grads, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    return {
        **{f"output {n}": out.detach() for n, out in enumerate(outputs)},
        **{f"d_input {n}": grad for n, grad in enumerate(gradients)},
    }


def check(
    fused: Callable[..., Tensor | tuple[Tensor, ...]],
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
    grads: list[Tensor],
) -> None:
    candidate = results(fused, inputs, grads)
    for number, x in enumerate(inputs):
        assert candidate[f"d_input {number}"].dtype == x.dtype
    hold_to_policy(
        results(plain, inputs, grads, torch.float64), results(plain, inputs, grads), candidate
    )


def plain_add_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = x + branch
    return stream, plain_rms_norm(stream, weight, EPS)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran: the naive version in their place would be as accurate."""
    seen: list[str] = []

    def watch(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def watched(*arguments: object, **named: object) -> object:
            seen.append(f"{module.__name__.rpartition('.')[2]} {name}")
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, watched)

    for module in (triton_norm, triton_activation):
        watch(module, "forward")
        watch(module, "backward")
    watch(triton_rope, "rotate")
    return seen


def test_frozen_weights_have_no_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the input is the same; there is no second launch."""
    reductions: list[Tensor] = []
    original = triton_norm.add_up
    monkeypatch.setattr(
        triton_norm, "add_up", lambda *given: (reductions.append(given[0]), original(*given))
    )
    x, weight = draw(7, 40).requires_grad_(), draw(40, seed=1)
    results = []
    for frozen in (False, True):
        leaf = weight.clone().requires_grad_(not frozen)
        rms_norm(x, leaf, EPS).backward(draw(7, 40, seed=3))
        results.append(x.grad)
        assert (leaf.grad is None) == frozen
        x.grad = None
    assert torch.equal(*results)
    assert len(reductions) == 1


@pytest.mark.parametrize(("parts", "d"), [(1, 1), (4, 16), (300, 37)])
def test_partial_sums_are_added(parts: int, d: int) -> None:
    partial = torch.randn(parts, d, device=DEVICE)
    total = torch.empty(d, device=DEVICE)
    triton_norm.add_up(partial, total)
    torch.testing.assert_close(total.double(), partial.double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "d"), [(1, 1), (3, 16), (11, 100), (9, 768), (5, 1600), (2, 5120)]
)
def test_sum_and_norm(rows: int, d: int, dtype: torch.dtype, launches: list[str]) -> None:
    inputs = [draw(1, rows, d, dtype=dtype, seed=n) for n in range(2)]
    weight = 1 + 0.1 * draw(d, dtype=dtype, seed=2)
    grads = [draw(1, rows, d, seed=n) for n in (3, 4)]
    check(lambda *x: add_rms_norm(*x, EPS), plain_add_norm, [*inputs, weight], grads)
    assert launches == ["norm forward", "norm backward"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_alone(dtype: torch.dtype, launches: list[str]) -> None:
    inputs = [draw(2, 7, 96, dtype=dtype), 1 + 0.1 * draw(96, dtype=dtype, seed=1)]
    grads = [draw(2, 7, 96, seed=2)]
    check(lambda *x: rms_norm(*x, EPS), lambda *x: plain_rms_norm(*x, EPS), inputs, grads)
    assert launches == ["norm forward", "norm backward"]


def test_a_branch_in_lower_precision_as_under_autocast() -> None:
    """The stream stays float32, and the next matmul gets its input in the matmul dtype."""
    x, branch, weight = draw(4, 64), draw(4, 64, dtype=torch.float16, seed=1), draw(64, seed=2)
    grads = [draw(4, 64, seed=3), draw(4, 64, seed=4).half().float()]

    def fused(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(*inputs, EPS, out_dtype=torch.float16)

    def plain(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        stream, normed = plain_add_norm(*inputs)
        return stream, normed if stream.dtype == torch.float64 else normed.half()

    stream, normed = fused(x, branch, weight)
    assert (stream.dtype, normed.dtype) == (torch.float32, torch.float16)
    check(fused, plain, [x, branch, weight], grads)


@pytest.mark.parametrize("unused", [0, 1], ids=["stream", "normed"])
def test_one_output_without_gradient(unused: int) -> None:
    inputs = [draw(4, 40, seed=n).requires_grad_() for n in range(3)]
    inputs[2] = draw(40).requires_grad_()
    grad = draw(4, 40, seed=5)
    actual = torch.autograd.grad(
        add_rms_norm(*inputs, EPS)[1 - unused], inputs, grad, allow_unused=True
    )
    expected = torch.autograd.grad(
        plain_add_norm(*inputs)[1 - unused], inputs, grad, allow_unused=True
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "non_contiguous", [draw(80)[::2], torch.tensor(1.5, device=DEVICE).expand(40)]
)
def test_a_non_contiguous_weight(non_contiguous: Tensor, launches: list[str]) -> None:
    x = draw(4, 40)
    expected = plain_rms_norm(x, non_contiguous, EPS)
    torch.testing.assert_close(rms_norm(x, non_contiguous, EPS), expected, rtol=1e-5, atol=1e-5)
    assert launches == ["norm forward"]


def test_a_weight_of_another_width_raises() -> None:
    with pytest.raises(ValueError, match="rows of 40"):
        rms_norm(draw(4, 40), draw(20), EPS)


def test_rows_that_are_too_wide_use_the_naive_version(launches: list[str]) -> None:
    x, weight = draw(1, MAX_COLUMNS + 1), draw(MAX_COLUMNS + 1)
    assert torch.equal(rms_norm(x, weight, EPS), plain_rms_norm(x, weight, EPS))
    assert launches == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 100), (2, 5, 1000)], ids=str)
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype, launches: list[str]) -> None:
    inputs = [3 * draw(*shape, dtype=dtype, seed=n) for n in range(2)]
    check(swiglu, lambda a, b: functional.silu(a) * b, inputs, [draw(*shape, seed=2)])
    assert launches == ["activation forward", "activation backward"]


@pairwise({"activation": PLAIN, "gated": [False, True], "dtype": DTYPES})
def test_activations(activation: str, gated: bool, dtype: torch.dtype) -> None:
    """Of the halves of one tensor, with the sum of the gradient over the rows."""
    rows, width = 19, 1100
    gates = 2 * draw(rows, 2 * width, dtype=dtype)
    gate, up = gates.chunk(2, dim=1)
    above = draw(rows, width, dtype=dtype, seed=1)
    up_or_none = up if gated else None
    grads = torch.empty_like(gates)
    grad_gate, grad_up = grads.chunk(2, dim=1)
    recomputed, bias = torch.empty_like(above), torch.empty(width, device=DEVICE)
    out = triton_activation.forward(gate, up_or_none, activation)
    triton_activation.backward(
        above, gate, up_or_none, grad_gate, grad_up if gated else None, activation, recomputed, bias
    )
    assert torch.equal(out, recomputed)

    def plain(wide: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in (gate, up)]
        y = PLAIN[activation](leaves[0])
        y = y * leaves[1] if gated else y
        made = torch.autograd.grad(y, leaves[: 1 + gated], above.to(wide))
        named = {"out": y.detach(), "d gate": made[0], "d bias": made[0].float().sum(0)}
        if wide == torch.float64:
            named["d bias"] = made[0].sum(0)
        return named | ({"d up": made[1]} if gated else {})

    candidate = {"out": out, "d gate": grad_gate, "d bias": bias, "d up": grad_up}
    hold_to_policy(plain(torch.float64), plain(dtype), candidate)


@pytest.mark.parametrize("activation", PLAIN)
def test_activations_of_extreme_values(activation: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -10.0, 0.0, 10.0, 100.0, 1e4]], device=DEVICE)
    out, grad = triton_activation.forward(x, None, activation), torch.empty_like(x)
    triton_activation.backward(torch.ones_like(x), x, None, grad, None, activation)
    leaf = x.double().requires_grad_()
    exact = PLAIN[activation](leaf)
    torch.testing.assert_close(out.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        grad.double(), torch.autograd.grad(exact.sum(), leaf)[0], rtol=1e-5, atol=1e-6
    )


def test_gelu_in_half_precision_is_exact_to_its_rounding() -> None:
    """Over all magnitudes, with the derivative. Infinity and NaN give what torch gives."""
    special = torch.tensor([0.0, -0.0, 6e4, -6e4, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.linspace(-9, 9, 4001), special]).half().view(1, -1).to(DEVICE)
    out, grad = triton_activation.forward(x, None, "gelu"), torch.empty_like(x)
    triton_activation.backward(torch.ones_like(x), x, None, grad, None, "gelu")
    leaf = x.double().requires_grad_()
    exact = functional.gelu(leaf)
    (slope,) = torch.autograd.grad(exact.sum(), leaf)
    for actual, expected in ((out, exact.detach()), (grad, slope)):
        torch.testing.assert_close(
            actual[:, :-3].double(), expected[:, :-3], rtol=2**-11, atol=4e-7
        )
    assert (
        out[0, -3:]
        .float()
        .cpu()
        .allclose(torch.tensor([torch.inf, torch.nan, torch.nan]), equal_nan=True)
    )
    assert grad[0, -1].isnan()


def test_swiglu_of_large_values_and_non_contiguous_inputs() -> None:
    gate = torch.tensor([[-100.0, 100.0], [-1e4, 0.0]], device=DEVICE)
    up = torch.full((2, 2), 2.0, device=DEVICE)
    assert swiglu(gate.T, up).tolist() == [[0.0, 0.0], [200.0, 0.0]]


def tables(d_head: int, context: int) -> tuple[Tensor, Tensor]:
    rotary = RotaryEmbedding(d_head, context, device=DEVICE, dtype=torch.float32)
    return rotary.cos, rotary.sin


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "d_head"),
    [(1, 1, 1, 2), (2, 5, 3, 64), (1, 7, 25, 80), (1, 2, 80, 256)],
)
def test_rotated_heads(
    batch: int, seq: int, heads: int, d_head: int, dtype: torch.dtype, launches: list[str]
) -> None:
    cos, sin = tables(d_head, seq + 3)

    def fused(x: Tensor) -> Tensor:
        # A leaf cannot be overwritten; the output of a projection can.
        return rotated_heads_(x * 1, cos, sin, heads)

    def plain(x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        heads_first = x.unflatten(-1, (heads, d_head)).transpose(1, 2)
        return plain_rotate(heads_first, cos.to(wide), sin.to(wide))

    x = draw(batch, seq, heads * d_head, dtype=dtype)
    check(fused, plain, [x], [draw(batch, heads, seq, d_head, seed=1)])
    assert launches == ["rope rotate"] * 2


def test_rotation_is_in_place_and_its_gradient_needs_no_copy() -> None:
    cos, sin = tables(8, 6)
    x = draw(2, 6, 24).requires_grad_()
    projected = x * 1
    before = projected.detach().clone()
    rotated = rotated_heads_(projected, cos, sin, 3)
    assert rotated.data_ptr() == projected.data_ptr()
    assert not torch.equal(projected, before)
    assert rotated.shape == (2, 3, 6, 8)
    # As attention returns it: with the strides of its input.
    grad = torch.empty_like(rotated).normal_()
    before_backward = grad.clone()
    (back,) = torch.autograd.grad(rotated, x, grad)
    assert torch.equal(grad, before_backward), "the incoming gradient must not be modified"
    # A rotation preserves the norm.
    torch.testing.assert_close(back.norm(), grad.norm())


def test_a_sequence_longer_than_the_table_raises() -> None:
    with pytest.raises(ValueError, match="sequence of 9 exceeds the rotary table for 6"):
        rotated_heads_(draw(1, 9, 8), *tables(8, 6), 1)
