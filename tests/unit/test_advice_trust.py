"""Advice from a step that was timed on a busy machine: the changes, without ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from own_records import advice, inspected_record, tried
from prepared_store import Desk
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.view import advice_table, cannot_rank, trial_blocks
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.advice.changes import advise, without_ranks
from stepscope.measure.instructions import Counter
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import FailedCheck, Record, Series
from stepscope.report.blocks import Finding
from stepscope.views.program.cases import STUDY_NAME

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


def invalid(record: Record) -> Record:
    failed = FailedCheck(code="above-ceiling", message="planted")
    return msgspec.structs.replace(record, failed_checks=(*record.failed_checks, failed))


def test_an_order_without_gains_is_reported_on_a_busy_machine() -> None:
    assert cannot_rank(base(), facts_of(base())) == ()
    facts = facts_of(busy(base()))
    (finding,) = cannot_rank(busy(base()), facts)
    assert (finding.code, finding.tone, finding.conclusion) == ("advice.order-only", "warn", "")
    order = str(finding.values["order"]).split(", ")
    assert order[:2] == ["bfloat16", "tf32"], "by the time of their kernels on the device"
    assert finding.values["by"] == "device time"
    assert "train-step" not in order, "launches take longer on a busy machine"
    assert finding.text.startswith("Order only; times are not reliable: the machine was busy.")


def test_not_even_an_order_follows_from_an_invalid_record() -> None:
    facts = facts_of(invalid(base()))
    (finding,) = cannot_rank(invalid(base()), facts)
    assert (finding.code, finding.tone) == ("advice.cannot-rank", "warn")
    assert finding.values == {
        "reason": facts.doubt,
        "step_ms": facts.step_ms,
        "noise_ms": facts.noise_ms,
    }


def with_work(record: Record, name: str, changed: float) -> Record:
    """A trial on a busy machine, whose changed step takes `changed` times the work."""
    work = [
        Series(name=name, variant=variant, unit="ms", values=tuple(f * v for v in WORK))
        for variant, f in (("base", 1.0), ("changed", changed))
    ]
    own = busy(record)
    return msgspec.structs.replace(own, series=(*own.series, *work))


WORK = (100.0, 101.0, 99.0, 100.5, 100.0)


@pytest.mark.parametrize(("name", "by"), [("cpu", "CPU time"), ("instructions", "instructions")])
def test_trials_on_a_busy_machine_are_ordered_by_their_work(name: str, by: str) -> None:
    """Whatever their times were."""
    some = [
        with_work(tried(49.0, advice("one", attention="fused"), id="a"), name, 0.9),
        with_work(tried(51.0, advice("two", compile="model"), id="b"), name, 0.5),
        with_work(tried(20.0, advice("three", checkpoint="blocks"), id="c"), name, 1.1),
    ]
    findings = [block for block in trial_blocks(some) if isinstance(block, Finding)]
    (finding,) = [one for one in findings if one.code == "advice.order-only"]
    assert (finding.values["order"], finding.values["by"]) == ("two, one", by)
    verdict = program_verdict([inspected_record(), *some])
    assert verdict is not None
    assert verdict.order == ("the change two", "the change one")
    quiet = [tried(20.0, advice("one"))]
    assert "advice.order-only" not in [getattr(one, "code", "") for one in trial_blocks(quiet)]


def test_instructions_are_counted_where_the_machine_can() -> None:
    task_clock = Counter((1, 1))
    before = task_clock.read()
    if before is None:
        pytest.skip("this machine does not allow perf_event_open")
    assert sum(range(200_000)) > 0
    after = task_clock.read()
    assert after is not None
    assert after > before
    assert Counter((99, 0)).read() is None


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
    assert "Order only, by device time, best first: bfloat16" in " ".join(printed.out.split())
    page = (tmp_path / "busy-advice.html").read_text()
    assert "Order only; times are not reliable" in page
    assert 'role="alert"' in page
    assert "Order only" not in desk("advise", str(tmp_path / "good.jsonl")).out


def test_ranks_of_older_advice_are_removed() -> None:
    given = advise(facts_of(base()))
    assert [one.code for one in without_ranks(given)] == sorted(one.code for one in given)
    assert not any(one.ranked for one in without_ranks(given))
