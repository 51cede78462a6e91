"""Grade correct implementations in which a test has planted a mistake."""

from __future__ import annotations

from pathlib import Path

import msgspec

import quiet_bench
from stepscope.grading.check.cases import CriterionCase, Outcome
from stepscope.grading.check.measure import measure_criterion

SIMPLE = Path(__file__).with_name("own_implementations.py")


def planted(folder: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the implementations with these replacements, each of which must find its text."""
    text = SIMPLE.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    file = folder / "mine.py"
    file.write_text(text)
    return file


def grade(file: Path | str, name: str, criterion: str, kind: str = "", **more: object) -> Outcome:
    case = CriterionCase(
        source=str(file),
        name=name,
        kind=kind or name,
        criterion=criterion,
        **more,  # type: ignore[arg-type]
    )
    measured = measure_criterion(case, quiet_bench.QuietBench())
    return msgspec.convert(measured.attachments["outcome"], Outcome)


def codes(outcome: Outcome) -> set[str]:
    return {fault.code for fault in outcome.faults}
