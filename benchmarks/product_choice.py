"""The kernel that cuBLAS takes for a product by rule, against the fastest that it has.

    python benchmarks/product_choice.py --size xl 2.7b --context 512 2048

All products of one block with joined projections, forward and backward, in the formats of bfloat16
autocast: by torch, and by the search of `model.kernels.search`. Each is a CUDA graph over several
sets of operands, so that none lies in the cache because of the launch before; the two take turns.
Sums over a block are what a step gains for each of its blocks. It takes about 5 seconds for a size
at a context.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.measure.device import pick_device
from stepscope.measure.turns import time_in_turns
from stepscope.model.kernels.products import wide_product
from stepscope.model.kernels.search import searched_products
from stepscope.model.sizes import find_size

BATCH, SETS = 4, 3


class Case(NamedTuple):
    name: str
    pairs: list[tuple[Tensor, Tensor]]
    dtype: torch.dtype

    def run(self) -> None:
        for a, b in self.pairs:
            wide_product(a, b, self.dtype)

    def tflop(self) -> float:
        a, b = self.pairs[0]
        return 2e-12 * a.shape[0] * a.shape[1] * b.shape[1] * len(self.pairs)


def drawn(rows: int, columns: int) -> list[Tensor]:
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]


def cases(size: str, context: int) -> Iterator[Case]:
    config = find_size(size, "2025")
    d, ff, tokens = config.d_model, config.d_ff, BATCH * context
    for name, rows, columns in (
        ("gate and up", 2 * ff, d), ("down", d, ff), ("query, key, value", 3 * d, d),
        ("output", d, d),
    ):  # fmt: skip
        x, weight, grad = drawn(tokens, columns), drawn(rows, columns), drawn(tokens, rows)
        half, wide = torch.bfloat16, torch.float32
        forward = [(a, w.T) for a, w in zip(x, weight, strict=True)]
        yield Case(f"{name}, forward", forward, half)
        yield Case(f"{name}, to the input", list(zip(grad, weight, strict=True)), half)
        backward = [(g.T, a) for g, a in zip(grad, x, strict=True)]
        yield Case(f"{name}, to the weight", backward, wide)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return graph


def compared(case: Case, rounds: int) -> tuple[float, float]:
    """Milliseconds of one product: by torch, by the search."""
    graphs = {"torch": captured(case.run)}
    with searched_products():
        graphs["searched"] = captured(case.run)
    timing = time_in_turns(
        {name: graph.replay for name, graph in graphs.items()}, pick_device("cuda"),
        warmup=2, rounds=rounds,
    )  # fmt: skip
    took = {
        series.name: statistics.median(series.values) / SETS
        for series in timing.series
        if series.clock == "device"
    }
    return took["torch"], took["searched"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", default=["xl"])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for size in options.size:
        for context in options.context:
            total = [0.0, 0.0]
            for case in cases(size, context):
                took = compared(case, options.rounds)
                rates = [case.tflop() / SETS / (ms * 1e-3) for ms in took]
                total = [sum(pair) for pair in zip(total, took, strict=True)]
                print(
                    f"{size}, {BATCH} × {context}, {case.name}: {took[0] * 1e3:.1f} µs"
                    f" ({rates[0]:.0f} TFLOP/s), searched {took[1] * 1e3:.1f} µs"
                    f" ({rates[1]:.0f}), {took[0] / took[1]:.3f} times as fast",
                    flush=True,
                )
            print(
                f"{size}, {BATCH} × {context}, a block: {total[0]:.3f} ms, searched"
                f" {total[1]:.3f} ms, {total[0] / total[1]:.3f} times as fast"
            )


if __name__ == "__main__":
    main()
