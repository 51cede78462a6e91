"""`stepscope show`: findings and tables in the terminal."""

from __future__ import annotations

from typing import Annotated

import msgspec
import tyro

from stepscope.cli.common import Place, existing_store, json_line, load_records, parse
from stepscope.errors import UsageError
from stepscope.records.schema import Record


class ShowOptions(Place, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional] = "latest"
    """A run (id, its beginning, latest, latest~1), a .jsonl file, or the id of one record."""
    study: str | None = None
    """Only this study."""
    json: bool = False
    """Print one line of JSON: a list of the records."""


def main(words: list[str]) -> int:
    options = parse(
        ShowOptions,
        words,
        "show",
        "Print the findings and tables of a run, or one record whole.",
        ("stepscope show", "stepscope show latest~1 --study warmup", "stepscope show 3f2a9c"),
    )
    records, single = _meant(options)
    if options.study is not None:
        records = tuple(record for record in records if record.study == options.study)
        if not records:
            raise UsageError(f"study {options.study!r} has no records in {options.source}")
    if options.json:
        print(json_line(msgspec.to_builtins(records)))
    elif single:
        print(msgspec.json.format(msgspec.json.encode(records[0]), indent=2).decode())
    else:
        from stepscope.report.terminal import print_sections
        from stepscope.studies.page import study_sections

        print_sections(study_sections(records))
    return 0


def _meant(options: ShowOptions) -> tuple[tuple[Record, ...], bool]:
    """The records of a run or a file; failing that, one record by its id."""
    try:
        return load_records(options.source, options), False
    except UsageError as no_run:
        if not options.store.exists():
            raise
        with existing_store(options) as store:
            try:
                return (store.find_record(options.source),), True
            except UsageError:
                raise no_run from None
