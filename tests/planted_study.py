"""A study whose cases succeed, fail, crash or hang on request. Registered with
STEPSCOPE_STUDIES=planted_study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.records.schema import Quantity, Reading, Record, Series
from stepscope.report.blocks import Block, Column, Table
from stepscope.studies.base import Bench, Case, CaseSkipped, Measurement, Study


class PlantedFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the cases."""

    does: tuple[str, ...] = ("ok",)
    """Names of deeds, one case each."""
    times: int = 1
    """Number of cases of each."""
    seconds: float = 0.0
    """Seconds that a successful case takes."""


def _raise() -> None:
    raise RuntimeError("planted\nand more than one line")


def _out_of_device_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _out_of_host_memory() -> None:
    raise MemoryError


def _allocator_fails() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(3600)


def _garbage() -> None:
    sys.stdout.write("this is no reply\n")
    sys.stdout.flush()
    os.write(1, b'{"type": "Measured"}\n\xff\xfe')
    os.system("echo neither is this")


def _leave_processes() -> None:
    """Leave one process in a new session and one whose parent has ended."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    subprocess.Popen(sleeper, start_new_session=True)
    orphan = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)


def _leave_processes_and_die() -> None:
    _leave_processes()
    os.kill(os.getpid(), signal.SIGKILL)


RAW_LINES = {
    "noise": b"a library printed this\n",
    "empty-line": b"\n",
    "not-utf8": b'{"type": "Failed", "status": "error", "reason": "\xff"}\n',
    "wrong-shape": b"[]\n",
    "wrong-reply": b'{"type": "Dismissed"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "escapes": b"\x1b[31mred\n",
}
"""Malformed lines that a worker sends instead of its reply."""


def _skip() -> None:
    raise CaseSkipped("not supported here")


DEEDS: dict[str, Callable[[], object]] = {
    "ok": lambda: None,
    "raise": _raise,
    "device-memory": _out_of_device_memory,
    "host-memory": _out_of_host_memory,
    "allocator": _allocator_fails,
    "segfault": _segfault,
    "killed": _killed,
    "hang": _hang,
    "exit": lambda: sys.exit("planted farewell"),
    "vanish": lambda: os._exit(0),
    "garbage": _garbage,
    "skip": _skip,
    "leave": _leave_processes,
    "leave-and-die": _leave_processes_and_die,
    "nan": lambda: None,
    "huge": lambda: None,
    "busy": lambda: None,
    "busy-once": lambda: None,
}


BUSY = (Reading(at_s=0.0, waited_s=0.0), Reading(at_s=1.0, waited_s=0.9))


def _readings(deed: str) -> tuple[Reading, ...]:
    """`busy`: threads waited for cores. `busy-once`: only in the first measurement, which a file in
    the run's folder marks."""
    before = Path(os.environ["STEPSCOPE_OUT"]) / "measured-before"
    if deed == "busy" or (deed == "busy-once" and not before.exists()):
        before.touch()
        return BUSY
    return ()


class PlantedCase(Case, frozen=True, kw_only=True):
    does: str
    number: int
    seconds: float

    @property
    def key(self) -> str:
        return f"{self.does}-{self.number}"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("tf32",) if self.does == "needs-tf32" else ()


class Planted(Study[PlantedFlags, PlantedCase]):
    name = "planted"
    title = "Planted"
    question = "What becomes of a case that does this?"
    flags = PlantedFlags
    case = PlantedCase

    def cases(self, flags: PlantedFlags) -> tuple[PlantedCase, ...]:
        return tuple(
            PlantedCase(does=deed, number=number, seconds=flags.seconds)
            for number in range(flags.times)
            for deed in flags.does
        )

    def measure(self, case: PlantedCase, bench: Bench) -> Measurement:
        bench.progress(1, 2, "planted")
        time.sleep(case.seconds)
        if line := RAW_LINES.get(case.does):
            bench._channel.write(line)  # type: ignore[attr-defined]
            bench._channel.flush()  # type: ignore[attr-defined]
            time.sleep(3600)
        DEEDS[case.does]()
        value = {"nan": float("nan"), "huge": 1e308}.get(case.does, 1.0)
        return Measurement(
            series=(Series(name="step", unit="ms", values=(value,) * 3),),
            quantities=(Quantity(name="pid", value=os.getpid(), unit="process"),),
            notes={"did": case.does},
            readings=_readings(case.does),
        )

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return (
            Table(
                name="planted",
                title="Planted",
                columns=(Column(title="case"), Column(title="status")),
                rows=tuple((record.case, record.status) for record in records),
            ),
        )


STUDY = Planted()
