"""Advice from a step that was timed on a busy machine: the changes, without ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prepared_store import Desk
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.view import advice_table, cannot_rank
from stepscope.analysis.advice.changes import advise, without_ranks
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import FailedCheck, Record
from stepscope.studies.program.cases import STUDY_NAME

SLOW = Path(__file__).parents[2] / "results" / "advise-slow_h200.jsonl"


def base() -> Record:
    return next(record for record in read_records(SLOW) if record.study == STUDY_NAME)


def busy(record: Record) -> Record:
    failed = FailedCheck(code="busy-machine", message="planted")
    return msgspec.structs.replace(record, failed_checks=(*record.failed_checks, failed))


def test_no_change_is_ranked_from_a_busy_machine() -> None:
    good, doubted = advise(facts_of(base())), advise(facts_of(busy(base())))
    assert any(one.ranked for one in good)
    assert not any(one.ranked for one in doubted)
    assert [one.code for one in doubted] == sorted(one.code for one in good)
    assert {one.code: one.gain_ms for one in doubted} == {one.code: one.gain_ms for one in good}
    ranks = [row[0] for row in advice_table(doubted, 100.0).rows]
    assert ranks == [None] * len(doubted)


def test_the_reason_for_missing_ranks_is_reported_with_the_times() -> None:
    assert cannot_rank(base(), facts_of(base())) == ()
    facts = facts_of(busy(base()))
    (finding,) = cannot_rank(busy(base()), facts)
    assert (finding.code, finding.tone) == ("advice.cannot-rank", "warn")
    assert finding.values == {
        "reason": "the machine was busy",
        "step_ms": facts.step_ms,
        "noise_ms": facts.noise_ms,
    }
    assert finding.text.startswith(
        "Cannot rank the changes: the machine was busy while the step was timed (26"
    )


def test_the_command_ranks_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    desk = Desk(tmp_path, capsys)
    for name, record in (("good", base()), ("busy", busy(base()))):
        write_records([record], tmp_path / f"{name}.jsonl")
    facts = {
        name: msgspec.json.decode(desk("advise", str(tmp_path / f"{name}.jsonl"), "--json").out)
        for name in ("good", "busy")
    }
    assert facts["good"]["cannot_rank"] == ""
    assert facts["busy"]["cannot_rank"] == "the machine was busy"
    assert any(one["ranked"] for one in facts["good"]["advice"])
    assert not any(one["ranked"] for one in facts["busy"]["advice"])
    printed = desk("advise", str(tmp_path / "busy.jsonl"))
    assert "Cannot rank the changes: the machine was busy" in " ".join(printed.out.split())
    page = (tmp_path / "busy-advice.html").read_text()
    assert "Cannot rank the changes" in page
    assert 'role="alert"' in page
    assert "Cannot rank" not in desk("advise", str(tmp_path / "good.jsonl")).out


def test_ranks_of_older_advice_are_removed() -> None:
    given = advise(facts_of(base()))
    assert [one.code for one in without_ranks(given)] == sorted(one.code for one in given)
    assert not any(one.ranked for one in without_ranks(given))
