"""Lines of an observer's file: one file of JSON lines per rank, in a folder per job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from stepscope.records.decoding import Int64, from_json

PARTS = ("compute", "communication", "loader", "host")
"""Parts of a step; their times add up to it."""
OWN_PARTS = ("compute", "loader", "host")
"""Parts in which a rank works, or waits for itself alone."""
_PATTERN = "rank-*.jsonl"

Part = Literal["compute", "communication", "loader", "host"]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="kind"):
    """First line of a file."""

    at: float
    """Seconds since 1970."""
    rank: Int64
    ranks: Int64
    every: Int64
    host: str
    pid: Int64
    device: str
    program: str


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """Waits at one collective of a step, mean over the steps of a line."""

    collective: str
    own_ms: float
    """Time since the wait before it, or since the start of the step."""
    ms: float


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag="steps", tag_field="kind"):
    """Consecutive steps of a rank, in milliseconds."""

    at: float
    step: Int64
    """Steps of the program at the end of this line."""
    steps: Int64
    step_ms: float
    slowest_ms: float
    compute_ms: float
    """From the first forward to the end of the step, without the other parts."""
    communication_ms: float
    """Exposed: the step waited for it."""
    loader_ms: float
    host_ms: float
    """Before a forward, but not in a DataLoader: logging, checkpoints, validation."""
    usual_ms: float = 0.0
    """Median of the own time, which pauses of single steps do not affect; the others are means."""
    allocated_bytes: Size | None = None
    """By the allocator of the GPU."""
    reserved_bytes: Size | None = None
    resident_bytes: Size | None = None
    """Of the process, by the operating system."""
    waits: tuple[Wait, ...] = ()
    traced: bool = False
    """The profiler disturbed these steps."""

    @property
    def own_ms(self) -> float:
        return self.compute_ms + self.loader_ms + self.host_ms

    def part_ms(self, part: str) -> float:
        return float(getattr(self, f"{part}_ms"))


class Alarm(msgspec.Struct, frozen=True, kw_only=True, tag="alarm", tag_field="kind"):
    """A deviation."""

    at: float = 0.0
    step: Int64
    code: Literal["straggler", "drift", "level-shift", "memory-growth"]
    rank: Int64
    part: str = ""
    """The part of the step, or the memory, that deviates most."""
    collective: str = ""
    """Where the other ranks wait."""
    before: float
    """Milliseconds of a step, or bytes; of a straggler, the own time of the others."""
    after: float
    more: float
    """Milliseconds of a step in that part, or bytes per step."""
    text: str = ""

    @property
    def relative(self) -> float:
        return self.after / self.before - 1.0 if self.before else 0.0


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced", tag_field="kind"):
    """Traced steps after a deviation."""

    at: float
    step: Int64
    folder: str
    verdict: str
    """The answer of `stepscope trace`, or why there is none."""


Line = Start | Steps | Alarm | Traced
_ANY_LINE: Any = Line
"""A union is no `type` for mypy."""


class RankLines(msgspec.Struct, frozen=True):
    """Contents of a rank's file."""

    start: Start
    steps: tuple[Steps, ...]
    alarms: tuple[Alarm, ...]
    traced: tuple[Traced, ...]


class Tail:
    """Reads what was added to a file since the last call; a line in progress is left for the
    next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = -1

    def read(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    # The writer moved the file aside when it was full.
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return list(decoded(complete))


def decoded(data: bytes) -> Sequence[Line]:
    """Decode lines; those that are damaged, or of a later version, are skipped."""
    lines: list[Line] = []
    for text in data.splitlines():
        try:
            lines.append(from_json(text, _ANY_LINE))
        except msgspec.DecodeError:
            continue
    return lines


def is_observed(folder: Path) -> bool:
    """Return True if the folder has files of an observer."""
    return any(_opening(path) is not None for path in folder.glob(_PATTERN))


def _opening(path: Path) -> Start | None:
    with path.open("rb") as file:
        first = decoded(file.readline(1 << 16))
    return first[0] if first and isinstance(first[0], Start) else None


def read_folder(folder: Path) -> list[RankLines]:
    """Read the files of a job, ordered by rank. A file of a job that had more ranks is left out."""
    found = [ranked(Tail(path).read()) for path in folder.glob(_PATTERN)]
    ranks = sorted((one for one in found if one is not None), key=lambda one: one.start.rank)
    latest = max((one.start for one in ranks), key=lambda start: start.at, default=None)
    return [one for one in ranks if latest is not None and one.start.rank < latest.ranks]


def ranked(lines: Sequence[Line]) -> RankLines | None:
    """Return the lines of a file by kind, from its last start on; None without a start."""
    starts = [index for index, line in enumerate(lines) if isinstance(line, Start)]
    if not starts:
        return None
    start = lines[starts[-1]]
    assert isinstance(start, Start)
    own = lines[starts[-1] + 1 :]
    return RankLines(
        start=start,
        steps=tuple(line for line in own if isinstance(line, Steps)),
        alarms=tuple(line for line in own if isinstance(line, Alarm)),
        traced=tuple(line for line in own if isinstance(line, Traced)),
    )
