"""Progress of a run in the terminal."""

from __future__ import annotations

import pytest

from sample_records import record, run
from stepscope.cli.progress import Bar, PlainLines
from stepscope.studies.base import PlannedCase


def case(key: str) -> PlannedCase:
    return PlannedCase(study="benchmark", key=key, config={})


@pytest.mark.parametrize("kind", [PlainLines, Bar])
def test_cases_beyond_the_announced_total_are_counted(
    kind: type[PlainLines | Bar], capsys: pytest.CaptureFixture[str]
) -> None:
    with kind(run(), 1, 0) as observer:
        for key in ("a", "b"):
            observer.case_started(case(key))
            observer.case_finished(record(case=key))
    text = capsys.readouterr().err
    assert text.index("benchmark a:") < text.index("benchmark b:")
    assert "2/1" not in text
    if kind is PlainLines:
        assert "[1/1]" in text
        assert "[2/2]" in text


@pytest.mark.parametrize(
    ("total", "expected"),
    [(0, ""), (1, ": 1 case, 0 already done"), (2, ": 2 cases, 0 already done")],
)
def test_first_line_counts_cases(
    total: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainLines(run(), total, 0)
    assert capsys.readouterr().err == f"run {run().id}{expected}\n"
