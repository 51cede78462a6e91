"""`stepscope doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata, util
from typing import Literal

import msgspec

from stepscope.cli.common import StoreOptions, json_line, parse
from stepscope.errors import StepscopeError
from stepscope.report.blocks import Column, Table
from stepscope.report.format import bytes_
from stepscope.studies.runner.process import WorkerProcess

Verdict = Literal["ok", "missing", "broken"]


class Check(msgspec.Struct, frozen=True):
    what: str
    verdict: Verdict
    found: str
    mend: str = ""


class DoctorOptions(StoreOptions, frozen=True, kw_only=True):
    json: bool = False
    """Print one line of JSON instead of the table."""


def main(words: list[str]) -> int:
    options = parse(
        DoctorOptions,
        words,
        "doctor",
        "Look at this machine: what measuring needs, what is there, how to get the rest.",
        ("stepscope doctor", "stepscope doctor --json"),
    )
    checks = [*_software(), *_folder(options), *_device()]
    if options.json:
        print(json_line({"checks": msgspec.to_builtins(checks)}))
    else:
        from stepscope.report.terminal import print_table

        print_table(
            Table(
                name="doctor",
                title="This machine",
                columns=tuple(Column(title=t) for t in ("what", "verdict", "found", "mend")),
                rows=tuple((c.what, c.verdict, c.found, c.mend) for c in checks),
            )
        )
    return 1 if any(check.verdict == "broken" for check in checks) else 0


def _software() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("Python", "ok", version)
    for package, why in (
        ("torch", ""),
        ("numpy", ""),
        ("triton", "kernels and torch.compile on a GPU need it: pip install triton"),
        ("nvidia-ml-py", "clocks and throttling of a GPU need it: pip install nvidia-ml-py"),
    ):
        try:
            yield Check(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            needed = package in ("torch", "numpy")
            yield Check(
                package, "broken" if needed else "missing", "not installed",
                why or f"pip install {package}",
            )  # fmt: skip
    yield Check("SQLite", "ok", sqlite3.sqlite_version)
    yield _program("C++ compiler", ("g++", "clang++"), "torch.compile needs one: install g++")
    yield _program(
        "Nsight Systems",
        ("nsys",),
        "optional: a second opinion on kernels; part of the CUDA toolkit",
    )
    if util.find_spec("playwright"):
        yield _program(
            "Chromium",
            ("chromium", "chromium-browser", "google-chrome"),
            "the page's own tests need it: make browser",
        )


def _program(what: str, names: tuple[str, ...], mend: str) -> Check:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return Check(what, "ok", found) if found else Check(what, "missing", "not found", mend)


def _folder(options: DoctorOptions) -> Iterator[Check]:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            free = shutil.disk_usage(options.out).free
        yield Check("output folder", "ok", f"{options.out}, {bytes_(free)} free")
    except OSError as error:
        yield Check(
            "output folder", "broken", f"{options.out}: {error.strerror}", "name one with --out"
        )


def _device() -> Iterator[Check]:
    """What a worker sees, since that is what will measure."""
    try:
        worker = WorkerProcess("auto")
    except StepscopeError as error:
        yield Check("worker", "broken", str(error), "see the message; is torch installed whole?")
        return
    worker.stop()
    here = worker.environment
    if here.device_kind == "cpu":
        yield Check(
            "GPU", "missing", "torch sees no NVIDIA GPU",
            "studies run on the CPU; on a GPU machine install a CUDA build of torch",
        )  # fmt: skip
    else:
        memory = bytes_(here.device_memory_bytes)
        told = f"{here.device_count} × {here.device_name}, {memory}, driver {here.driver}"
        yield Check("GPU", "ok", told)
    threads = f"{here.cpu_cores} cores, torch uses {here.threads} threads"
    yield Check("CPU", "ok", f"{here.cpu}, {threads}, {bytes_(here.host_memory_bytes)}")
    for what, reason in worker.lacks.items():
        yield Check(what, "missing", "not here", reason)
