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
    """Least multiply-adds of one matmul, without a mask. The time of fewer is that of the launches,
    and torch's C++ dispatch launches faster."""
    keys: int = 0
    keys_below: int = 1 << 62


FASTEST: dict[str, dict[Kind, Range]] = {
    "hopper": {
        (2, 64, False, False): Range(1 << 35, keys=512),
        (2, 64, False, True): Range(1 << 35, keys=512),
        (2, 64, True, False): Range(1 << 35, keys=5632),
        (2, 64, True, True): Range(1 << 35, keys=5632),
        (2, 128, False, False): Range(1 << 35, keys=512),
        (2, 128, False, True): Range(1 << 34, keys=512),
        (2, 128, True, False): Range(1 << 34, keys=2048),
        (2, 128, True, True): Range(1 << 34, keys=2560),
    },
    "triton": {
        (2, 64, False, True): Range(1 << 32, keys_below=512),
        (2, 64, True, True): Range(3 << 32, keys=512, keys_below=5632),
        (2, 80, False, False): Range(1 << 32, keys_below=1024),
        (2, 80, False, True): Range(3 << 33, keys_below=4096),
        (2, 80, True, False): Range(5 << 31),
        (2, 128, False, False): Range(1 << 31, keys_below=256),
        (2, 128, False, True): Range(1 << 31, keys_below=256),
        (2, 128, True, False): Range(5 << 31, keys_below=2048),
        (2, 128, True, True): Range(5 << 31, keys_below=2560),
        (4, 64, False, False): Range(3 << 29, keys=512),
        (4, 64, True, False): Range(3 << 29, keys=512),
        **{
            (4, dim, causal, False): Range(1 << 33, keys=8192)
            for dim in HEAD_DIMS[1:]
            for causal in (True, False)
        },
        # Torch has no fused float32 kernel for heads that share a key head.
        (4, 64, False, True): Range(1 << 25),
        **{(4, dim, True, True): Range(1 << 25) for dim in HEAD_DIMS},
    },
}
"""Everything else is left to torch."""

REPEATABLE = {
    (2, dim, causal, grouped): Range(1 << 33)
    for dim in (64, 80, 128)
    for causal in (True, False)
    for grouped in (True, False)
}
"""Inputs for which the Triton kernels are the fastest ones whose gradients repeat bit for bit:
1.1 to 2.8 times as fast as `sdpa_flash`. Torch does not use cuDNN's while
`torch.use_deterministic_algorithms` is on."""


def kind_of(element_bytes: int, head_dim: int, causal: bool, grouped: bool) -> Kind:
    for largest in HEAD_DIMS:
        if head_dim <= largest:
            return element_bytes, largest, causal, grouped
    return element_bytes, HEAD_DIMS[-1], causal, grouped


def reason_against(
    name: str, kind: Kind, multiply_adds: int, keys: int, *, repeatable: bool = False
) -> str | None:
    """Return why `auto` prefers another implementation to this one, or None. With `repeatable`,
    gradients must repeat bit for bit. The reason has no size of the input: the compiler cannot
    format a symbolic one."""
    sizes = FASTEST[name].get(kind)
    if repeatable:
        sizes = REPEATABLE.get(kind, sizes)
    if sizes is None:
        return f"others were faster for: {description(kind)}"
    if multiply_adds < sizes.multiply_adds:
        return (
            f"others were faster below {sizes.multiply_adds:.1e} multiply-adds: {description(kind)}"
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
