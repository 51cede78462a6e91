"""`stepscope doctor`: check what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from operator import itemgetter
from typing import Literal

import msgspec

from stepscope.cli.common import StoreOptions, json_line, parse
from stepscope.errors import StepscopeError
from stepscope.report.format import bytes_
from stepscope.report.tables import col, table
from stepscope.runner.process import WorkerProcess

Verdict = Literal["ok", "missing", "not applicable", "broken"]


_OF_OTHER_DEVICES = ("bfloat16-units", "tf32", "fp8", "graph", "cublas", "kernels")
"""Capabilities of hardware that this machine does not have: nothing can be installed for them."""
_NAMES = {
    "bfloat16-units": "bfloat16 matmuls",
    "tf32": "TF32 matmuls",
    "fp8": "FP8 matmuls",
    "graph": "CUDA graphs",
    "cublas": "cuBLAS",
    "kernels": "Triton kernels",
    "tuned-attention": "tuned attention",
    "compiler": "torch.compile",
}


class Check(msgspec.Struct, frozen=True):
    """Result of one check, with the fix if it failed."""

    what: str
    verdict: Verdict
    found: str
    fix: str = ""


class DoctorOptions(StoreOptions, frozen=True, kw_only=True):
    json: bool = False
    """Print one line of JSON instead of the table."""


def main(words: list[str]) -> int:
    options = parse(
        DoctorOptions,
        words,
        "doctor",
        "Check what this machine has, what is missing, and how to get it.",
        ("stepscope doctor", "stepscope doctor --json"),
    )
    checks = [*_software(), *_folder(options), *_device()]
    if options.json:
        print(json_line({"checks": msgspec.to_builtins(checks)}))
    else:
        _print(checks)
    return 1 if any(check.verdict == "broken" for check in checks) else 0


def _print(checks: Sequence[Check]) -> None:
    """Two tables: what was found, and how to get what is missing."""
    from stepscope.report.terminal import print_table

    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]]], ...] = (
        (
            "This machine",
            ("what", "verdict", "found"),
            [(c.what, c.verdict, c.found) for c in checks],
        ),
        (
            "What to do",
            ("what", "how to get it"),
            [(c.what, c.fix) for c in checks if c.fix and c.verdict != "not applicable"],
        ),
    )
    for index, (title, columns, rows) in enumerate(tables):
        if rows:
            print("\n" if index else "", end="")
            print_table(
                table(
                    f"doctor-{index}",
                    title,
                    rows,
                    [col(name, itemgetter(at)) for at, name in enumerate(columns)],
                )
            )


def _software() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("Python", "ok", version)
    for package, why in (
        ("torch", ""),
        ("numpy", ""),
        ("triton", "for Triton kernels and torch.compile on a GPU: pip install triton"),
        ("nvidia-ml-py", "to read GPU clocks and throttling: pip install nvidia-ml-py"),
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
    yield _program("C++ compiler", ("g++", "clang++"), "for torch.compile on a CPU: install g++")
    if util.find_spec("playwright"):
        yield _program(
            "Chromium",
            ("chromium", "chromium-browser", "google-chrome"),
            "for the browser tests of the page: make browser",
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
            "output folder", "broken", f"{options.out}: {error.strerror}", "choose one with --out"
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
        yield from _without_gpu(env.cuda)
    else:
        memory = bytes_(env.device_memory_bytes)
        text = f"{env.device_count} × {env.device_name}, {memory}, driver {env.driver}"
        yield Check("GPU", "ok", text)
        yield _program(
            "Nsight Systems", ("nsys",), "for `stepscope profile-nsys`: part of the CUDA toolkit"
        )
    threads = f"{env.cpu_cores} cores, torch uses {env.threads} threads"
    yield Check("CPU", "ok", f"{env.cpu}, {threads}, {bytes_(env.host_memory_bytes)}")
    for what, reason in worker.lacks.items():
        name = _NAMES.get(what, what)
        if what == "tuned-attention" or (env.device_kind == "cpu" and what in _OF_OTHER_DEVICES):
            yield Check(name, "not applicable", reason)
        else:
            yield Check(name, "missing", "not available", reason)


def _without_gpu(cuda: str | None) -> Iterator[Check]:
    """A machine with an NVIDIA driver that torch cannot use lacks something; others do not."""
    if shutil.which("nvidia-smi") is None:
        yield Check("GPU", "not applicable", "no NVIDIA driver; studies run on the CPU")
    else:
        fix = "check the driver with nvidia-smi" if cuda else "install a CUDA build of torch"
        yield Check("GPU", "missing", "nvidia-smi is installed, but torch sees no GPU", fix)
    yield Check("Nsight Systems", "not applicable", "profiles NVIDIA GPUs")
