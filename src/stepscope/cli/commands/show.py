"""`stepscope show`: the verdict, findings and tables of a run in the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import tyro

from stepscope.cli.common import StoreOptions, existing_store, json_line, load_run_or_record, parse
from stepscope.errors import UsageError, printable
from stepscope.records.renames import with_former_names
from stepscope.records.schema import Record
from stepscope.studies.registry import viewables

if TYPE_CHECKING:
    from rich.console import Console

MAX_LINES = 25
"""Lines of the summary of a run, on a terminal of 80 columns."""


class ShowOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, start of an id, latest, latest~1 for the one before), a .jsonl file of records,
    the id of one record, or the name of a study: its newest records."""
    study: str | None = None
    """Show only this study, with all its findings and tables."""
    full: bool = False
    """Print every finding and table, in a pager if the output is a terminal."""
    json: bool = False
    """Print one line of JSON: the verdict and the records."""


def main(words: list[str]) -> int:
    options = parse(
        ShowOptions,
        words,
        "show",
        "Print the verdict of a run and one line per study; or one study; or one record.",
        (
            "stepscope show",
            "stepscope show --full",
            "stepscope show benchmark",
            "stepscope show latest~1 --study warmup",
            "stepscope show 3f2a9c",
        ),
    )
    if (
        options.study is None
        and options.source in viewables()
        and not Path(options.source).exists()
    ):
        options = _newest(options)
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
        from stepscope.report.verdict import verdict_facts
        from stepscope.studies.page import verdict_of

        shown = [with_former_names(msgspec.to_builtins(record)) for record in records]
        print(json_line({"verdict": verdict_facts(verdict_of(records)), "records": shown}))
    elif isinstance(loaded, Record):
        print(printable(msgspec.json.format(msgspec.json.encode(loaded), indent=2).decode()))
    else:
        _print(records, full=options.full or options.study is not None)
    return 0


def _newest(options: ShowOptions) -> ShowOptions:
    """The newest run with records of the study that was given instead of a run."""
    with existing_store(options) as store:
        runs = (run.id for run in store.runs() if store.records(run.id, study=options.source))
        newest = next(runs, None)
    if newest is None:
        raise UsageError(
            f"{options.store} has no records of {options.source}",
            f"measure it with `stepscope run {options.source}`",
        )
    return msgspec.structs.replace(options, study=options.source, source=newest)


def _print(records: Sequence[Record], *, full: bool) -> None:
    from rich.console import Console

    from stepscope.report.blocks import Finding
    from stepscope.report.terminal import print_findings, print_sections
    from stepscope.report.verdict import WIDTH, lines_at, print_verdict, verdict_lines
    from stepscope.report.wrapping import wrapped
    from stepscope.studies.page import study_sections, verdict_of
    from stepscope.studies.trusted import banner

    console = Console(highlight=False)
    warning = banner(records)
    verdict = verdict_of(records)
    sections = list(study_sections(records)) if full else []
    # A verdict that is not good states the reason itself.
    if not full and verdict is not None and verdict.trust != "good":
        warning = ""
    with _paged(console, full):
        if warning:
            print_findings([Finding(text=warning, tone="warn")], console)
        print_sections(sections, console)
        if verdict is not None:
            print_verdict(verdict, console)
        if not full:
            used = len(verdict_lines(verdict, min(console.width, WIDTH))) if verdict else 0
            used += len(wrapped(warning, console.width - 2))
            _print_answers(records, console, lines_at(console.width, MAX_LINES) - used)


@contextmanager
def _paged(console: Console, full: bool) -> Iterator[None]:
    """A pager for long output to a terminal."""
    if not (full and console.is_terminal):
        yield
        return
    # Colors, and no pager for what fits the screen.
    os.environ.setdefault("LESS", "-FRX")
    with console.pager(styles=True):
        yield


def _print_answers(records: Sequence[Record], console: Console, lines: int) -> None:
    """The answer of each study, cut where all of them do not fit into so many lines; the last line
    names the studies that have no line of their own."""
    from rich.text import Text

    from stepscope.report.wrapping import wrapped
    from stepscope.studies.page import study_answers

    answers = [(title, printable(answer)) for title, answer in study_answers(records)]
    room = max(lines - 1, 2)
    if len(answers) > room:
        rest = answers[room - 1 :]
        names = ", ".join(title for title, _ in rest)
        answers = [*answers[: room - 1], (f"{len(rest)} more", names)]
    texts = [wrapped(f"{title}: {answer}", console.width) for title, answer in answers]
    most = next(n for n in range(room, 0, -1) if sum(min(n, len(one)) for one in texts) <= room)
    for (title, _), text in zip(answers, texts, strict=True):
        if len(text) > most:
            text = [*text[: most - 1], f"{text[most - 1][: console.width - 1]}…"]
        line = Text("\n".join(text))
        line.stylize("bold", 0, len(f"{title}:"))
        console.print(line, soft_wrap=True)
    console.print("All findings and tables: stepscope show --full; of one study: show STUDY")
