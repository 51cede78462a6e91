"""`stepscope show`: the verdict, findings and tables of a run in the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.cli.answer import Answer, AnswerOptions, for_shell, in_directory, print_answer
from stepscope.cli.common import existing_store, json_line, load_run_or_record, parse
from stepscope.errors import UsageError, guessed, printable
from stepscope.records.schema import Record
from stepscope.studies.registry import viewables


class ShowOptions(AnswerOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = "latest"
    """A run (id, start of an id, latest, latest~1 for the one before), a .jsonl file of records,
    the id of one record, or the name of a study: its newest records."""
    study: str | None = None
    """Show only this study, with all its findings and tables."""


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
    try:
        loaded = load_run_or_record(options.source, options)
    except UsageError:
        if guess := guessed(options.source, viewables()):
            raise UsageError(f"there is no run or study {options.source!r}", guess) from None
        raise
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

        # Record by record: the JSON of all of them takes as much memory as the records.
        verdict = json_line({"verdict": verdict_facts(verdict_of(records))})
        print(f'{verdict.removesuffix("}")},"records":[', end="")
        for index, record in enumerate(records):
            shown = json_line(record)
            print(shown if index == 0 else f",{shown}", end="")
        print("]}")
    elif isinstance(loaded, Record):
        print(printable(msgspec.json.format(msgspec.json.encode(loaded), indent=2).decode()))
    else:
        _print(options, records)
    return 0


def _newest(options: ShowOptions) -> ShowOptions:
    """The newest run with records of the study that was given instead of a run."""
    with existing_store(options) as store:
        runs = (run.id for run in store.runs() if store.records(run.id, study=options.source))
        newest = next(runs, None)
    if newest is None:
        recorded_by = viewables()[options.source].recorded_by
        raise UsageError(
            f"{options.store} has no records of {options.source}",
            f"measure it with `{recorded_by or f'stepscope run {options.source}'}`",
        )
    return msgspec.structs.replace(options, study=options.source, source=newest)


def _print(options: ShowOptions, records: Sequence[Record]) -> None:
    from stepscope.studies.page import headline, study_sections, verdict_of
    from stepscope.studies.trusted import banner

    verdict, source = verdict_of(records), shlex.quote(options.source)
    newest = "" if options.source == "latest" else f" {source}"
    answer = Answer(
        verdict=for_shell(verdict, options, source),
        sections=tuple(study_sections(records)),
        more=in_directory(f"stepscope show --full{newest}", options),
        table=None if verdict else headline(records),
        warning=banner(records),
    )
    print_answer(answer, options, full=options.study is not None)
