"""Time until a failed rank is reported: four faults, repeated, on two ranks of this machine.

    python benchmarks/rank_faults.py [REPEATS] [--out results/rank-faults_cpu.jsonl]

A stopped or stuck rank is detected after its limit of 1 s. With --out, every trial becomes a line
of that file, which `scripts/make_docs.py` and `benchmarks/goals.py` read.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stepscope.parallel import Limits, RankFailed, World, launch

LIMIT_S = 1.0
FAULTS = ("dies", "raises", "is stopped", "is stuck")
FAULTY_STEP = 3


def train(world: World, fault: str, mark: str) -> None:
    tensor = torch.ones(1024)
    for number in range(6):
        world.step(number)
        if world.rank == 1 and number == FAULTY_STEP:
            Path(mark).write_text(str(time.monotonic()))
            fail(fault)
        dist.all_reduce(tensor)


def fail(fault: str) -> None:
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raises":
        raise ValueError("planted")
    elif fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(60)


def reported_after(fault: str, mark: Path) -> tuple[float, bool]:
    """Seconds from the fault to the error, and whether the error names the rank and step."""
    try:
        launch(train, (fault, str(mark)), ranks=2, limits=Limits(step=LIMIT_S, beat=LIMIT_S))
    except RankFailed as error:
        passed = time.monotonic() - float(mark.read_text())
        return passed, (error.rank, error.step) == (1, FAULTY_STEP)
    return float("inf"), False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repeats", nargs="?", type=int, default=10)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trials = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            results = [reported_after(fault, Path(folder) / "mark") for _ in range(args.repeats)]
            times = sorted(seconds for seconds, _ in results)
            print(
                f"{fault:12} median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s,"
                f" named {sum(right for _, right in results)}"
                f" of {args.repeats}"
            )
            trials += [
                {
                    "fault": fault,
                    "seconds": seconds,
                    "named": right,
                    "torch": torch.__version__,
                    "cores": os.cpu_count(),
                }
                for seconds, right in results
            ]
    if args.out is not None:
        args.out.write_text("".join(json.dumps(trial) + "\n" for trial in trials))
    return 0 if all(trial["named"] for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
