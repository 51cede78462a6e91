"""Records as JSON Lines: what travels between machines and into version control."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import StepscopeError, no_such_file
from stepscope.records.failures import explain_os
from stepscope.records.schema import Record, Run, decode, encode
from stepscope.records.store import Store


class Imported(NamedTuple):
    """How many records an import added, and how many were there already."""

    added: int
    skipped: int


def rounded(record: Record, digits: int) -> Record:
    """The record with its samples and readings to so many significant digits; times end well before
    the sixteenth digit, and a file of them is half as long without."""

    def short(value: float) -> float:
        return float(f"{value:.{digits}g}")

    series = tuple(
        msgspec.structs.replace(
            held, values=tuple(map(short, held.values)), warmup=tuple(map(short, held.warmup))
        )
        for held in record.series
    )
    readings = tuple(
        msgspec.structs.replace(held, at_s=round(held.at_s, 3)) for held in record.readings
    )
    return msgspec.structs.replace(record, series=series, readings=readings)


def write_records(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """One record a line. The file is complete or, if this fails, as it was before."""
    target = Path(path)
    if target.is_dir():
        raise StepscopeError(f"{target} is a folder", "name a file in it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, (encode(record) + b"\n" for record in records))
    except OSError as error:
        raise explain_os(error, target) from error


def replace_file(target: Path, parts: Iterable[bytes]) -> None:
    """Write a file whole or not at all. The name of the temporary one cannot be guessed, so that
    no link can be waiting there, and a link at the target is replaced and not followed."""
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), _mode(target))
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def _mode(target: Path) -> int:
    """Permissions of the file that is replaced, else the usual: a temporary file is private."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_folder(folder: Path) -> None:
    """Without this, a power cut may forget the new name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """All records of a file; an error names the line."""
    source = Path(path)
    try:
        lines = source.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise no_such_file(source) from None
    except OSError as error:
        raise explain_os(error, source) from error
    while lines and not lines[-1].strip():
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line))
        except StepscopeError as error:
            mend = _mend(source, number, len(lines), error)
            raise StepscopeError(f"{source}, line {number}: {error}", mend) from error
    return tuple(records)


def _mend(source: Path, number: int, lines: int, error: StepscopeError) -> str:
    """What can be done about a line that is not JSON; other errors say it themselves."""
    cause = error.__cause__
    if not isinstance(cause, msgspec.DecodeError) or isinstance(cause, msgspec.ValidationError):
        return ""
    if number == 1:
        return "it is no file of records, which has one JSON object a line"
    if number == lines:
        whole = number - 1
        return (
            f"the file is cut off in its last line; to take what is whole:"
            f" head -n {whole} {source} > whole.jsonl"
        )
    return ""


def import_into(store: Store, records: Sequence[Record]) -> Imported:
    """Add records and the runs they name, all or none; those that are there already are skipped."""
    by_id: dict[str, Record] = {}
    for record in records:
        held = by_id.setdefault(record.id, record)
        _refuse_other(record, held)
    with store.transaction():
        known_runs = {run.id for run in store.runs()}
        kept = {
            record.id: record
            for run in {record.run for record in records} & known_runs
            for record in store.records(run, all_attempts=True)
        }
        for run_id in dict.fromkeys(record.run for record in records):
            if run_id not in known_runs:
                store.add_run(_run_of([r for r in by_id.values() if r.run == run_id]))
        added = 0
        for record in by_id.values():
            if record.id in kept:
                _refuse_other(record, kept[record.id])
            else:
                store.add(record)
                added += 1
    return Imported(added, len(records) - added)


def _refuse_other(record: Record, held: Record) -> None:
    # Compared as read back: a whole number given as an int is written unlike the same float.
    if decode(encode(record)) != decode(encode(held)):
        raise StepscopeError(
            f"record {record.id} ({record.study} {record.case}) differs from the one of that id"
            " which is there already",
            "import into another store to keep both",
        )


def _run_of(records: Sequence[Record]) -> Run:
    """The run that records from elsewhere belong to, as far as they tell."""
    return Run(
        id=records[0].run,
        created=min(record.started for record in records),
        command="",
        plan="",
        cases=len({(record.study, record.case) for record in records}),
    )
