"""Projections of queries, keys and values as heads: values, gradients, and that nothing is copied
that need not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_joined_model import DEVICE, HALF, draw, hold_to_policy
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pairwise import pairwise
from stepscope.attention import attention
from stepscope.attention.packed import empty_like_packed, packed_heads, split_heads
from stepscope.kernels import qkv
from stepscope.kernels.qkv import projected_heads
from stepscope.kernels.triton import qkv as triton_qkv
from stepscope.kernels.triton.qkv import gather_heads
from stepscope.kernels.weight_copies import WeightCopies

WIDTH = 20
LAYOUTS = {"packed": (1, False, False), "by head": (1, True, False), "transposed": (1, False, True),
           "separate": (3, False, False)}  # fmt: skip


@pairwise({"layout": LAYOUTS, "autocast": [False, True], "impl": ["triton", "sdpa"]})
def test_attention_of_projected_heads(layout: str, autocast: bool, impl: str) -> None:
    count, by_head, transposed = LAYOUTS[layout]
    heads, d_head = 3, 8
    rows = 3 * heads * d_head // count
    x, above = draw(2, 5, WIDTH), draw(2, heads, 5, d_head, seed=3)
    weights = [draw(rows, WIDTH, seed=n) / 4 for n in range(count)]
    biases = [draw(rows, seed=9 + n) for n in range(count)]
    copies = WeightCopies()

    def of(fused: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, *weights, *biases)]
        stored = [w.T.contiguous() if transposed else w for w in leaves[1 : 1 + count]]
        added = leaves[1 + count :]
        on = autocast and dtype == torch.float32
        with torch.autocast(DEVICE, HALF, enabled=on):
            if fused:
                q, k, v = projected_heads(
                    leaves[0], tuple(stored), copies, added, heads=heads, by_head=by_head,
                    transposed=transposed,
                )  # fmt: skip
                out = attention(q, k, v, is_causal=True, impl=impl)
            else:
                packed = functional.linear(leaves[0], torch.cat(leaves[1 : 1 + count]))
                packed = packed + torch.cat(added).to(packed.dtype)
                q, k, v = split_heads(packed, heads, by_head)
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = torch.autograd.grad(out, leaves, above.to(out.dtype))
        # That of a key's bias is zero but for rounding, and has no error of its own.
        of_biases = torch.cat(grads[1 + count :])
        named = {f"d{n}": grad for n, grad in enumerate(grads[: 1 + count])}
        return {"out": out.detach(), "d biases": of_biases, **named}

    hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))


@pytest.mark.parametrize("impl", ["triton", "sdpa"])
@pytest.mark.parametrize("by_head", [False, True], ids=["", "by head"])
def test_gradients_that_attention_writes_into_one_tensor_are_not_copied(
    by_head: bool, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    gather = qkv._gathered
    monkeypatch.setattr(qkv, "_gathered", lambda *a: (gathered.append(a), gather(*a))[1])
    x, weight = draw(2, 16, WIDTH).requires_grad_(), draw(96, WIDTH, seed=1).requires_grad_()
    heads = projected_heads(x, (weight,), WeightCopies(), heads=2, by_head=by_head)
    assert packed_heads(heads, by_head) is not None, "heads are views of one tensor"
    attention(*heads, impl=impl).sum().backward()
    # torch's kernels return three tensors.
    assert len(gathered) == (impl == "sdpa")


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_the_operators_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three gradients are gathered and summed by one kernel: the rest are matmuls."""
    launches = []

    def launched(*given: Any) -> tuple[Tensor, Tensor | None]:
        launches.append(given)
        # Triton's interpreter runs operators of torch.
        with _disable_current_modes():
            return gather_heads(*given)

    monkeypatch.setattr(triton_qkv, "gather_heads", launched)
    x, weight = draw(2, 16, WIDTH).requires_grad_(), draw(96, WIDTH, seed=1).requires_grad_()
    bias = draw(96, seed=2).requires_grad_()
    heads = projected_heads(x, (weight,), WeightCopies(), (bias,), heads=2)
    grads = [draw(2, 2, 16, 16, seed=n) for n in range(3)]
    with _Operators() as operators:
        torch.autograd.grad(heads, (x, weight, bias), grads)
    copying = {"cat", "stack", "clone", "copy_", "_to_copy", "sum", "add", "zeros", "fill_"}
    assert [name for name in operators.names if name == "mm"] == ["mm", "mm"]
    assert not copying & {*operators.names}
    assert len(launches) == 1


def _grads(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Sequence[Tensor]:
    batch, heads, seq, d_head = shape
    flat = [draw(batch, seq, heads, d_head, seed=n).to(dtype) for n in range(3)]
    if layout == "by head":
        return [one.transpose(1, 2).contiguous() for one in flat]
    if layout == "last dimension apart":
        return [one.mT.contiguous().mT.transpose(1, 2) for one in flat]
    return [one.transpose(1, 2) for one in flat]


@pairwise(
    {
        "shape": [(1, 1, 1, 1), (2, 3, 13, 5), (3, 2, 7, 64), (1, 18, 3, 64)],
        "dtype": [torch.float32, torch.float16],
        "by_head": [False, True],
        "layout": ["by token", "by head", "last dimension apart"],
    }
)
def test_gathered_heads(
    shape: tuple[int, ...], dtype: torch.dtype, by_head: bool, layout: str
) -> None:
    grads = _grads(shape, dtype, layout)
    expected = torch.stack([g.transpose(1, 2) for g in grads], dim=3 if by_head else 2).flatten(2)
    sums = torch.empty(expected.shape[-1], device=DEVICE)
    q, k, v = grads
    assert torch.equal(gather_heads(q, k, v, by_head, None)[0], expected)
    gathered, written = gather_heads(q, k, v, by_head, sums)
    assert written is sums
    assert torch.equal(gathered, expected)
    exact = expected.double().sum((0, 1))
    terms = expected.double().abs().sum((0, 1))
    assert bool(((sums - exact).abs() <= 2e-6 * terms).all())


def test_only_exact_views_of_one_tensor_are_packed() -> None:
    packed = draw(2, 5, 24)
    q, k, v = split_heads(packed, 2, False)
    found = packed_heads((q, k, v), False)
    assert found is not None
    assert found.data_ptr() == packed.data_ptr()
    assert torch.equal(found, packed)
    assert packed_heads((q, k, v), True) is None
    assert packed_heads((k, q, v), False) is None
    assert packed_heads((q, k, v.clone()), False) is None
    assert packed_heads((q[:, :, :4], k[:, :, :4], v[:, :, :4]), False) is None
    assert packed_heads((q[0], k[0], v[0]), False) is None
    assert empty_like_packed(q, k, v.clone()) is None
