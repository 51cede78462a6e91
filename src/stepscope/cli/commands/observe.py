"""`stepscope observe`: run an unmodified training script with an observer that stays on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.advisor.inspect.order import Order
from stepscope.cli.common import DEFAULT_OUT, parse
from stepscope.cli.messages import log
from stepscope.cli.scripts import split_words
from stepscope.errors import UsageError, no_such_file
from stepscope.processes import script_command


class ObserveOptions(msgspec.Struct, frozen=True, kw_only=True):
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """The training script and its arguments."""
    nproc: int = 0
    """Start that many ranks with torchrun on this machine."""
    folder: Path = DEFAULT_OUT / "observer"
    """Folder of the files, one per rank; all ranks share it."""
    every: int = 10
    """Steps of a line."""
    trace: bool = True
    """Trace three steps after a deviation, at most three times."""
    prometheus: Path | None = None
    """Folder for the textfile collector of Prometheus' node exporter."""
    module: bool = False
    """Run SCRIPT as a module, like `python -m` (short: -m)."""

    def __post_init__(self) -> None:
        if self.every < 2 or self.nproc < 0:
            raise UsageError(
                f"--every is {self.every} and --nproc {self.nproc}",
                "a line needs at least 2 steps, and torchrun at least 1 rank",
            )


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, ObserveOptions)
    options = parse(
        ObserveOptions,
        own,
        "observe",
        "Run an unmodified training script and observe all of its steps, on every rank. A line of"
        " JSON every few steps has the step time, split into compute, exposed communication,"
        " loader and host. Stragglers, drift of the step time and growth of the memory are"
        " reported on standard error, and steps are traced after them. The script's output and"
        " exit code are unchanged. Options of observe go before the script, the script's options"
        " after it.",
        (
            "stepscope observe train.py --batch-size 8",
            "stepscope observe --nproc 4 train.py",
            "torchrun --nproc-per-node 8 -m stepscope observe -m mylab.train --steps 1000",
            "stepscope observe --folder /shared/job-17 --prometheus /var/lib/metrics train.py",
            "stepscope trace stepscope-out/observer",
        ),
    )
    if target is None:
        raise UsageError("no script is given", "use: stepscope observe [options] script.py")
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "give a module after -m")
    order = Order(
        target=target,
        module=options.module,
        words=tuple(rest),
        warmup=0,
        timed=1,
        traced=int(options.trace),
        memory=False,
        observe="always",
        every=options.every,
        prometheus="" if options.prometheus is None else str(options.prometheus.absolute()),
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    text = msgspec.json.encode(order).decode()
    folder = str(options.folder.absolute())
    command = script_command(folder, text, *flags, ranks=options.nproc)
    if os.environ.get("RANK", "0") == "0":
        log(f"observing; afterwards or meanwhile: stepscope trace {options.folder}")
    sys.stdout.flush()
    sys.stderr.flush()
    # This process becomes the script's: signals and exit code are its own.
    os.execv(command[0], command)
