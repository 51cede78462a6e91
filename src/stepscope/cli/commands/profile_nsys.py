"""`stepscope profile-nsys`: profile a training step with Nsight Systems."""

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
    """The training step to profile: give every flag one value."""

    mode: Mode = "train-step"
    """Part of the step: forward, forward-backward or train-step."""
    warmup: int = 5
    """Warm-up steps before the profiled ones."""
    traced: int = 3
    """Steps to profile."""
    run: bool = True
    """Run the commands if `nsys` is installed; with --no-run only print them."""
    out: Path = StoreOptions().out
    """Directory of the record store and the reports (environment: STEPSCOPE_OUT)."""


def main(words: list[str]) -> int:
    options = parse(
        NsysOptions,
        words,
        "profile-nsys",
        "Profile a training step with Nsight Systems and analyze the result. Prints the commands,\n"
        "and runs them if nsys is installed.",
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
        write_line("nsys is not installed here; run these commands on a machine that has it")
    return 0


def nsys_commands(options: NsysOptions) -> tuple[list[str], ...]:
    """Return the commands that record, export and analyze, each as a list of words."""
    case = _one_case(options)
    report = options.out / "traces" / case.key
    config = msgspec.json.encode(case.config).decode()
    # The capture range (cudaProfilerStart to Stop) excludes the warm-up. CPU sampling is off: it
    # would slow down the host, and launches are timed on the host.
    record = [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,cublas,cudnn",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report}",
        sys.executable,
        "-m",
        "stepscope.studies.profile.nsight_steps",
        config,
    ]
    export = [
        "nsys",
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={report}.sqlite",
        f"{report}.nsys-rep",
    ]
    read = [
        sys.executable,
        "-m",
        "stepscope",
        "trace",
        f"{report}.sqlite",
        "--out",
        str(options.out),
    ]
    return record, export, read


def _one_case(options: NsysOptions) -> PlannedCase:
    planned = list(workloads(options, (options.mode,)))
    if len(planned) != 1:
        raise UsageError(
            f"the flags name {len(planned)} steps, but one is profiled", "give every flag one value"
        )
    (workload,) = planned
    effort = {"warmup": options.warmup, "traced": options.traced}
    return PlannedCase(
        study="profile", key=workload.key, config=msgspec.to_builtins(workload) | effort
    )
