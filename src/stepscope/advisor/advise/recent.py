"""A recording of the same program that was made a moment ago, and is still true of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.inspect.order import Order
from stepscope.records.schema import Environment, Record
from stepscope.records.store import Store
from stepscope.views.program.cases import STUDY_NAME
from stepscope.views.program.rows import ProgramRecord

_RECENT_S = 1800.0
_READ_BY_PROGRAMS = (".py", ".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
_MOST_FILES = 2000
"""With more files below the script's folder, nobody knows which of them matter."""


def recent_recording(store: Store, order: Order) -> Record | None:
    """Return the newest recording of the same command, unless a file that the program may read has
    changed since, or its times are in doubt."""
    record = next(_of_command(store, order.command), None)
    if record is None or _changed(_folder(order), _time_of(record)):
        return None
    program = ProgramRecord(record)
    complete = not program.missing and not record.failed_checks and program.case.ranks == 1
    if not complete or record.config.get("warmup") != order.warmup or facts_of(record).doubt:
        return None
    return replace(record, id=secrets.token_hex(6))


def same_machine(one: Environment, other: Environment) -> bool:
    """Return True if nothing differs but the load, and the threads that a program chose."""
    return replace(one, load_average=None, threads=0) == replace(
        other, load_average=None, threads=0
    )


def _of_command(store: Store, command: str) -> Iterator[Record]:
    for run in store.runs():
        if time.time() - datetime.fromisoformat(run.created).timestamp() > _RECENT_S:
            return
        for record in store.records(run.id, STUDY_NAME):
            if record.notes.get("command") == command:
                yield record


def _time_of(record: Record) -> float:
    """Return when the program of a recording was started; it imports its files then."""
    ended = datetime.fromisoformat(record.started).astimezone(UTC).timestamp()
    return ended - record.elapsed_s


def _folder(order: Order) -> Path:
    return Path() if order.module else Path(order.target).parent


def _changed(folder: Path, since_s: float) -> bool:
    files = list(islice(_files(folder), _MOST_FILES + 1))
    return len(files) > _MOST_FILES or any(one.stat().st_mtime > since_s for one in files)


def _files(folder: Path) -> Iterator[Path]:
    """Yield what a program of this folder may import or read as its configuration."""
    for path in _visible(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.suffix in _READ_BY_PROGRAMS and path.is_file():
            yield path


def _visible(paths: Iterable[Path]) -> Iterator[Path]:
    return (one for one in paths if not one.name.startswith((".", "__pycache__")))
