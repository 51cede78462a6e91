"""Updates of AdamW beside the products of a backward: what sharing the processors of a GPU brings.

    python benchmarks/beside_products.py --size xl --context 512 --aside 8 16 24

The products that a backward makes for some blocks (gradients of inputs and weights, in the formats
of bfloat16 autocast) and the updates of their weights, as CUDA graphs: each alone, one after the
other, updates wherever a product leaves a processor idle, and updates on processors that products
leave alone. The graphs take turns. Also counts the fills that cuBLAS puts between its products.
`--paired 1` gives a program of the updates one processor instead of two neighbours. It takes about
20 seconds; `CUBLAS_WORKSPACE_CONFIG=:0:0` before it shows products without work space.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from stepscope.measure.device import pick_device
from stepscope.measure.turns import time_in_turns
from stepscope.model.kernels.products import wide_product
from stepscope.model.sizes import find_size
from stepscope.optim import triton_adamw
from stepscope.optim.processors import products_leave

Call = Callable[[], None]
BATCH, BYTES_OF_AN_UPDATE = 4, 30
"""Weight and moments read and written, the gradient read, a copy of two bytes written."""


class Layer:
    """A weight with what its backward reads and what AdamW holds of it."""

    def __init__(self, rows: int, columns: int, tokens: int) -> None:
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.copy = torch.randn(rows, columns, **half)  # type: ignore[call-overload]
        self.input = torch.randn(tokens, columns, **half)  # type: ignore[call-overload]
        self.grad_output = torch.randn(tokens, rows, **half)  # type: ignore[call-overload]
        self.held = [torch.rand(rows, columns, device="cuda") for _ in range(3)]
        self.gradient = torch.rand(rows, columns, device="cuda")

    def products(self) -> None:
        torch.mm(self.grad_output, self.copy)
        self.gradient = wide_product(self.grad_output.t(), self.input, torch.float32)

    def update(self, settings: Tensor, processors: int) -> None:
        weight, mean, square = self.held
        triton_adamw.update_one(
            weight, self.gradient, mean, square, self.copy, settings, 0, processors
        )


class Backward:
    def __init__(self, size: str, context: int, blocks: int) -> None:
        config = find_size(size, "2025")
        d, ff = config.d_model, config.d_ff
        shapes = [(2 * ff, d), (d, ff), (d, d), (3 * d, d)] * blocks
        self.layers = [Layer(rows, columns, BATCH * context) for rows, columns in shapes]
        self.settings = torch.tensor([[1.0, 0.1, 0.95, 0.05, 1e-8, 0.0, 1.0]], device="cuda")
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.moved = BYTES_OF_AN_UPDATE * sum(layer.gradient.numel() for layer in self.layers)

    def products(self) -> None:
        for layer in self.layers:
            layer.products()

    def updates(self, processors: int) -> None:
        for layer in self.layers:
            layer.update(self.settings, processors)

    def one_after_the_other(self) -> None:
        self.products()
        self.updates(0)

    def both(self, processors: int) -> None:
        first = torch.cuda.current_stream()
        for layer in self.layers:
            layer.products()
            self.side.wait_stream(first)
            with torch.cuda.stream(self.side):
                layer.update(self.settings, processors)
        first.wait_stream(self.side)


def captured(work: Call, aside: int) -> torch.cuda.CUDAGraph:
    device = torch.device("cuda")
    graph = torch.cuda.CUDAGraph()
    with products_leave(aside, device) if aside else nullcontext():
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
    parser.add_argument("--aside", type=int, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--paired", type=int, default=triton_adamw.PAIRED)
    parser.add_argument("--block", type=int, default=triton_adamw.FILLING_BLOCK)
    options = parser.parse_args()
    triton_adamw.PAIRED, triton_adamw.FILLING_BLOCK = options.paired, options.block
    backward = Backward(options.size, options.context, options.blocks)
    forms: dict[str, tuple[Call, int]] = {
        "products alone": (backward.products, 0),
        "updates alone": (partial(backward.updates, 0), 0),
        "one after the other": (backward.one_after_the_other, 0),
        "both, updates where there is room": (partial(backward.both, 0), 0),
    }
    for aside in options.aside:
        forms |= {
            f"products leaving {aside}": (backward.products, aside),
            f"updates on {aside}": (partial(backward.updates, aside), 0),
            f"both, {aside} aside": (partial(backward.both, aside), aside),
        }
    graphs = {name: captured(work, aside) for name, (work, aside) in forms.items()}
    timing = time_in_turns(
        {name: graph.replay for name, graph in graphs.items()}, pick_device("cuda"),
        warmup=2, rounds=options.rounds,
    )  # fmt: skip
    print(f"{options.blocks} blocks of {options.size}, {BATCH} × {options.context}")
    for series in timing.series:
        if series.clock != "device":
            continue
        ms = statistics.median(series.values)
        rate = f", {backward.moved / ms * 1e-9:.2f} TB/s" if series.name.startswith("upd") else ""
        more = f", {fills(graphs[series.name])} fills" if series.name.startswith("prod") else ""
        print(f"{series.name}: {ms:.3f} ms{rate}{more}")


if __name__ == "__main__":
    main()
