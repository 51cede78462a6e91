"""`stepscope show`: findings and tables of a run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import tyro

from stepscope.cli.common import StoreOptions, json_line, load_run_or_record, parse
from stepscope.errors import UsageError, printable
from stepscope.records.schema import Record


class ShowOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, id prefix, latest, latest~1), a .jsonl file, or the id of one record."""
    study: str | None = None
    """Show only this study."""
    full: bool = False
    """Print every finding and table."""
    json: bool = False
    """Print one line of JSON: a list of the records."""


def main(words: list[str]) -> int:
    options = parse(
        ShowOptions,
        words,
        "show",
        "Print the verdict of a run and one line per study, or all of one record.",
        (
            "stepscope show",
            "stepscope show --full",
            "stepscope show latest~1 --study warmup",
            "stepscope show 3f2a9c",
        ),
    )
    loaded = load_run_or_record(options.source, options)
    records = (loaded,) if isinstance(loaded, Record) else loaded
    if options.study is not None:
        studies = dict.fromkeys(record.study for record in records)
        if options.study not in studies:
            raise UsageError(
                f"study {options.study!r} has no records in {options.source}",
                f"choose from: {', '.join(studies)}",
            )
        records = tuple(record for record in records if record.study == options.study)
    if options.json:
        print(json_line(msgspec.to_builtins(records)))
    elif isinstance(loaded, Record):
        print(printable(msgspec.json.format(msgspec.json.encode(loaded), indent=2).decode()))
    else:
        from stepscope.report.blocks import Finding
        from stepscope.report.terminal import print_findings, print_sections
        from stepscope.studies.page import study_sections
        from stepscope.studies.trusted import banner

        if warning := banner(records):
            print_findings([Finding(text=warning, tone="warn")])
        if options.full or options.study is not None:
            print_sections(study_sections(records))
        else:
            _print_answers(records)
    return 0


def _print_answers(records: Sequence[Record]) -> None:
    """The verdict and one line per study."""
    from rich.console import Console
    from rich.text import Text

    from stepscope.report.verdict import print_verdict
    from stepscope.studies.page import study_answers, verdict_of

    console = Console(highlight=False)
    if (verdict := verdict_of(records)) is not None:
        print_verdict(verdict, console)
        console.print()
    for title, answer in study_answers(records):
        line = Text(f"{title}: ", style="bold").append(answer, style="not bold")
        line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)
    console.print("All findings and tables: stepscope show --full")
