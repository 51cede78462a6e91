"""Helpers shared by the commands: option parsing, locating and loading records, writing files."""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.errors import StepscopeError, UsageError
from stepscope.files import replace_file, require_writable_kind
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.records.store import Store

Options = TypeVar("Options")

_HELP_WIDTH = 79
_NOT_ASCII = re.compile(r"[^ -~]+")
DEFAULT_OUT = Path(os.environ.get("STEPSCOPE_OUT", "stepscope-out"))


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the record store and the reports."""

    out: Path = DEFAULT_OUT
    """Directory of the records and the pages (environment variable: STEPSCOPE_OUT)."""

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

    from stepscope.cli.flag_errors import errors_in_one_line
    from stepscope.cli.option_help import option_registry, wrapped_usage

    text = _described(description)
    if examples:
        text += "\n\nexamples:\n" + "\n".join(map(_example, examples))
    with option_registry(), wrapped_usage(), errors_in_one_line(command):
        return tyro.cli(
            kind,
            args=list(words),
            prog=f"stepscope {command}",
            description=text,
            config=(tyro.conf.OmitArgPrefixes,),
        )


def _example(command: str) -> str:
    """A command line, continued on the next line if it is long."""
    lines = textwrap.wrap(command, _HELP_WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return "  " + " \\\n      ".join(lines)


def _described(description: str) -> str:
    """One line that says what the command does; the rest, indented, below it."""
    summary, stop, rest = " ".join(description.split()).partition(". ")
    # tyro joins a line with the one before it, unless it is indented.
    lines = textwrap.wrap(summary + stop.rstrip(), _HELP_WIDTH, subsequent_indent="  ")
    lines += textwrap.wrap(rest, _HELP_WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


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
    # Records live until the end of the command: the garbage collector need not look at them, which
    # takes a fifth of the time of a file of 100,000.
    gc.disable()
    try:
        records = read_records(path)
    finally:
        gc.freeze()
        gc.enable()
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
        inspected = sorted(location.out.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        file = f"name a file of records, such as {inspected[-1]}, or " if inspected else ""
        raise UsageError(
            f"there is no record store at {location.store}",
            f"{file}create one with `stepscope inspect SCRIPT` or `stepscope run`, or give its"
            " directory with --out",
        )
    return Store(location.store, create=False)


def require_writable(path: Path, fix: str) -> None:
    """Fail early if `path` cannot be written, before the work whose result goes there."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory", fix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_writable_kind(path)
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


def json_line(facts: object) -> str:
    """Encode as one line of JSON in ASCII, whatever the locale is."""
    text = msgspec.json.encode(facts, enc_hook=str).decode()
    if text.isascii() and text.isprintable():  # 70 µs less for a record of 2 kB.
        return text
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)
