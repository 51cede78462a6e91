"""Run the real command line in its own directory, with planted studies and known ceilings."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import psutil

from stepscope.records.schema import Ceiling, Record
from stepscope.records.store import Store

TESTS = Path(__file__).parent
STUDIES = "planted_study,planted_fresh_study"
GONE_WITHIN_S = 20.0
HANGS_AFTER_S = 400.0
"""Far above the time of any command here, even with all tests running on two cores."""


def python(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python with the words of a command line; return its output as text."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )


_NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, NoTorch())
"""


def without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which torch and Triton cannot be imported."""
    return python("-c", _NO_TORCH + textwrap.dedent(code), *arguments)


class CommandLine:
    """`stepscope` as started by a user, with all its files in one directory."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.environment = os.environ | {
            "STEPSCOPE_OUT": str(self.out),
            "STEPSCOPE_STUDIES": STUDIES,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "",
        }

    def know_ceilings(self, *more: Ceiling) -> None:
        """Fill the cache of ceilings as a first run would, without the minute it takes."""
        from stepscope.measure import ceilings
        from stepscope.measure.device import CpuDevice
        from stepscope.measure.environment import describe

        known = Ceiling(name="matmul.float32", value=1e12, unit="FLOP/s", source="measured")
        with (
            mock.patch.dict(os.environ, self.environment),
            mock.patch.object(ceilings, "measure_ceilings", return_value=(known, *more)),
        ):
            ceilings.ceilings(CpuDevice(), describe(CpuDevice()))

    def command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "stepscope", *words]

    def __call__(
        self, *words: str, timeout: float = HANGS_AFTER_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def line(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a command line that is written as in a shell."""
        return self(*shlex.split(text))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start in a new session, so that a signal reaches only this process."""
        return subprocess.Popen(
            self.command(words),
            env=self.environment,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def records(self, *, all_attempts: bool = False) -> tuple[Record, ...]:
        with Store(self.out / "records.db", create=False) as store:
            return store.records(all_attempts=all_attempts)

    def processes(self) -> list[psutil.Process]:
        """Running processes of this directory, which have inherited its path in STEPSCOPE_OUT."""
        result = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("STEPSCOPE_OUT") == str(self.out):
                    result.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return [p for p in result if p.pid != os.getpid()]

    def left_behind(self) -> list[psutil.Process]:
        """Processes that still run after a generous time limit."""
        deadline = time.monotonic() + GONE_WITHIN_S
        # Each decision is by one look: a process that is just starting appears between two.
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left
