"""Progress of an observed script, and the reason if it left no recording."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stepscope.advisor.inspect.child import describe_end
from stepscope.records.decoding import from_json
from stepscope.report.format import counted

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


def write_progress(folder: Path, progress: Progress) -> None:
    path = _file(folder)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(progress))
    temporary.replace(path)


def read_progress(folder: Path) -> Progress:
    try:
        return from_json(_file(folder).read_bytes(), Progress)
    except (OSError, msgspec.DecodeError):
        return Progress()


def _file(folder: Path) -> Path:
    return folder / f"progress-{os.environ.get('RANK', '0')}.json"


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
