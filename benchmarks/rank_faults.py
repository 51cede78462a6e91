"""How long until a failed rank is named: four faults, repeated, on two ranks of this machine.

    python benchmarks/rank_faults.py [REPEATS]

A death or an exception must be named within 1 s, a stopped or stuck rank within its limit + 1 s.
"""

from __future__ import annotations

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
BOUNDS_S = {"dies": 1.0, "raises": 1.0, "is stopped": LIMIT_S + 1, "is stuck": LIMIT_S + 1}
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


def noticed_after(fault: str, mark: Path) -> tuple[float, bool]:
    """Seconds from the fault to the error, and whether it names rank and step."""
    try:
        launch(train, (fault, str(mark)), ranks=2, limits=Limits(step=LIMIT_S, beat=LIMIT_S))
    except RankFailed as error:
        passed = time.monotonic() - float(mark.read_text())
        return passed, (error.rank, error.step) == (1, FAULTY_STEP)
    return float("inf"), False


def main(repeats: int) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for fault, bound_s in BOUNDS_S.items():
            found = [noticed_after(fault, Path(folder) / "mark") for _ in range(repeats)]
            times = sorted(seconds for seconds, _ in found)
            named = sum(right for _, right in found)
            missed += sum(seconds > bound_s or not right for seconds, right in found)
            print(
                f"{fault:12} median {times[len(times) // 2]:.2f} s, worst {times[-1]:.2f} s"
                f" (at most {bound_s:g} s), named {named} of {repeats}"
            )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
