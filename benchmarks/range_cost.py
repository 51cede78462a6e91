"""What named ranges cost a training step while no profiler runs.

    python benchmarks/range_cost.py [--device cuda]

Times the same step in turns with ranges and with `named` replaced by a context that does nothing
at all, and counts the ranges of a step; prints the best of both, their difference, and what one
range costs by itself.
"""

from __future__ import annotations

import argparse
import time
import timeit
from contextlib import nullcontext

from stepscope.measure.device import pick_device
from stepscope.model import layers, loss, transformer
from stepscope.ranges import named
from stepscope.studies.workload import TrainingStep, Workload

MODULES = (layers, loss, transformer)
ROUNDS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="mini")
    options = parser.parse_args()
    device = pick_device(options.device)
    workload = Workload(
        size=options.size, table="2025", context=32, batch=1, dtype="float32",
        attention="reference", compile="no", optimizer="torch", mode="forward-backward",
    )  # fmt: skip
    step = TrainingStep(workload, device)

    def run() -> float:
        step.reset()
        device.synchronize()
        began = time.perf_counter()
        for phase in step.phases():
            phase.run()
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
    with_ranges, without = [], []
    for _ in range(ROUNDS):
        use(named)
        with_ranges.append(run())
        use(lambda name: nothing)  # noqa: ARG005
        without.append(run())
    use(named)
    alone = timeit.timeit(lambda: enter("block"), number=100_000) / 100_000 * 1e6
    ours, bare = min(with_ranges), min(without)
    print(f"{options.size} on {device.name}, forward and backward: {ranges} ranges in a step")
    print(f"with ranges {ours:.3f} ms, without {bare:.3f} ms: {(ours / bare - 1) * 100:+.2f} %")
    share = ranges * alone / 1e3 / bare
    print(f"one range {alone:.2f} µs; {ranges} of them are {share * 100:.2f} % of the step")


def use(marker: object) -> None:
    for module in MODULES:
        module.named = marker


def enter(name: str) -> None:
    with named(name):
        pass


if __name__ == "__main__":
    main()
