"""Page and terminal output of `stepscope advise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.history import read_history
from stepscope.advisor.advise.history_view import history_blocks
from stepscope.advisor.advise.outcome import Tried, why_none
from stepscope.advisor.advise.step import RecordedStep
from stepscope.advisor.advise.view import (
    advice_table,
    cannot_rank,
    doubtful_ceilings,
    lines_table,
    not_applicable_table,
    not_evaluated_findings,
    not_tried,
)
from stepscope.analysis.advice.calibration import Verified
from stepscope.analysis.verdict import Verdict
from stepscope.cli.answer import Answer, AnswerOptions, for_shell, in_directory, print_answer
from stepscope.cli.common import json_line, write_text
from stepscope.cli.messages import log, say
from stepscope.records.schema import Record
from stepscope.report.blocks import Interval, Page, Section, Table
from stepscope.studies.page import make_page, study_sections
from stepscope.views.program.cases import STUDY_NAME as INSPECTED
from stepscope.views.program.rows import ProgramRecord

_QUESTION = "Which changes apply, what would each gain, and what does it risk?"
_SO_FAR = "How accurate were predictions on this device, and how are they corrected?"


def advice_page(
    step: RecordedStep,
    records: Sequence[Record],
    verdict: Verdict | None = None,
    history: Sequence[Verified] = (),
) -> Page:
    """Build the page: trials first, then the advice, then the unchanged step."""
    page = make_page(records, verdict)
    past = history_blocks(history, step.record.environment.device_name)
    so_far = Section(name="history", title="Predictions so far", question=_SO_FAR, blocks=past)
    trials = [one for one in page.sections if one.name == TRIALS]
    rest = [one for one in page.sections if one.name != TRIALS]
    tables = [block for one in trials for block in one.blocks if isinstance(block, Table)]
    # The first table is the headline of the page.
    trials = [
        msgspec.structs.replace(
            one, blocks=tuple(block for block in one.blocks if block not in tables[:1])
        )
        for one in trials
    ]
    return Page(
        title=f"Advice for {ProgramRecord(step.record).name}",
        subtitle=page.subtitle,
        headline=tables[0] if tables else page.headline,
        sections=(*trials, _section(step, records), *((so_far,) if past else ()), *rest),
        banner=page.banner,
        verdict=page.verdict,
    )


def conclude(
    path: Path,
    options: AnswerOptions,
    step: RecordedStep,
    records: Sequence[Record],
    source: str,
    *,
    applies: bool = False,
) -> int:
    """Write the page, print the answer or one line of JSON, and return the exit code: 1 if no trial
    could be completed. `source` is how a command line names the records. The next command is left
    out if the changes are applied now."""
    from stepscope.advisor.verdict import program_verdict
    from stepscope.report.html import html_page
    from stepscope.report.verdict import verdict_facts

    own, tried = _of_trials(records), _tried(records)
    ranks = [one for one in records if one.study == INSPECTED and one.id != step.record.id]
    verdict = for_shell(program_verdict([step.record, *ranks, *own], step), options, source)
    if applies and verdict is not None:
        verdict = msgspec.structs.replace(verdict, next_command="")
    write_text(path, html_page(advice_page(step, records, verdict, read_history())))
    code = 0
    if reason := why_none(tried):
        code = 1
        log(f"no change could be tried: {reason}")
    if options.json:
        facts = {
            "advice": step.advice,
            "tried": [
                {
                    "change": t.trial.code,
                    "predicted_ms": t.predicted_ms,
                    "realized_ms": t.realized_ms,
                    "interval_ms": _ends(t.realized),
                    "verdict": t.verdict,
                    "took_s": t.record.elapsed_s,
                }
                for t in tried
            ],
            "not_evaluated": [one._asdict() for one in step.not_evaluated],
            "not_applicable": [one._asdict() for one in step.not_applicable],
            "cannot_rank": step.facts.doubt,
            "report": path,
            "verdict": verdict_facts(verdict),
        }
        print(json_line(facts))
        return code
    answer = Answer(
        verdict,
        [_section(step, records), *study_sections(own)],
        in_directory(f"stepscope advise --full {source}", options),
    )
    print_answer(answer, options)
    say(f"page: {path.resolve()}")
    return code


def _ends(gain: Interval | None) -> tuple[float, float] | None:
    return None if gain is None else (gain.low, gain.high)


def _of_trials(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.study == TRIALS]


def _tried(records: Sequence[Record]) -> list[Tried]:
    return [Tried(record) for record in _of_trials(records)]


def _section(step: RecordedStep, records: Sequence[Record]) -> Section:
    facts, tried = step.facts, _tried(records)
    listed = [
        advice_table(step.advice, facts.step_ms),
        lines_table(step.advice, "advise-how", "How to apply each change"),
        not_applicable_table(step.not_applicable),
    ]
    return Section(
        name="advice",
        title="Advice",
        question=_QUESTION,
        blocks=(
            *cannot_rank(step.record, facts),
            *doubtful_ceilings(facts),
            *not_evaluated_findings(step.not_evaluated),
            *(not_tried(step.advice, tried, step.settings) if tried else ()),
            *(table for table in listed if table.rows),
        ),
    )
