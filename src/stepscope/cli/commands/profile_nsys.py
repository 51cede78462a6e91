"""`stepscope profile-nsys`: profile a training step with Nsight Systems."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import msgspec

from stepscope.analysis.predict.plan import Mode
from stepscope.cli.common import StoreOptions, parse
from stepscope.cli.messages import write_line
from stepscope.errors import StepscopeError, UsageError
from stepscope.processes import own_command
from stepscope.studies.base import PlannedCase
from stepscope.studies.ddp.cases import DDPFlags
from stepscope.training.flags import WorkloadFlags
from stepscope.training.workload import workloads


class NsysOptions(WorkloadFlags, frozen=True, kw_only=True):
    """The training step to profile: give every flag one value."""

    mode: Mode = "train-step"
    """Part of the step: forward, forward-backward or train-step."""
    warmup: int = 5
    """Warm-up steps before the profiled ones."""
    traced: int = 3
    """Steps to profile."""
    ranks: int = 1
    """From 2 on: profile data parallelism on that many GPUs, with every strategy of `run ddp`."""
    memory: bool = False
    """Record CUDA's allocations too: their size over time, below the NVTX ranges."""
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
            "stepscope profile-nsys --size xl --context 128 --ranks 2",
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
    if options.ranks < 1:
        raise UsageError(f"--ranks is {options.ranks}", "give 1 or more")
    case = _one_case(options)
    memory = ["--cuda-memory-usage=true"] if options.memory else []
    if options.ranks > 1:
        return _of_ranks(options, case, memory)
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
        *memory,
        "--force-overwrite=true",
        f"--output={report}",
        *own_command("stepscope.studies.profile.nsight_steps", config),
    ]
    export = [
        "nsys",
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={report}.sqlite",
        f"{report}.nsys-rep",
    ]
    read = own_command("stepscope", "trace", f"{report}.sqlite", "--out", str(options.out))
    return record, export, read


def _of_ranks(options: NsysOptions, case: PlannedCase, memory: list[str]) -> tuple[list[str], ...]:
    """Commands for several ranks. The profiler follows the processes that the study starts, and
    their ranges are marked by the study; a capture range would end with the first rank."""
    for field in msgspec.structs.fields(NsysOptions):
        shared = field.name in (*DDPFlags.__struct_fields__, "ranks", "memory", "run", "out")
        if not shared and getattr(options, field.name) != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise UsageError(f"{flag} does not apply with --ranks", "leave it out")
    report = options.out / "traces" / f"{case.key}_ranks={options.ranks}"
    taken = [name for name in DDPFlags.__struct_fields__ if name in NsysOptions.__struct_fields__]
    words: list[str] = []
    for field in msgspec.structs.fields(DDPFlags):
        if field.name in taken and field.name != "ranks":
            value = getattr(options, field.name)
            listed = value if isinstance(value, tuple) else (value,)
            if listed not in ((None,), ("",)):
                words += [f"--{field.name.replace('_', '-')}", *map(str, listed)]
    study = ["run", "ddp", *words, "--ranks", str(options.ranks), "--rounds", str(options.traced)]
    record = [
        "nsys",
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *memory,
        "--force-overwrite=true",
        f"--output={report}",
        *own_command("stepscope", *study, "--no-report", "--wait", "0", "--out", str(options.out)),
    ]
    reports = "nvtx_gpu_proj_sum,cuda_gpu_kern_sum"
    return record, ["nsys", "stats", f"--report={reports}", f"{report}.nsys-rep"]


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
