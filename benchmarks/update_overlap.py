"""AdamW updates overlapped with the GEMMs of a backward: the gain from running both concurrently.

    python benchmarks/update_overlap.py --size xl --context 512

The GEMMs of a backward of some blocks (gradients of inputs and weights, in the dtypes of bfloat16
autocast) and the updates of their weights, as CUDA graphs: each alone, one after the other, and
overlapped, where updates use the SMs that a GEMM leaves idle. The graphs run interleaved. Also
counts the fills that cuBLAS inserts between its GEMMs. It takes about 10 seconds; with
`CUBLAS_WORKSPACE_CONFIG=:0:0` the GEMMs run without workspace.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from stepscope.kernels.matmul import matmul_to_dtype
from stepscope.measure.device import pick_device
from stepscope.measure.interleaved import time_interleaved
from stepscope.model.sizes import find_size
from stepscope.optim.triton_adamw import update_one

Call = Callable[[], None]
BATCH, BYTES_OF_AN_UPDATE = 4, 30
"""Bytes per element: weight and moments read and written, gradient read, 16-bit copy written."""


class Layer:
    """A weight with the inputs of its backward and its AdamW state."""

    def __init__(self, rows: int, columns: int, tokens: int) -> None:
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.copy = torch.randn(rows, columns, **half)  # type: ignore[call-overload]
        self.input = torch.randn(tokens, columns, **half)  # type: ignore[call-overload]
        self.grad_output = torch.randn(tokens, rows, **half)  # type: ignore[call-overload]
        self.state = [torch.rand(rows, columns, device="cuda") for _ in range(3)]
        self.gradient = torch.rand(rows, columns, device="cuda")

    def gemms(self) -> None:
        torch.mm(self.grad_output, self.copy)
        self.gradient = matmul_to_dtype(self.grad_output.t(), self.input, torch.float32)

    def update(self, settings: Tensor) -> None:
        weight, mean, square = self.state
        update_one(weight, self.gradient, mean, square, self.copy, settings, 0)


class Backward:
    def __init__(self, size: str, context: int, blocks: int) -> None:
        config = find_size(size, "2025")
        d, ff = config.d_model, config.d_ff
        shapes = [(2 * ff, d), (d, ff), (d, d), (3 * d, d)] * blocks
        self.layers = [Layer(rows, columns, BATCH * context) for rows, columns in shapes]
        self.settings = torch.tensor([[1.0, 0.1, 0.95, 0.05, 1e-8, 0.0, 1.0]], device="cuda")
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.moved = BYTES_OF_AN_UPDATE * sum(layer.gradient.numel() for layer in self.layers)

    def gemms(self) -> None:
        for layer in self.layers:
            layer.gemms()

    def updates(self) -> None:
        for layer in self.layers:
            layer.update(self.settings)

    def one_after_the_other(self) -> None:
        self.gemms()
        self.updates()

    def both(self) -> None:
        first = torch.cuda.current_stream()
        for layer in self.layers:
            layer.gemms()
            self.side.wait_stream(first)
            with torch.cuda.stream(self.side):
                layer.update(self.settings)
        first.wait_stream(self.side)


def captured(work: Call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):  # type: ignore[no-untyped-call]
        work()
    return graph


def fills(graph: torch.cuda.CUDAGraph) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    return sum(row.count for row in profile.key_averages() if row.key.startswith("Memset"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="xl")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    backward = Backward(options.size, options.context, options.blocks)
    variants: dict[str, Call] = {
        "GEMMs alone": backward.gemms,
        "updates alone": backward.updates,
        "one after the other": backward.one_after_the_other,
        "updates overlapped with GEMMs": backward.both,
    }
    graphs = {name: captured(work) for name, work in variants.items()}
    timing = time_interleaved(
        {name: graph.replay for name, graph in graphs.items()},
        pick_device("cuda"),
        warmup=2,
        rounds=options.rounds,
    )
    print(f"{options.blocks} blocks of {options.size}, {BATCH} × {options.context}")
    for series in timing.series:
        if series.clock != "device":
            continue
        ms = statistics.median(series.values)
        rate = (
            f", {backward.moved / ms * 1e-9:.2f} TB/s" if series.variant == "updates alone" else ""
        )
        more = f", {fills(graphs[series.variant])} fills" if series.variant == "GEMMs alone" else ""
        print(f"{series.variant}: {ms:.3f} ms{rate}{more}")


if __name__ == "__main__":
    main()
