"""Records as JSON Lines, for transfer between machines and for version control."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.errors import StepscopeError, no_such_file
from stepscope.files import refuse_above, replace_file
from stepscope.records.failures import explain_os
from stepscope.records.schema import Record, Run, decode, encode
from stepscope.records.store import Store

MAX_BYTES = 512 << 20
"""Size of a file of records; a benchmark's record has 3 kB, and takes 9 kB of memory."""
_SMALLER = "split it by runs"


class Imported(NamedTuple):
    """Number of records that an import added, and of those that were already stored."""

    added: int
    skipped: int


def rounded(record: Record, digits: int) -> Record:
    """Round the samples to `digits` significant digits and the times of readings to 1 ms. Float64
    has sixteen digits, far more than a time needs; a rounded file is half as long."""

    def short(value: float) -> float:
        return float(f"{value:.{digits}g}")

    series = tuple(
        msgspec.structs.replace(
            series, values=tuple(map(short, series.values)), warmup=tuple(map(short, series.warmup))
        )
        for series in record.series
    )
    readings = tuple(
        msgspec.structs.replace(reading, at_s=round(reading.at_s, 3)) for reading in record.readings
    )
    return msgspec.structs.replace(record, series=series, readings=readings)


def write_records(records: Iterable[Record], path: str | os.PathLike[str]) -> None:
    """Write one record per line. If this fails, the previous file is unchanged."""
    target = Path(path)
    if target.is_dir():
        raise StepscopeError(f"{target} is a folder", "name a file in it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, (encode(record) + b"\n" for record in records))
    except OSError as error:
        raise explain_os(error, target) from error


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Read all records of a file; an error names the line."""
    source = Path(path)
    records = []
    for line_number, line, is_last in _numbered_lines(source):
        try:
            records.append(decode(line))
        except StepscopeError as error:
            hint = _hint(source, line_number, is_last, error)
            raise StepscopeError(f"{source}, line {line_number}: {error}", hint) from error
    return tuple(records)


def _numbered_lines(source: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the lines up to the last that is not empty, each with its number and whether it is the
    last. Only one line at a time is in memory."""
    size, empty, line = 0, 0, b""
    number = 0
    try:
        with source.open("rb") as file:
            while following := file.readline(MAX_BYTES - size + 1):
                size += len(following)
                refuse_above(source, size, MAX_BYTES, _SMALLER)
                if not following.strip():
                    empty += 1
                    continue
                if number:
                    yield number, line, False
                for skipped in range(number + 1, number + 1 + empty):
                    yield skipped, b"", False
                number, line, empty = number + 1 + empty, following.rstrip(b"\n"), 0
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise no_such_file(source) from None
    except OSError as error:
        raise explain_os(error, source) from error
    if number:
        yield number, line, True


def _hint(source: Path, line_number: int, is_last: bool, error: StepscopeError) -> str:
    """Hint for a line that is not JSON; the messages of other errors contain their own."""
    cause = error.__cause__
    if not isinstance(cause, msgspec.DecodeError) or isinstance(cause, msgspec.ValidationError):
        return ""
    if line_number == 1:
        return "a file of records has one JSON object per line"
    if is_last:
        complete = line_number - 1
        return (
            f"the file is truncated in its last line; to recover the complete records:"
            f" head -n {complete} {source} > complete.jsonl"
        )
    return ""


def import_into(store: Store, records: Sequence[Record]) -> Imported:
    """Add records and their runs in one transaction; skip records that are already stored."""
    by_id: dict[str, Record] = {}
    for record in records:
        first = by_id.setdefault(record.id, record)
        _refuse_other(record, first)
    with store.transaction():
        known_runs = {run.id for run in store.runs()}
        stored = {
            record.id: record
            for run in {record.run for record in records} & known_runs
            for record in store.records(run, all_attempts=True)
        }
        for run_id in dict.fromkeys(record.run for record in records):
            if run_id not in known_runs:
                store.add_run(_run_of([r for r in by_id.values() if r.run == run_id]))
        added = 0
        for record in by_id.values():
            if record.id in stored:
                _refuse_other(record, stored[record.id])
            else:
                store.add(record)
                added += 1
    return Imported(added, len(records) - added)


def _refuse_other(record: Record, existing: Record) -> None:
    # Compared after a round trip: an int and the equal float have different encodings.
    if decode(encode(record)) != decode(encode(existing)):
        raise StepscopeError(
            f"record {record.id} ({record.study} {record.case}) differs from the record that is"
            " already stored with that id",
            "import into another store to keep both",
        )


def _run_of(records: Sequence[Record]) -> Run:
    """Reconstruct the run of imported records from their fields."""
    return Run(
        id=records[0].run,
        created=min(record.started for record in records),
        command="",
        plan="",
        cases=len({(record.study, record.case) for record in records}),
    )
