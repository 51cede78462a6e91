"""`stepscope export`: records and tables for other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import tyro

from stepscope.cli.common import StoreOptions, json_line, load_records, parse, write_text
from stepscope.cli.messages import say, write_line
from stepscope.errors import UsageError, unknown_name
from stepscope.records.jsonl import rounded, write_records
from stepscope.records.names import file_name
from stepscope.records.schema import Record
from stepscope.report.blocks import Table
from stepscope.report.format import counted

MIN_DIGITS = 4
"""Fewest digits for samples: the interval of a median is printed with as many."""


class ExportOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, start of an id, latest, latest~1 for the one before) or a .jsonl file of
    records."""
    format: Literal["jsonl", "markdown", "latex", "csv", "speedscope"] = "jsonl"
    """jsonl writes the records; speedscope writes traced steps as flame graphs for speedscope.app;
    the others write the tables of the report."""
    to: Path | None = None
    """Output file; for several CSV tables a directory. Default: standard output, for jsonl a file
    in the output directory."""
    table: str | None = None
    """Name of the only table to write."""
    leave_out: tuple[str, ...] = ()
    """Patterns of cases to exclude, for example 'race_*'."""
    digits: int | None = None
    """Significant digits of the samples in jsonl; default: all."""
    json: bool = False
    """Print one line of JSON with the names of the files."""


def main(words: list[str]) -> int:
    options = parse(
        ExportOptions,
        words,
        "export",
        "Write records as JSON Lines, or the report's tables as Markdown, LaTeX or CSV.",
        (
            "stepscope export latest --to run.jsonl",
            "stepscope export --format latex --table benchmark-times",
            "stepscope export stepscope-out/train.jsonl --format speedscope --to step.json",
            "stepscope export results/h200.jsonl --format csv --to tables/",
            "stepscope export latest --leave-out 'race_*' --digits 6 --to results/flash_h200.jsonl",
        ),
    )
    files = _export(options)
    if options.json:
        print(json_line({"files": files}))
    else:
        for path in files:
            write_line(f"wrote {path}")
    return 0


def _export(options: ExportOptions) -> list[Path]:
    records = _chosen(options)
    if options.format == "jsonl":
        path = options.to or options.out / f"{records[0].run}.jsonl"
        if options.digits is not None:
            records = tuple(rounded(record, options.digits) for record in records)
        write_records(records, path)
        return [path]

    if options.format == "speedscope":
        return _export_speedscope(records, options)

    from stepscope.report import text
    from stepscope.studies.page import study_sections

    tables = _by_name(
        block
        for section in study_sections(records)
        for block in section.blocks
        if isinstance(block, Table)
    )
    if options.table is not None:
        if options.table not in tables:
            raise unknown_name("table", options.table, tables)
        tables = {options.table: tables[options.table]}
    writers: dict[str, Callable[[Table], str]] = {
        "markdown": text.markdown,
        "latex": text.latex,
        "csv": text.csv_text,
    }
    write = writers[options.format]
    if options.format == "csv" and len(tables) > 1:
        if options.to is None:
            raise UsageError(
                f"{len(tables)} tables do not fit into one CSV",
                f"give a directory with --to, or one table with --table: {', '.join(tables)}",
            )
        written = [options.to / f"{name}.csv" for name in tables]
        for path, table in zip(written, tables.values(), strict=True):
            write_text(path, write(table))
        return written
    joined = "\n".join(write(table) for table in tables.values())
    if options.to is None:
        say(joined)
        return []
    write_text(options.to, joined)
    return [options.to]


def _export_speedscope(records: Sequence[Record], options: ExportOptions) -> list[Path]:
    from stepscope.analysis.flame import speedscope
    from stepscope.views.flame import flame_profiles

    profiles = [profile for record in records for profile in flame_profiles(record)]
    if not profiles:
        raise UsageError(
            f"{options.source} has no traced step",
            "records of `stepscope inspect` and `stepscope run profile` have one",
        )
    path = options.to or options.out / f"{records[0].run}.speedscope.json"
    write_text(path, json_line(speedscope(profiles, records[0].case)) + "\n")
    return [path]


def _by_name(tables: Iterable[Table]) -> dict[str, Table]:
    """Give each table a unique name that is a valid file name; a table's own name may come from a
    record."""
    named: dict[str, Table] = {}
    for table in tables:
        stem = file_name(table.name)
        name, count = stem, 1
        while name in named:
            count += 1
            name = f"{stem}-{count}"
        named[name] = table
    return named


def _chosen(options: ExportOptions) -> tuple[Record, ...]:
    if options.digits is not None and options.digits < MIN_DIGITS:
        raise UsageError(
            f"{options.digits} digits would change the results", f"use at least {MIN_DIGITS}"
        )
    if options.digits is not None and options.format != "jsonl":
        raise UsageError("--digits applies to samples, and tables have none", "omit it")
    records = load_records(options.source, options)
    chosen = tuple(
        record
        for record in records
        if not any(fnmatchcase(record.case, pattern) for pattern in options.leave_out)
    )
    if not chosen:
        total = counted(len(records), "record")
        raise UsageError(f"--leave-out excludes all of {total}", "exclude fewer cases")
    return chosen
