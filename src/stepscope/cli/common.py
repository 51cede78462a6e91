"""What the commands share: parsing, where things are kept, and finding the records meant."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stepscope.errors import StepscopeError, UsageError, printable
from stepscope.records.jsonl import read_records, replace_file
from stepscope.records.schema import Record
from stepscope.records.store import Store

Options = TypeVar("Options")

DEFAULT_OUT = Path(os.environ.get("STEPSCOPE_OUT", "stepscope-out"))


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where records and pages are kept."""

    out: Path = DEFAULT_OUT
    """Folder of the record store and the reports (or set STEPSCOPE_OUT)."""

    @property
    def store(self) -> Path:
        return self.out / "records.db"


def parse(
    kind: type[Options],
    words: Sequence[str],
    command: str,
    description: str,
    examples: Sequence[str] = (),
) -> Options:
    """Read the words of a command into its options; a wrong word ends the program with 2."""
    import tyro

    from stepscope.cli.optional_values import optional_values

    text = description
    if examples:
        text += "\n\nexamples:\n" + "\n".join(f"  {example}" for example in examples)
    with optional_values():
        return tyro.cli(
            kind,
            args=list(words),
            prog=f"stepscope {command}",
            description=text,
            config=(tyro.conf.OmitArgPrefixes,),
        )


def load_records(source: str, place: StoreOptions) -> tuple[Record, ...]:
    """The records meant: a JSON Lines file, or a run by id, its beginning, `latest`, `latest~1`."""
    if source.endswith(".jsonl") or Path(source).is_file():
        return load_file(Path(source))
    with existing_store(place) as store:
        run = store.find_run(source)
        records = store.records(run.id)
    if not records:
        raise StepscopeError(f"run {run.id} has no records yet", f"go on with: {run.command}")
    return records


def load_file(path: Path) -> tuple[Record, ...]:
    records = read_records(path)
    if not records:
        raise StepscopeError(f"{path} has no records", "name a file that has some")
    return records


def load_run_or_record(text: str, place: StoreOptions) -> tuple[Record, ...] | Record:
    """The records of a run or a file; failing that, the one record whose id begins so."""
    try:
        return load_records(text, place)
    except UsageError as no_run:
        if not place.store.exists():
            raise
        with existing_store(place) as store:
            try:
                return store.find_record(text)
            except UsageError:
                raise no_run from None


def existing_store(place: StoreOptions) -> Store:
    if not place.store.exists():
        raise UsageError(
            f"there is no record store at {place.store}",
            "make one with `stepscope run`, or name its folder with --out",
        )
    return Store(place.store, create=False)


def require_writable(path: Path, mend: str) -> None:
    """Before work that ends with writing it: better now than then."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", mend)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", mend) from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode(errors="backslashreplace")])
    except OSError as error:
        raise StepscopeError(
            f"cannot write {path}: {error.strerror}", "name another place, or free some space"
        ) from error


def json_line(facts: dict[str, Any]) -> str:
    """One line for scripts."""
    return printable(msgspec.json.encode(facts, enc_hook=str).decode())
