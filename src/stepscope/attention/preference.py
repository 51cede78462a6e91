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
    """Sizes of the inputs of a kind for which an implementation is the fastest. Multiply-adds are
    those of one matmul, without a mask: the time of few is that of the launches, and torch's C++
    dispatch launches faster."""

    multiply_adds: int
    keys: int = 0
    keys_below: int = 1 << 62
    multiply_adds_below: int = 1 << 80


FASTEST: dict[str, dict[Kind, tuple[Range, ...]]] = {
    "hopper": {
        (2, 64, False, False): (Range(1 << 35, keys=512),),
        (2, 64, False, True): (Range(1 << 35, keys=512),),
        (2, 64, True, False): (Range(1 << 35, keys=5632),),
        (2, 64, True, True): (Range(1 << 35, keys=5632),),
        (2, 128, False, False): (Range(1 << 35, keys=512),),
        (2, 128, False, True): (Range(1 << 35, keys=1024),),
        (2, 128, True, False): (Range(1 << 34, keys=2048), Range(1 << 35, keys=896)),
        (2, 128, True, True): (Range(1 << 34, keys=2560),),
    },
    "triton": {
        (2, 64, False, True): (Range(1 << 32, keys_below=512),),
        # Long rows of few heads: `hopper` has too few tiles, and cuDNN's are uneven too.
        (2, 64, True, False): (Range(1 << 34, keys=5632, multiply_adds_below=1 << 36),),
        (2, 64, True, True): (Range(3 << 32, keys=512, keys_below=5632),),
        (2, 80, False, False): (Range(1 << 32, keys_below=1024),),
        (2, 80, False, True): (Range(3 << 33, keys_below=4096),),
        (2, 80, True, False): (Range(5 << 31),),
        (2, 128, False, False): (Range(1 << 32, keys_below=256),),
        (2, 128, False, True): (Range(1 << 32, keys_below=256), Range(1 << 33, keys_below=640)),
        (2, 128, True, False): (Range(1 << 32, keys_below=256), Range(5 << 31, keys_below=1280)),
        (2, 128, True, True): (Range(5 << 31, keys_below=2560),),
        (4, 64, False, False): (Range(3 << 29, keys=512),),
        (4, 64, True, False): (Range(3 << 29, keys=512),),
        **{
            (4, dim, causal, False): (Range(1 << 33, keys=8192),)
            for dim in HEAD_DIMS[1:]
            for causal in (True, False)
        },
        # Torch has no fused float32 kernel for heads that share a key head.
        (4, 64, False, True): (Range(1 << 25),),
        **{(4, dim, True, True): (Range(1 << 25),) for dim in HEAD_DIMS},
    },
}
"""Everything else is left to torch."""

REPEATABLE: dict[Kind, tuple[Range, ...]] = {
    (2, dim, causal, grouped): (Range(1 << 33),)
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
    ranges = FASTEST[name].get(kind, ())
    if repeatable:
        ranges = REPEATABLE.get(kind, ranges)
    reason = f"others were faster for: {description(kind)}"
    for sizes in ranges:
        if multiply_adds < sizes.multiply_adds:
            sides = f"below {sizes.multiply_adds:.1e} multiply-adds"
        elif multiply_adds >= sizes.multiply_adds_below:
            sides = f"from {sizes.multiply_adds_below:.1e} multiply-adds on"
        elif keys < sizes.keys:
            sides = f"for fewer than {sizes.keys} keys"
        elif keys >= sizes.keys_below:
            sides = f"from {sizes.keys_below} keys on"
        else:
            return None
        reason = f"others were faster {sides}: {description(kind)}"
    return reason


def description(kind: Kind) -> str:
    element_bytes, largest, causal, grouped = kind
    mask = "causal" if causal else "full"
    heads = "grouped" if grouped else "equal"
    return f"{8 * element_bytes} bit, head dimension up to {largest}, {mask}, {heads} heads"
