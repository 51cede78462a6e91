"""Helpers shared by the commands: option parsing, locating and loading records, writing files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stepscope.cli.messages import log
from stepscope.errors import StepscopeError, UsageError, printable
from stepscope.records.jsonl import read_records, replace_file
from stepscope.records.schema import Record
from stepscope.records.store import Store

Options = TypeVar("Options")

DEFAULT_OUT = Path(os.environ.get("STEPSCOPE_OUT", "stepscope-out"))


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the record store and the reports."""

    out: Path = DEFAULT_OUT
    """Directory of the record store and the reports (environment: STEPSCOPE_OUT)."""

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
    """Parse command-line words into the options class `kind`; exit with 2 if they are invalid."""
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


RENAMED_FLAGS = {
    "--joined": "--fused-projections",
    "--no-joined": "--no-fused-projections",
    "--keep": "--activation-policy",
    "--searched": "--autotune-gemms",
    "--no-searched": "--no-autotune-gemms",
}
"""Former spellings of the flags of a training step, accepted with a warning for one version."""


def with_new_names(words: Sequence[str]) -> list[str]:
    """Replace former spellings of flags, with a warning for each."""
    renamed = []
    for word in words:
        flag, sign, value = word.partition("=")
        if (new := RENAMED_FLAGS.get(flag)) is not None:
            log(f"{flag} is now {new}; the former name is removed in the next version")
            word = f"{new}{sign}{value}"
        renamed.append(word)
    return renamed


def load_records(source: str, location: StoreOptions) -> tuple[Record, ...]:
    """Load the records of a JSON Lines file or of a run (id, id prefix, `latest`, `latest~1`)."""
    if source.endswith(".jsonl") or Path(source).is_file():
        return load_file(Path(source))
    with existing_store(location) as store:
        run = store.find_run(source)
        records = store.records(run.id)
    if not records:
        raise StepscopeError(f"run {run.id} has no records yet", f"resume it with: {run.command}")
    return records


def load_file(path: Path) -> tuple[Record, ...]:
    records = read_records(path)
    if not records:
        raise StepscopeError(f"{path} contains no records", "give a file of records")
    return records


def load_run_or_record(text: str, location: StoreOptions) -> tuple[Record, ...] | Record:
    """Load the records of a run or a file, or else the one record whose id starts with `text`."""
    try:
        return load_records(text, location)
    except UsageError as no_run:
        if not location.store.exists():
            raise
        with existing_store(location) as store:
            try:
                return store.find_record(text)
            except UsageError:
                raise no_run from None


def existing_store(location: StoreOptions) -> Store:
    if not location.store.exists():
        raise UsageError(
            f"there is no record store at {location.store}",
            "create one with `stepscope run`, or give its directory with --out",
        )
    return Store(location.store, create=False)


def require_writable(path: Path, fix: str) -> None:
    """Fail early if `path` cannot be written, before the work whose result goes there."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory", fix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", fix) from error


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode(errors="backslashreplace")])
    except OSError as error:
        raise StepscopeError(
            f"cannot write {path}: {error.strerror}", "choose another path, or free some space"
        ) from error


def json_line(facts: dict[str, Any]) -> str:
    """Encode as one line of JSON without control characters."""
    return printable(msgspec.json.encode(facts, enc_hook=str).decode())
