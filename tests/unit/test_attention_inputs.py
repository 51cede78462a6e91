"""Every invalid input raises an error that names the argument and its value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_inputs import draw
from stepscope.attention import FlashAttentionTorch, attention, explain
from stepscope.errors import UsageError


def bad(**changed: object) -> dict[str, object]:
    tensors = {name: draw(2, 4, 6, 8, dtype=torch.float32) for name in "qkv"}
    return {**tensors, **changed}


def f32(*shape: int) -> Tensor:
    return torch.zeros(shape)


BAD_INPUTS = {
    "a list": (bad(k=[1.0]), "k is a list, not a tensor"),
    "one dimension": (bad(q=f32(8)), r"q has shape \(8,\)"),
    "fewer dimensions": (bad(k=f32(4, 6, 8)), r"k has shape \(4, 6, 8\) and q \(2, 4, 6, 8\)"),
    "head dimension": (bad(k=f32(2, 4, 6, 5)), "head dimension of k is 5, that of q is 8"),
    "no head dimension": (bad(q=f32(2, 4, 6, 0)), "head dimension of q is 0"),
    "no value dimension": (bad(v=f32(2, 4, 6, 0)), "head dimension of v is 0"),
    "integers": (bad(v=torch.ones(2, 4, 6, 8, dtype=torch.int64)), "v is int64; it must be one of"),
    "complex": (bad(q=f32(2, 4, 6, 8).cfloat()), "q is complex64"),
    "dtypes": (bad(k=f32(2, 4, 6, 8).half()), "k is float16 and q is float32"),
    "devices": (bad(v=torch.zeros(2, 4, 6, 8, device="meta")), "v is on meta and q is on cpu"),
    "batches": (bad(k=f32(3, 4, 6, 8)), "batch dimensions differ"),
    "broadcast batch": (bad(v=f32(1, 4, 6, 8)), "v has shape .* batch dimensions differ"),
    "heads of 3-D": (bad(q=f32(4, 6, 8), k=f32(2, 6, 8), v=f32(2, 6, 8)), "batch dimensions"),
    "heads that do not divide": (bad(k=f32(2, 3, 6, 8)), "3 heads do not divide the 4 of q"),
    "more key heads": (bad(k=f32(2, 8, 6, 8)), "8 heads do not divide the 4 of q"),
    "no key heads": (bad(k=f32(2, 0, 6, 8)), "0 heads do not divide the 4 of q"),
    "value heads": (bad(v=f32(2, 2, 6, 8)), r"different heads: \(2, 4, 6, 8\) and \(2, 2, 6, 8\)"),
    "value length": (bad(v=f32(2, 4, 7, 8)), r"different lengths: .* and \(2, 4, 7, 8\)"),
    "infinite scale": (bad(scale=float("inf")), "scale=inf is not a finite number"),
    "scale not a number": (bad(scale=float("nan")), "scale=nan"),
    "alignment": (bad(causal_align="left"), "causal_align='left' is neither top-left nor bottom"),
    "no alignment": (
        bad(q=f32(2, 4, 5, 8), is_causal=True),
        "5 queries over 6 keys .* give causal_align='top-left' .* or 'bottom-right'",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_invalid_input(case: str) -> None:
    given, message = BAD_INPUTS[case]
    q, k, v = (given[name] for name in "qkv")
    how = {name: value for name, value in given.items() if name not in "qkv"}
    for impl in ("auto", "reference", "tiled", "sdpa_math"):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, impl=impl, **how)
    with pytest.raises(ValueError, match=message):
        explain(q, k, v, **how)
    with pytest.raises(ValueError, match=message):
        FlashAttentionTorch.apply(q, k, v, **how)


def test_valid_input() -> None:
    given = bad()
    assert attention(*given.values()).shape == (2, 4, 6, 8)


@pytest.mark.parametrize("how", [{}, {"causal_align": "top-left"}, {"is_causal": True}])
def test_alignment_is_required_only_for_unequal_causal_lengths(how: dict[str, object]) -> None:
    q, k, v = bad().values()
    if "is_causal" not in how:
        q = q[..., :3, :]
    assert attention(q, k, v, **how).shape == q.shape


def test_unknown_implementation() -> None:
    with pytest.raises(UsageError, match=r"attention 'tilde' does not exist .*meant tiled"):
        attention(*bad().values(), impl="tilde")


def test_mixed_dtypes_are_valid_under_autocast() -> None:
    q, k, v = bad().values()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k.half(), v, impl="reference").dtype == torch.bfloat16
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64
    with pytest.raises(ValueError, match="k is float16 and q is float32"):
        attention(q, k.half(), v, impl="reference")
