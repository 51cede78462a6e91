"""Predicted time of a step by part, before it runs: the baseline's and ours.

    python benchmarks/step_budget.py [2.7b-2048 2.7b-512 xl-512 xl-2048 small-512 8b-32768]

A GEMM runs at a base rate times the utilization of the SMs by its tiles, for the best of a few tile
sizes; the base rate is that of the compiled forward of 2.7b at context 2048, measured on an H200
(109.1 ms in total). Passes and AdamW run at 0.9 of the measured copy bandwidth. Attention runs at
rates measured separately. Kernels in a graph are a microsecond apart. Needs no GPU.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from step_matmuls import HEAD, step_matmuls
from step_race.races import RACES, RaceSpec, race_spec

from stepscope.analysis.ideal import operations
from stepscope.errors import UsageError
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import flops, parameters
from stepscope.model.sizes import find_size, with_overrides

PROCESSORS = 132
TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 0.97, (128, 128): 0.9, (64, 256): 0.88}
"""Output tile, and the rate of an SM with it relative to the best tile."""
BASE = 665e12
COPY = 4.3e12 * 0.9
DATA_SHEET = 989e12
GAP_MS = 1e-3
KERNELS_PER_BLOCK = 30
ATTENTION = {"2.7b": (257e12, 300e12), "xl": (300e12, 360e12), "small": (120e12, 120e12)}
"""FLOP/s of forward and backward together, of the baseline and ours, at context 2048."""
SHORT = 0.4
"""Fraction of the attention rate that remains at context 512, where there is too little work."""
LONG_CONTEXT = 549e12
HIDDEN = 0.15
"""Fraction of AdamW that overlaps with the backward; measured for 2.7b at context 512."""


class Budget(NamedTuple):
    gemms: float
    attention: float
    passes: float
    casts: float
    optimizer: float
    recompute: float
    gaps: float

    @property
    def total(self) -> float:
        return sum(self)


def gemm_ms(m: int, n: int, k: int) -> float:
    """Time of an m × n × k GEMM."""
    fill = max(
        quality
        * m
        * n
        / (rows * columns)
        / (math.ceil(_tiles(m, n, rows, columns) / PROCESSORS) * PROCESSORS)
        for (rows, columns), quality in TILES.items()
    )
    return 2 * m * n * k / (BASE * fill) * 1e3


def _tiles(m: int, n: int, rows: int, columns: int) -> int:
    return math.ceil(m / rows) * math.ceil(n / columns)


def block_ms(config: ModelConfig, tokens: int, *, fused_projections: bool) -> float:
    """Forward, input gradient and weight gradient of every GEMM of a block."""
    return sum(
        gemm_ms(one.rows, one.columns, one.depth)
        for one in step_matmuls(config, tokens, fused_projections=fused_projections)
        if one.name != HEAD
    )


def budget(spec: RaceSpec, *, ours: bool) -> Budget:
    config = with_overrides(find_size(spec.size, spec.table), context=spec.context)
    dtypes, tokens = precision(spec.dtype), spec.batch * spec.context
    layers, weights = config.n_layers, parameters(config)
    block = block_ms(config, tokens, fused_projections=ours)
    head = 3 * gemm_ms(tokens, config.vocab, config.d_model)
    listed = operations(config, spec.batch, spec.context, dtypes)
    passes = sum(one.instances * one.bytes for one in listed if one.kind == "memory")
    adamw = next(one.bytes for one in listed if one.kind == "optimizer")
    attention = sum(one.instances * one.flops for one in listed if one.kind == "attention")
    rate = LONG_CONTEXT if spec.context > 8192 else ATTENTION[spec.size][ours]
    rate *= SHORT if spec.context <= 512 else 1.0
    # A float32 weight under autocast: cast forward and backward, or a written copy and a wider
    # gradient.
    moved = (4 if ours else 12) * weights.multiplied if dtypes.autocast else 0
    recompute = 0.0
    if spec.checkpoint != "no":
        gates = gemm_ms(tokens, 2 * config.d_ff, config.d_model)
        forward = block / 3 + attention / layers / 3.5 / rate * 1e3
        recompute = spec.thrifty * gates if ours else layers * forward
    return Budget(
        gemms=layers * block + head,
        attention=attention / rate * 1e3,
        passes=passes / COPY * 1e3,
        casts=moved / COPY * 1e3,
        optimizer=adamw / COPY * 1e3 * (1 - HIDDEN if ours else 1),
        recompute=recompute,
        gaps=layers * KERNELS_PER_BLOCK * GAP_MS,
    )


def main() -> int:
    titles = Budget._fields
    print(f"{'step':<10} {'side':<5}" + "".join(f"{title:>11}" for title in titles) + "      total")
    for name in sys.argv[1:] or [name for name in RACES if name != "tiny-64"]:
        try:
            spec = race_spec(name)
        except UsageError as error:
            print(error)
            return 2
        config = with_overrides(find_size(spec.size, spec.table), context=spec.context)
        counted = flops(config, spec.batch, spec.context).step
        totals = {}
        for side in ("baseline", "stepscope"):
            predicted = budget(spec, ours=side == "stepscope")
            totals[side] = predicted.total
            share = counted / (predicted.total * 1e-3) / DATA_SHEET
            parts = "".join(f"{value:>11.1f}" for value in predicted)
            print(f"{name:<10} {side:<5}{parts} {predicted.total:>10.1f} ms, {share:.0%} MFU")
        print(f"{'':<10} {totals['baseline'] / totals['stepscope']:.2f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
