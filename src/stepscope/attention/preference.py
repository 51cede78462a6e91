"""Rule by which `auto` prefers our kernels to torch's, as measured on an H200. No torch import.

`FASTEST` lists the inputs for which an implementation is the fastest, by kind: (bytes per element,
largest head dimension, causal, whether several query heads share a key head). `python
benchmarks/attention_regret.py --read RECORD` compares the rule with measurements.
"""

from __future__ import annotations

from typing import NamedTuple

Kind = tuple[int, int, bool, bool]

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Largest head dimension of a kind."""


class Range(NamedTuple):
    """Sizes of the inputs of a kind for which an implementation is the fastest."""

    multiply_adds: int
    """Least multiply-adds of one matmul, without a mask: below, the time is that of the launch, and
    torch's C++ dispatch launches faster."""
    keys: int = 0
    keys_below: int = 1 << 62


FASTEST: dict[str, dict[Kind, Range]] = {
    "hopper": {
        **{
            (2, head_dim, False, grouped): Range(1 << 33, keys=512)
            for head_dim in (64, 128)
            for grouped in (True, False)
        },
        **{(2, 64, True, grouped): Range(1 << 34, keys=8192) for grouped in (True, False)},
        **{(2, 128, True, grouped): Range(1 << 34, keys=2048) for grouped in (True, False)},
    },
    "triton": {
        **{
            (2, head_dim, False, grouped): Range(1 << 32, keys_below=512)
            for head_dim in (64, 128)
            for grouped in (True, False)
        },
        **{
            (2, 64, True, grouped): Range(3 << 32, keys=2560, keys_below=8192)
            for grouped in (True, False)
        },
        (2, 80, True, False): Range(5 << 31),
        (2, 80, False, True): Range(3 << 33, keys_below=4096),
        **{(2, 128, True, grouped): Range(5 << 31, keys_below=2048) for grouped in (True, False)},
        # Torch has no fused float32 kernel for heads that share a key head.
        **{(4, dim, causal, True): Range(1 << 25) for dim in HEAD_DIMS for causal in (True, False)},
        **{(4, 64, causal, False): Range(5 << 29) for causal in (True, False)},
        **{
            (4, dim, causal, False): Range(1 << 33, keys=8192)
            for dim in HEAD_DIMS[1:]
            for causal in (True, False)
        },
    },
}
"""Everything else is left to torch."""


def kind_of(element_bytes: int, head_dim: int, causal: bool, grouped: bool) -> Kind:
    for largest in HEAD_DIMS:
        if head_dim <= largest:
            return element_bytes, largest, causal, grouped
    return element_bytes, HEAD_DIMS[-1], causal, grouped


def reason_against(name: str, kind: Kind, multiply_adds: int, keys: int) -> str | None:
    """Return why `auto` prefers another implementation to this one, or None. The reason has no size
    of the input: the compiler cannot format a symbolic one."""
    sizes = FASTEST[name].get(kind)
    if sizes is None:
        return f"others were faster for: {description(kind)}"
    if multiply_adds < sizes.multiply_adds:
        return (
            f"below {sizes.multiply_adds:.1e} multiply-adds a launch takes longer than the kernel"
        )
    if keys < sizes.keys:
        return f"others were faster for fewer than {sizes.keys} keys: {description(kind)}"
    if keys >= sizes.keys_below:
        return f"others were faster from {sizes.keys_below} keys on: {description(kind)}"
    return None


def description(kind: Kind) -> str:
    element_bytes, largest, causal, grouped = kind
    mask = "causal" if causal else "full"
    heads = "grouped" if grouped else "equal"
    return f"{8 * element_bytes} bit, head dimension up to {largest}, {mask}, {heads} heads"
