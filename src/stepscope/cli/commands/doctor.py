"""`stepscope doctor`: check what this machine has, what is missing, and how to get it."""

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
    """Result of one check, with the fix if it failed."""

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
        "Check what this machine has, what is missing for measurements, and how to get it.",
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
                columns=tuple(Column(title=t) for t in ("what", "verdict", "found", "fix")),
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
        ("triton", "needed for Triton kernels and torch.compile on a GPU: pip install triton"),
        ("nvidia-ml-py", "needed to read GPU clocks and throttling: pip install nvidia-ml-py"),
    ):
        try:
            yield Check(package, "ok", metadata.version(package))
        except metadata.PackageNotFoundError:
            needed = package in ("torch", "numpy")
            yield Check(
                package,
                "broken" if needed else "missing",
                "not installed",
                why or f"pip install {package}",
            )
    yield Check("SQLite", "ok", sqlite3.sqlite_version)
    yield _program("C++ compiler", ("g++", "clang++"), "needed for torch.compile: install g++")
    yield _program(
        "Nsight Systems",
        ("nsys",),
        "optional, for `stepscope profile-nsys`; part of the CUDA toolkit",
    )
    if util.find_spec("playwright"):
        yield _program(
            "Chromium",
            ("chromium", "chromium-browser", "google-chrome"),
            "needed for the browser tests of the page: make browser",
        )


def _program(what: str, names: tuple[str, ...], fix: str) -> Check:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return Check(what, "ok", found) if found else Check(what, "missing", "not found", fix)


def _folder(options: DoctorOptions) -> Iterator[Check]:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            free = shutil.disk_usage(options.out).free
        yield Check("output folder", "ok", f"{options.out}, {bytes_(free)} free")
    except OSError as error:
        yield Check(
            "output folder",
            "broken",
            f"{options.out}: {error.strerror}",
            "choose one with --out",
        )


def _device() -> Iterator[Check]:
    """Check the device as a worker process sees it, since workers do the measuring."""
    try:
        worker = WorkerProcess("auto")
    except StepscopeError as error:
        yield Check(
            "worker", "broken", str(error), "see the message; torch may be installed incompletely"
        )
        return
    worker.stop()
    env = worker.environment
    if env.device_kind == "cpu":
        yield Check(
            "GPU",
            "missing",
            "torch sees no NVIDIA GPU",
            "studies run on the CPU; on a GPU machine install a CUDA build of torch",
        )
    else:
        memory = bytes_(env.device_memory_bytes)
        text = f"{env.device_count} × {env.device_name}, {memory}, driver {env.driver}"
        yield Check("GPU", "ok", text)
    threads = f"{env.cpu_cores} cores, torch uses {env.threads} threads"
    yield Check("CPU", "ok", f"{env.cpu}, {threads}, {bytes_(env.host_memory_bytes)}")
    for what, reason in worker.lacks.items():
        yield Check(what, "missing", "not available", reason)
