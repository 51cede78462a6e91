"""How far a watched script came, as it says itself, and what that means when it has ended."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from stepscope.records.decoding import from_json
from stepscope.report.format import counted

_FILE = "progress-{rank}.json"
CHILD_STEPPED = "child-stepped"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    torch: bool = False
    """It has imported torch."""
    optimizer_steps: int = 0
    optimizers: int = 0
    steps: int = 0
    """Whole turns of the loop since the first optimizer step."""
    needed: int = 0
    """Steps that a whole recording takes, the warm-up included."""
    recorded: bool = False
    failure: str = ""
    """What ended the recording, and not the script."""

    @property
    def whole(self) -> bool:
        return self.recorded and self.steps >= self.needed


def write_progress(folder: Path, progress: Progress) -> None:
    path = folder / _FILE.format(rank=os.environ.get("RANK", "0"))
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(progress))
    temporary.replace(path)


def read_progress(folder: Path) -> Progress:
    path = folder / _FILE.format(rank=os.environ.get("RANK", "0"))
    try:
        return from_json(path.read_bytes(), Progress)
    except (OSError, msgspec.DecodeError):
        return Progress()


def why_nothing(
    progress: Progress, name: str, ending: str, child_stepped: bool, mend: str
) -> str:  # fmt: skip
    """One line for a script that left no recording; `ending` says how it ended, `mend` what to do
    where it made too few steps."""
    if progress.failure:
        return f"{name} {ending}; it was not recorded: {progress.failure}"
    if not progress.torch:
        return f"{name} {ending} without importing torch: there is no step to record"
    if child_stepped and not progress.optimizer_steps:
        return (
            f"{name} {ending}; its optimizer stepped in processes that it started itself, which are"
            " not watched (start it with one process, or its ranks with torchrun)"
        )
    if not progress.optimizer_steps:
        return (
            f"{name} {ending} without an optimizer step in this process: a step ends with the"
            " `step` of a torch.optim.Optimizer, or with a `backward` after an update by hand; mark"
            " it yourself with stepscope.Scope, and where a script starts processes that train"
            " (mp.spawn), start its ranks with torchrun instead"
        )
    made = counted(progress.optimizer_steps, "optimizer step")
    return (
        f"{name} {ending} after {made}, before any was recorded; a whole"
        f" recording takes {progress.needed + 1} ({mend})"
    )
