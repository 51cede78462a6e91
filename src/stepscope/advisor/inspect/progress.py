"""Progress of an observed script, its latest steps, and the reason if it left no recording."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.advisor.inspect.child import describe_end
from stepscope.records.decoding import from_json
from stepscope.report.format import counted

_PROGRESS, _LIVE = "progress", "live"
CHILD_STEPPED = "child-stepped"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the recording in one process."""

    torch: bool = False
    """True once it has imported torch."""
    optimizer_steps: int = 0
    optimizers: int = 0
    steps: int = 0
    """Training steps since the first optimizer step."""
    needed: int = 0
    """Steps of a complete recording, including the warm-up."""
    recorded: bool = False
    out_of_memory: str = ""
    """The error with which the script ran out of memory."""
    failure: str = ""
    """Error that ended the recording but not the script."""

    @property
    def complete(self) -> bool:
        """True if all steps were recorded."""
        return self.recorded and self.steps >= self.needed


class LiveSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The latest steps of a program, for `inspect --watch`."""

    steps: int = 0
    """Steps so far."""
    step_ms: tuple[float, ...] = ()
    """Times of the latest steps, the newest last."""
    loading: float = 0.0
    """Share of these steps in which the program waited for a DataLoader."""
    stage: str = ""
    """What is done with the current step; empty outside the recording."""
    memory_bytes: int | None = None
    """Memory allocated on the GPU; None without one."""
    peak_bytes: int | None = None


Written = TypeVar("Written", Progress, LiveSteps)


def write_progress(folder: Path, progress: Progress) -> None:
    _write(_file(folder, _PROGRESS), progress)


def read_progress(folder: Path) -> Progress:
    return _read(_file(folder, _PROGRESS), Progress)


def write_live(folder: Path, live: LiveSteps) -> None:
    _write(_file(folder, _LIVE), live)


def read_live(folder: Path) -> LiveSteps:
    return _read(_file(folder, _LIVE), LiveSteps)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}-{os.environ.get('RANK', '0')}.json"


def _write(path: Path, value: msgspec.Struct) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(value))
    temporary.replace(path)


def _read(path: Path, kind: type[Written]) -> Written:
    try:
        return from_json(path.read_bytes(), kind)
    except (OSError, msgspec.DecodeError):
        return kind()


def why_nothing(progress: Progress, name: str, status: int, child_stepped: bool, fix: str) -> str:
    """Explain in one line why a script left no recording. `status` is its wait status, `fix` says
    what to do if it ran too few steps."""
    ending = describe_end(status)
    if progress.out_of_memory:
        steps = counted(progress.optimizer_steps, "optimizer step")
        return f"{name} ran out of memory after {steps}: {progress.out_of_memory}"
    if progress.failure:
        return f"{name} {ending}; it was not recorded: {progress.failure}"
    if not progress.torch:
        return f"{name} {ending} without importing torch, so there is no step to record"
    if child_stepped and not progress.optimizer_steps:
        return (
            f"{name} {ending}; its optimizer stepped in child processes, which are not recorded"
            " (run it in one process, or start its ranks with torchrun)"
        )
    if status and not progress.optimizer_steps:
        return f"{name} {ending} without an optimizer step in this process"
    if not progress.optimizer_steps:
        return (
            f"{name} {ending} without an optimizer step in this process. A step ends with the"
            " `step` of a torch.optim.Optimizer, or with a `backward` after a manual update; mark"
            " other steps with stepscope.Scope. If the script starts training processes"
            " (mp.spawn), start its ranks with torchrun instead"
        )
    steps = counted(progress.optimizer_steps, "optimizer step")
    return (
        f"{name} {ending} after {steps}, before any was recorded; a complete"
        f" recording takes {progress.needed + 1} ({fix})"
    )
