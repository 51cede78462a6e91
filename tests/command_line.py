"""Starts the real command line in a place of its own, with planted studies and known ceilings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import psutil

from stepscope.records.schema import Ceiling, Record
from stepscope.records.store import Store

TESTS = Path(__file__).parent
STUDIES = "planted_study,planted_fresh_study"
GONE_WITHIN_S = 20.0
HANGS_AFTER_S = 400.0
"""Far above what any command here takes with all tests beside it on two cores."""


class CommandLine:
    """`stepscope` as a person would start it, keeping everything under one folder."""

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
            env=self.environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        """In a group of its own, so that a signal reaches what it is meant for alone."""
        return subprocess.Popen(
            self.command(words),
            env=self.environment, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def records(self, *, all_attempts: bool = False) -> tuple[Record, ...]:
        with Store(self.out / "records.db", create=False) as store:
            return store.records(all_attempts=all_attempts)

    def processes(self) -> list[psutil.Process]:
        """Whatever still runs of this place: it has inherited the name of the folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("STEPSCOPE_OUT") == str(self.out):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return [p for p in found if p.pid != os.getpid()]

    def left_behind(self) -> list[psutil.Process]:
        """What is still there after a generous while."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.processes()
