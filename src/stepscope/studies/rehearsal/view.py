"""The section of the report: what is predicted, and how right predictions were. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Column, Finding, Table
from stepscope.studies.rehearsal import findings, pictures
from stepscope.studies.rehearsal.checks import check_findings, check_of, check_table
from stepscope.studies.rehearsal.subject import (
    Prediction,
    Question,
    Subject,
    predict,
    preset_network,
    subject_of,
)

RECORDING = "recording"
CHECK = "check"


def rehearsal_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    recorded = [record for record in records if record.config.get("kind") == RECORDING]
    subjects = [subject for record in recorded if (subject := subject_of(record))]
    checks = [
        check
        for record in records
        if record.config.get("kind") == CHECK and (check := check_of(record))
    ]
    told: list[Block] = [*check_findings(checks)]
    if subjects:
        told += subject_blocks(subjects, _question(recorded))
    if checks:
        told.append(check_table(checks))
    lost = [record for record in records if record.status != "ok"]
    if lost:
        told.append(_lost_table(lost))
    return tuple(sorted(told, key=lambda block: not isinstance(block, Finding)))


def subject_blocks(subjects: Sequence[Subject], question: Question) -> list[Block]:
    """Everything that is said of these recordings to that question."""
    told = [(subject, predict(subject, question)) for subject in subjects]
    blocks: list[Block] = []
    for subject, predictions in told:
        blocks += [
            findings.recorded_finding(subject),
            *findings.bucket_findings(subject, predictions),
            *findings.scaling_findings(subject, question),
            *findings.closed_form_findings(subject, question),
            pictures.overlap_timeline(subject, _middle(predictions)),
            *pictures.rank_figures(subject, question),
            pictures.bucket_figure(subject, predictions),
        ]
    tables = pictures.prediction_table(told), pictures.closed_form_table(subjects, question)
    return [*blocks, *tables]


def _question(records: Sequence[Record]) -> Question:
    """Every cluster that one of the records was made for."""
    links = dict.fromkeys(link for record in records for link in record.config["link"])
    ranks = {count for record in records for count in record.config["ranks"]}
    return Question(tuple(preset_network(link) for link in links), tuple(sorted(ranks)))


def _middle(held: Sequence[Prediction]) -> Prediction:
    return held[len(held) // 2]


def _lost_table(records: Sequence[Record]) -> Table:
    return Table(
        name="rehearsal-lost",
        title="Cases without a result",
        columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
        rows=tuple((record.case, record.status, record.reason) for record in records),
    )
