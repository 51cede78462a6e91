"""Rule by which `auto` prefers the Triton kernels to torch's, as measured on an H200. No torch
import.

One number decides for a kind of input: (bytes per element, largest head dimension, causal, whether
several query heads share a key head). `python benchmarks/attention_regret.py --read RECORD` fits
the numbers to measurements.
"""

from __future__ import annotations

Kind = tuple[int, int, bool, bool]

HEAD_DIMS = (64, 96, 128, 256)
"""Largest head dimension of a kind."""
MIN_MULTIPLY_ADDS: dict[Kind, int] = {
    (2, 64, True, False): 1 << 34,
    (2, 96, True, False): 1 << 34,
    **{
        (4, head_dim, causal, grouped): 1 << 34
        for head_dim in HEAD_DIMS
        for causal in (True, False)
        for grouped in (True, False)
    },
}
"""Multiply-adds of one matmul, without a mask, from which the Triton kernels are preferred: below,
a launch through torch's C++ dispatch is faster. Kinds without an entry are left to torch."""


def kind_of(element_bytes: int, head_dim: int, causal: bool, grouped: bool) -> Kind:
    for largest in HEAD_DIMS:
        if head_dim <= largest:
            return element_bytes, largest, causal, grouped
    return element_bytes, HEAD_DIMS[-1], causal, grouped


def description(kind: Kind) -> str:
    element_bytes, largest, causal, grouped = kind
    mask = "causal" if causal else "full"
    heads = "grouped" if grouped else "equal"
    return f"{8 * element_bytes} bit, head dimension up to {largest}, {mask}, {heads} heads"
