"""The kernels of consecutive steps of one row and form of `acceleration.py`, by their time.

    python benchmarks/row_kernels.py qwen2_0.5b stepscope-compile-passes
    python benchmarks/row_kernels.py linear_2.7b graph-fp8 --fp8       those of `fp8_step.py`
    python benchmarks/row_kernels.py … --snapshot peak.pickle          for `stepscope snapshot`
    python benchmarks/row_kernels.py … --tiny                          sizes for a CPU

The steps are those of training: in a CUDA graph, if the form has one. The sum of the kernels is
above the time of the step where they overlap.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import acceleration
import fp8_step
import torch
from acceleration import Built
from torch.profiler import ProfilerActivity, profile

STEPS = 4


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row")
    parser.add_argument("form")
    parser.add_argument("--fp8", action="store_true", help="rows and forms of fp8_step.py")
    parser.add_argument("--top", type=int, default=45, help="kernels to print")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed steps before")
    parser.add_argument("--snapshot", type=Path, help="file for a snapshot of the memory of a step")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(words)
    which = fp8_step if args.fp8 else acceleration
    of_row = which.parse(["--rows", args.row, "--forms", args.form])
    of_row.tiny |= args.tiny
    kind = fp8_step.Fp8Bench if args.fp8 else acceleration.Bench
    if args.snapshot:
        torch.cuda.memory._record_memory_history()
    built = Built(kind(which.ROWS[args.row], of_row), args.form)
    print(f"first step {built.first_step_s:.1f} s", built.gib)
    print(f"{statistics.median(built.block(args.seconds)):.2f} ms")
    if args.snapshot:
        torch.cuda.memory._dump_snapshot(str(args.snapshot))
    else:
        print(kernels(built, args.top))


def kernels(built: Built, top: int) -> str:
    """Return the kernels that take most time, per step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        built._run(STEPS)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time_total
            calls[event.name] += 1
    lines = [f"{sum(spent.values()) / STEPS / 1e3:8.3f} ms in all kernels"]
    for name, us in spent.most_common(top):
        lines.append(f"{us / STEPS / 1e3:8.3f} ms {calls[name] / STEPS:6.1f} × {name[:150]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
