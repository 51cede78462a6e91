"""Rule by which `auto` chooses between our kernels and torch's: the smallest predicted time of a
forward and a backward pass on an H200. No torch import.

`COSTS` is fitted to measured times by `python scripts/fit_attention_rule.py`, which also tests the
fit on runs that it leaves out. `python benchmarks/attention_regret.py --read RECORD` compares the
rule with measurements.
"""

from __future__ import annotations

from typing import NamedTuple

from stepscope.attention.specialized import Sizes

Kind = tuple[int, int, bool, bool]
"""Bytes per element, largest head dimension, causal, whether query heads share a key head."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Largest head dimension of a kind."""
MULTIPROCESSORS = 132
"""Of an H200."""
MIN_ROWS = 16
"""Query rows of the smallest matmul of a kernel. Decoding has fewer, and was not measured."""
DIAGONAL = 64
"""Keys of the block on the diagonal of a causal mask, half of which are computed in vain."""
LEFT_TO_TORCH: tuple[Kind, ...] = (
    (2, 80, True, True),
    *((2, 96, causal, grouped) for causal in (True, False) for grouped in (True, False)),
)
"""Kinds for which the kernels are slower at all sizes: cuDNN's take 0.7 to 0.97 of the time at d
80, 0.43 to 0.98 at d 96."""
REPEATABLE_DIMS = (64, 80, 128)
REPEATABLE_FROM = 1 << 33
"""Multiply-adds of a matmul from which the Triton kernels are the fastest ones whose gradients
repeat bit for bit, in 16-bit dtypes with these head dimensions: 1.1 to 2.8 times as fast as
`sdpa_flash`. Torch does not use cuDNN's while `torch.use_deterministic_algorithms` is on."""


class Rate(NamedTuple):
    """Costs per multiprocessor, in microseconds."""

    matmul: float
    """10^6 multiply-adds in each matmul of both passes."""
    rows: float
    """1000 query rows, for any number of keys: loads, stores, what is outside of the loops."""


class Costs(NamedTuple):
    """Costs of an implementation: those of the GPU and those of the host."""

    by_head_dim: dict[int, Rate]
    """By the largest head dimension. Beyond the last one the implementation is not chosen."""
    host: float
    """Time of the host in microseconds: the shortest one recorded."""
    tile: int = 0
    """Rows or keys of the longest program."""
    tail: float = 0.0
    """Part of the longest program in which other multiprocessors have no work left."""
    by_key_head: bool = False
    """The longest program computes its keys for all query heads that share them."""
    grouped_rows: float = 0.0
    """Added to `Rate.rows` where heads share keys: the gradients of each head are added up."""
    skips: bool = True
    """Blocks that a causal mask hides are not computed."""


COSTS: dict[tuple[str, int], Costs] = {
    ("triton", 2): Costs(
        {64: Rate(4.13, 94.8), 80: Rate(4.49, 105), 128: Rate(3.6, 102)},
        host=169, tile=64, tail=0.144, by_key_head=True,
    ),
    ("hopper", 2): Costs(
        {64: Rate(3.74, 95.7), 128: Rate(2.86, 151)},
        host=157, tile=128, tail=0.469, grouped_rows=23.2,
    ),
    ("sdpa", 2): Costs(
        {64: Rate(3.91, 87.4), 80: Rate(4.46, 126), 128: Rate(3.02, 144)},
        host=115, tile=128, tail=0.44, grouped_rows=22.9,
    ),
    ("triton", 4): Costs(
        {64: Rate(34.8, 273), 96: Rate(74.8, 273), 256: Rate(55.1, 273)},
        host=464, tile=64, tail=0.358, by_key_head=True,
    ),
    ("sdpa", 4): Costs(
        {64: Rate(52.3, 148), 96: Rate(60.6, 148), 256: Rate(51.9, 148)},
        host=147, tile=64, tail=0.584,
    ),
    ("sdpa_math", 4): Costs({64: Rate(76.3, 271), 256: Rate(62, 271)}, host=691, skips=False),
}  # fmt: skip
"""By implementation and bytes per element; `sdpa_math` is torch's unfused attention. In float32,
head dimensions beyond 128 have the costs of 128; they were not measured."""


class Work(NamedTuple):
    """What an implementation computes for an input, per multiprocessor."""

    matmul: float
    """10^6 multiply-adds in each matmul, evenly distributed."""
    longest: float
    """Those of the longest program."""
    rows: float
    """1000 query rows."""


def kind_of(sizes: Sizes, element_bytes: int) -> Kind:
    grouped = sizes.heads != sizes.key_heads
    for largest in HEAD_DIMS:
        if sizes.head_dim <= largest:
            return element_bytes, largest, sizes.causal, grouped
    return element_bytes, HEAD_DIMS[-1], sizes.causal, grouped


def entry_of(name: str, sizes: Sizes, element_bytes: int) -> tuple[str, int]:
    """Return the key in `COSTS`. Torch has no fused float32 kernel for heads that share keys."""
    unfused = name == "sdpa" and element_bytes == 4 and sizes.heads != sizes.key_heads
    return ("sdpa_math" if unfused else name), element_bytes


def largest_of(costs: Costs, head_dim: int) -> int | None:
    """Return the key in `by_head_dim`."""
    for largest in costs.by_head_dim:
        if head_dim <= largest:
            return largest
    return None


def work_of(costs: Costs, sizes: Sizes) -> Work:
    # Without a branch on a number: the compiler traces this with symbolic sizes.
    heads = sizes.batch * sizes.heads
    scores: float = sizes.rows * sizes.keys
    if sizes.causal and costs.skips:
        scores = (scores + DIAGONAL * sizes.rows) / 2
    grouped = sizes.heads != sizes.key_heads
    shared = sizes.heads / sizes.key_heads if costs.by_key_head and grouped else 1
    longest = costs.tile * shared * (sizes.rows + sizes.keys) / 2
    return Work(
        heads * scores * sizes.head_dim / (1e6 * MULTIPROCESSORS),
        longest * sizes.head_dim / 1e6,
        heads * sizes.rows / (1e3 * MULTIPROCESSORS),
    )


def squared_time(costs: Costs, rate: Rate, sizes: Sizes) -> float:
    """Predict the square of the time in microseconds. The longer one of GPU and host decides; the
    sum of their squares is the smooth transition between them."""
    work = work_of(costs, sizes)
    rows = rate.rows + (costs.grouped_rows if sizes.heads != sizes.key_heads else 0)
    gpu = rate.matmul * (work.matmul + costs.tail * work.longest) + rows * work.rows
    return gpu**2 + costs.host**2


def reason_against(
    name: str,
    sizes: Sizes,
    element_bytes: int,
    *,
    repeatable: bool = False,
    table: dict[tuple[str, int], Costs] = COSTS,
) -> str | None:
    """Return why `auto` prefers another implementation to this one, or None. With `repeatable`,
    gradients must repeat bit for bit. The reason has no size of the input: the compiler cannot
    format a symbolic one."""
    kind = kind_of(sizes, element_bytes)
    if repeatable and element_bytes == 2 and kind[1] in REPEATABLE_DIMS:
        multiply_adds = sizes.batch * sizes.heads * sizes.rows * sizes.keys * sizes.head_dim
        if multiply_adds >= REPEATABLE_FROM:
            return None
        return f"others are faster below {REPEATABLE_FROM:.1e} multiply-adds: {description(kind)}"
    if sizes.rows < MIN_ROWS:
        return f"it was not measured with fewer than {MIN_ROWS} queries"
    if kind in LEFT_TO_TORCH:
        return f"others were faster: {description(kind)}"
    times = {}
    for one in (name, "triton", "sdpa"):
        costs = table.get(entry_of(one, sizes, element_bytes))
        largest = None if costs is None else largest_of(costs, sizes.head_dim)
        if costs is not None and largest is not None:
            times[one] = squared_time(costs, costs.by_head_dim[largest], sizes)
    if name not in times:
        return f"it was not measured: {description(kind)}"
    for one in times:
        if one != name and times[one] <= times[name]:
            return f"{one} is predicted to be faster: {description(kind)}"
    return None


def description(kind: Kind) -> str:
    element_bytes, largest, causal, grouped = kind
    mask = "causal" if causal else "full"
    heads = "grouped" if grouped else "equal"
    return f"{8 * element_bytes} bit, head dimension up to {largest}, {mask}, {heads} heads"
