"""`stepscope profile-nsys`: the same step under Nsight Systems."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from stepscope.cli.common import StoreOptions, parse
from stepscope.cli.messages import write_line
from stepscope.errors import StepscopeError, UsageError
from stepscope.studies.base import PlannedCase
from stepscope.studies.training.workload import Mode, WorkloadFlags, workloads


class NsysOptions(WorkloadFlags, frozen=True, kw_only=True):
    """One training step: give every flag one value."""

    mode: Mode = "train-step"
    """forward, forward-backward or train-step."""
    warmup: int = 5
    """Steps before Nsight Systems begins to record."""
    traced: int = 3
    """Steps that it records."""
    run: bool = True
    """Run the commands where `nsys` is installed; otherwise, and with --no-run, print them."""
    out: Path = StoreOptions().out
    """Folder of the record store and the reports (or set STEPSCOPE_OUT)."""


def main(words: list[str]) -> int:
    options = parse(
        NsysOptions,
        words,
        "profile-nsys",
        "Record a training step with Nsight Systems and read the recording: prints the commands,\n"
        "and runs them where nsys is installed.",
        (
            "stepscope profile-nsys --size small --context 512",
            "stepscope profile-nsys --size xl --dtype bfloat16 --mode forward --no-run",
        ),
    )
    commands = nsys_commands(options)
    installed = shutil.which("nsys") is not None
    for command in commands:
        print(shlex.join(command), flush=True)
        if options.run and installed:
            done = subprocess.run(command)
            if done.returncode:
                raise StepscopeError(f"{command[0]} ended with exit code {done.returncode}")
    if options.run and not installed:
        write_line("nsys is not installed here: run these where it is")
    return 0


def nsys_commands(options: NsysOptions) -> tuple[list[str], ...]:
    """Record, export, read: each as the words of a command."""
    case = _one_case(options)
    report = options.out / "traces" / case.key
    config = msgspec.json.encode(case.config).decode()
    # The range of cudaProfilerStart and Stop leaves the warm-up out. The process is not sampled:
    # that would slow down what the launches are measured by.
    record = [
        "nsys", "profile", "--trace=cuda,nvtx,cublas,cudnn", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true",
        f"--output={report}",
        sys.executable, "-m", "stepscope.studies.profile.nsight_steps", config,
    ]  # fmt: skip
    export = [
        "nsys", "export", "--type=sqlite", "--force-overwrite=true",
        f"--output={report}.sqlite", f"{report}.nsys-rep",
    ]  # fmt: skip
    read = [sys.executable, "-m", "stepscope", "trace", f"{report}.sqlite", "--out",
            str(options.out)]  # fmt: skip
    return record, export, read


def _one_case(options: NsysOptions) -> PlannedCase:
    found = list(workloads(options, (options.mode,)))
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} steps are asked for", "give every flag one value: one step is recorded"
        )
    (workload,) = found
    effort = {"warmup": options.warmup, "traced": options.traced}
    return PlannedCase(
        study="profile",
        key=workload.key,
        config=msgspec.to_builtins(workload) | effort,
    )
