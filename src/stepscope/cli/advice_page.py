"""Page and terminal output of `stepscope advise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.history import read_history
from stepscope.advisor.advise.history_view import history_blocks
from stepscope.advisor.advise.outcome import Tried
from stepscope.advisor.advise.view import (
    advice_table,
    cannot_rank,
    lines_table,
    not_applicable_table,
    not_evaluated_findings,
    not_tried,
)
from stepscope.analysis.advice.calibration import Verified
from stepscope.analysis.advice.changes import Advice, not_applicable, without_ranks
from stepscope.analysis.advice.missing_inputs import not_evaluated
from stepscope.cli.common import json_line, write_text
from stepscope.records.schema import Record
from stepscope.report.blocks import Interval, Page, Section, Table
from stepscope.studies.page import make_page, study_sections
from stepscope.studies.program.cases import STUDY_NAME as INSPECTED
from stepscope.studies.program.rows import ProgramRecord

_QUESTION = "Which changes apply, what would each gain, and what does it risk?"
_SO_FAR = "How accurate were predictions on this device, and how are they corrected?"


def advice_page(
    base: Record,
    advice: Sequence[Advice],
    records: Sequence[Record],
    history: Sequence[Verified] = (),
) -> Page:
    """Build the page: trials first, then the advice, then the unchanged step."""
    page = make_page(records)
    past = history_blocks(history, base.environment.device_name)
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
    advised = _section(base, advice, records)
    return Page(
        title=f"Advice for {ProgramRecord(base).name}",
        subtitle=page.subtitle,
        headline=tables[0] if tables else page.headline,
        sections=(*trials, advised, *((so_far,) if past else ()), *rest),
        banner=page.banner,
        verdict=page.verdict,
    )


def conclude(
    path: Path, as_json: bool, base: Record, advice: Sequence[Advice], records: Sequence[Record]
) -> int:
    """Write the page, print the tables or one line of JSON, and return the exit code."""
    from stepscope.advisor.verdict import program_verdict
    from stepscope.report.html import html_page
    from stepscope.report.terminal import print_sections
    from stepscope.report.verdict import print_verdict, verdict_facts

    facts_now = facts_of(base)
    if facts_now.doubt:
        # Advice stored with an older record has ranks.
        advice = without_ranks(advice)
    write_text(path, html_page(advice_page(base, advice, records, read_history())))
    left_out = not_evaluated(facts_now)
    own = _of_trials(records)
    verdict = program_verdict([base, *own])
    if as_json:
        facts = {
            "advice": advice,
            "tried": [
                {
                    "change": t.trial.code,
                    "predicted_ms": t.predicted_ms,
                    "realized_ms": t.realized_ms,
                    "interval_ms": _ends(t.realized),
                    "verdict": t.verdict,
                }
                for t in _tried(records)
            ],
            "not_evaluated": [one._asdict() for one in left_out],
            "not_applicable": [one._asdict() for one in not_applicable(facts_now)],
            "cannot_rank": facts_now.doubt,
            "report": path,
            "verdict": verdict_facts(verdict),
        }
        print(json_line(facts))
        return 0
    print_sections([_section(base, advice, records), *study_sections(own)])
    if not advice:
        none = "No change that could be evaluated" if left_out else "No known change"
        print(f"{none} is predicted to gain 3 % or more.")
    if verdict is not None:
        print_verdict(verdict)
    print(f"page: {path.resolve()}")
    return 0


def _ends(gain: Interval | None) -> tuple[float, float] | None:
    return None if gain is None else (gain.low, gain.high)


def _of_trials(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.study == TRIALS]


def _tried(records: Sequence[Record]) -> list[Tried]:
    return [Tried(record) for record in _of_trials(records)]


def _section(base: Record, advice: Sequence[Advice], records: Sequence[Record]) -> Section:
    listed = [
        advice_table(advice, facts_of(base).step_ms),
        lines_table(advice, "advise-how", "How to apply each change"),
        not_applicable_table(not_applicable(facts_of(base))),
    ]
    tried = _tried(records)
    settings = OF_SCRIPTS if base.study == INSPECTED else OF_MODELS
    return Section(
        name="advice",
        title="Advice",
        question=_QUESTION,
        blocks=(
            *cannot_rank(base, facts_of(base)),
            *not_evaluated_findings(not_evaluated(facts_of(base))),
            *(not_tried(advice, tried, settings) if tried else ()),
            *(table for table in listed if table.rows),
        ),
    )
