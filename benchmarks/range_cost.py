"""Cost of named ranges in a training step while no profiler runs.

    python benchmarks/range_cost.py [--device cuda]

Times the same step with ranges and with `named` replaced by an empty context, interleaved in
alternating order, and counts the ranges of a step. Prints the median of the per-round ratios with
its 95 % interval, and the cost of one range.
"""

from __future__ import annotations

import argparse
import time
import timeit
from contextlib import nullcontext

from stepscope.measure.device import pick_device
from stepscope.model import layers, loss, transformer
from stepscope.records.stats import summarize
from stepscope.torch_tools.ranges import named
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

MODULES = (layers, loss, transformer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    device = pick_device(options.device)
    workload = Workload(
        size=options.size, context=32, batch=1, dtype="float32", mode="forward-backward"
    )
    step = TransformerStep(workload, device)

    def run() -> float:
        step.reset()
        device.synchronize()
        began = time.perf_counter()
        step.run_phases()
        device.synchronize()
        return (time.perf_counter() - began) * 1e3

    nothing = nullcontext()
    counted = 0

    def counting(name: str) -> nullcontext[None]:  # noqa: ARG001
        nonlocal counted
        counted += 1
        return nothing

    use(counting)
    for _ in range(5):
        run()
    ranges = counted // 5
    markers = {"with": named, "without": lambda name: nothing}  # noqa: ARG005
    times: dict[str, list[float]] = {variant: [] for variant in markers}
    for number in range(options.rounds):
        for variant in markers if number % 2 else reversed(markers):
            use(markers[variant])
            times[variant].append(run())
    use(named)
    range_us = timeit.timeit(lambda: enter("block"), number=100_000) / 100_000 * 1e6
    ratios = [ours / bare for ours, bare in zip(times["with"], times["without"], strict=True)]
    ratio, bare = summarize(ratios), summarize(times["without"]).median
    print(f"{options.size} on {device.name}, forward and backward: {ranges} ranges in a step")
    print(
        f"with ranges over without: {ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}],"
        f" {options.rounds} rounds of a step of {bare:.3f} ms"
    )
    share = ranges * range_us / 1e3 / bare
    print(f"one range {range_us:.2f} µs; {ranges} of them are {share * 100:.2f} % of the step")


def use(marker: object) -> None:
    for module in MODULES:
        module.named = marker


def enter(name: str) -> None:
    with named(name):
        pass


if __name__ == "__main__":
    main()
