"""Findings about an observed program, from synthetic records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from own_records import attached, inspected_record
from sample_records import environment, times
from stepscope.advisor.inspect.gather import with_profile
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.verdict import SlowestRank
from stepscope.records.memory import PARAMETERS, SAVED
from stepscope.records.schema import Ceiling, Quantity, Record
from stepscope.report.blocks import Finding
from stepscope.views.program.findings import inspected_findings
from stepscope.views.program.rows import ProgramRecord, programs
from stepscope.views.program.view import headline_table
from study_records import memory_record
from view_blocks import coded


def with_summary(record: Record, **changes: object) -> Record:
    summary = msgspec.structs.replace(record.required("profile", Summary), **changes)
    return attached(record, profile=summary)


def test_no_rank_is_blamed_if_different_ranks_are_late() -> None:
    def finding(code: str, *starts: list[list[int]]) -> Finding:
        records = [
            attached(inspected_record(rank, len(starts), id=f"rank{rank}"), collectives=times)
            for rank, times in enumerate(starts)
        ]
        (ranks,) = programs(records)
        one = coded(inspected_findings(ranks), code)
        assert one.records == tuple(record.id for record in records)
        return one

    def verdict(starts: list[list[list[int]]]) -> SlowestRank | None:
        records = [
            attached(inspected_record(rank, len(starts)), collectives=times)
            for rank, times in enumerate(starts)
        ]
        judged = program_verdict(records)
        assert judged is not None
        assert "--nproc 2" in judged.next_command
        return judged.slowest

    ms = 1_000_000
    alternating = finding("inspect.ranks-late", [[0, 8 * ms], [20 * ms]], [[5 * ms, ms], [20 * ms]])
    assert alternating.text == (
        "Different ranks are late at different collectives, and the others wait for them. Of 3"
        " collectives, the last to arrive was rank 0 for 2, rank 1 for 1."
    )
    usual = [[at * 100 * ms, (at * 100 + 8) * ms] for at in range(3)]
    late = [[start + 20 * ms for start in step] for step in usual]
    slow = finding("inspect.slowest-rank", usual, late)
    assert slow.values["slowest"] == 1
    assert slow.text.startswith("Rank 1 is the slowest: on average it arrives at a collective 20")
    slowest = verdict([usual, late])
    assert slowest is not None
    assert slowest.rank == 1
    assert slowest.late_ms == pytest.approx(20.0)
    assert verdict([usual, usual]) is None
    # Three collectives of which one is late by chance do not show that a rank is slow.
    finding("inspect.ranks-late", [[0, 8 * ms], [20 * ms]], [[30 * ms, ms], [40 * ms]])
    several = finding("inspect.ranks-late", [[0]], [[6 * ms]], [[10 * ms]])
    assert several.values == {
        "ranks": 3,
        "slowest": None,
        "rank0_late_ms": 0.0,
        "rank1_late_ms": 6.0,
        "rank2_late_ms": 10.0,
    }
    assert several.text == (
        "Several ranks are late at collectives, on average after the first one:"
        " rank 2 10.0 ms, rank 1 6.00 ms."
    )
    alike = finding("inspect.ranks-alike", [[0], [20 * ms]], [[10], [20 * ms]])
    assert alike.text == "The 2 ranks are equally fast: none delays another."


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (
            0.8,
            (
                "Under the profiler it takes 25.0 % more.",
                "A traced step takes 1.00 ms (800 µs without the profiler): the device works",
            ),
        ),
        (1.01, ("half of which are between", "A step takes 1.00 ms: the device works")),
        (
            1.25,
            (
                "Under the profiler it takes 20.0 % less: the script's work",
                "A traced step takes 1.00 ms (1.25 ms without the profiler): the device works",
            ),
        ),
    ],
)
def test_traced_and_timed_steps_are_distinguished(step: float, expected: tuple[str, ...]) -> None:
    (ranks,) = programs([inspected_record(step=step)])
    result = inspected_findings(ranks)
    text = " ".join(one.sentence for one in result)
    assert all(part in text for part in expected), text
    assert ("Under the profiler" in text) is (step != 1.01)
    values = coded(result, "inspect.step").values
    assert values["traced_more"] == pytest.approx(1 / step - 1, abs=1e-6)


@pytest.mark.parametrize(("device", "things"), [("cpu", "operators"), ("cuda", "kernels")])
def test_kernels_or_operators_are_counted_in_integers(device: str, things: str) -> None:
    where = environment(device_kind=device)
    record = with_summary(inspected_record(environment=where), launches=367.7)
    (ranks,) = programs([record])
    texts = [one.text for one in inspected_findings(ranks)]
    assert any(f"in 368 {things}" in text for text in texts), texts
    table = headline_table([record])
    titles = [column.title for column in table.columns]
    assert table.rows[0][titles.index(things)] == 368


def test_module_whose_name_is_a_number_is_not_read_as_a_count() -> None:
    lines = {PARAMETERS: 1 << 20, f"{SAVED}1 BatchNorm2d, batch_norm": 1 << 30}
    ledger = memory_record(lines=lines).attachments["ledger"]
    (ranks,) = programs([attached(inspected_record(), ledger=ledger)])
    result = coded(inspected_findings(ranks), "inspect.memory")
    assert "saved for backward is “1 BatchNorm2d, batch_norm”" in result.text
    assert not result.timed


def watched_with(**changes: object) -> ProgramRecord:
    return ProgramRecord(with_summary(inspected_record(), **changes))


@pytest.mark.parametrize(
    ("counted", "expected"),
    [(17 / 3, " in 5.7 calls on average, "), (6.0, " in 6 calls, "), (1.0, " in 1 call, ")],
)
def test_mean_number_of_calls_is_called_a_mean(counted: float, expected: str) -> None:
    summary = inspected_record().required("profile", Summary)
    (first, *_) = summary.kernels
    row = msgspec.structs.replace(first, ms=100.0, count=counted)
    lead = watched_with(kernels=(row,), steps=(1.0, 1.0, 1.0))
    (text,) = [one.text for one in inspected_findings([lead]) if "takes the most time" in one.text]
    assert expected in text


def test_step_not_slower_than_its_issue_time_is_host_bound() -> None:
    record = inspected_record(step=1.0)
    for issue, output in ((0.5, "takes 2 times that"), (2.0, "The CPU is the bottleneck")):
        issued = times("issue", issue, "host", phase="forward")
        series = (*record.series, issued)
        lead = ProgramRecord(msgspec.structs.replace(record, series=series))
        result = coded(inspected_findings([lead]), "inspect.issue")
        assert result.values == {"issue_ms": issue, "step_ms": 1.0, "forward": issue}
        assert output in result.sentence


def test_loading_time_is_at_most_the_step() -> None:
    record = inspected_record(step=1.0)
    lead = ProgramRecord(
        msgspec.structs.replace(record, series=(*record.series, times("loading", 1.4, "host")))
    )
    (text,) = [one.sentence for one in inspected_findings([lead]) if "DataLoader" in one.text]
    assert "100.0 %" in text
    assert "it may get slower" in text


def test_rate_above_its_ceiling_is_explained() -> None:
    quantities = (Quantity(name="flops", value=2e9, unit="FLOP"),)
    for value, too_low in ((1e12, True), (4e12, False)):
        ceiling = Ceiling(name="matmul.float32", value=value, unit="FLOP/s", source="measured")
        record = inspected_record(step=1.0, quantities=quantities, ceilings=(ceiling,))
        result = coded(inspected_findings([ProgramRecord(record)]), "inspect.rate")
        assert result.values["mfu"] == pytest.approx(2e12 / value)
        assert ("measured too low" in result.conclusion) is too_low


def test_missing_trace_is_not_named_by_its_temporary_path(tmp_path: Path) -> None:
    record = inspected_record(notes={"trace": "rank-0.trace.json.gz"})
    (tmp_path / "rank-0.trace.json").write_text("{")
    (tmp_path / "rank-1.trace.json.gz").write_bytes(b"")
    for name in ("rank-0.trace.json.gz", "rank-0.trace.json", "rank-1.trace.json.gz"):
        noted = msgspec.structs.replace(record, notes={"trace": name})
        missing = with_profile(noted, tmp_path).notes["trace_missing"]
        assert str(tmp_path) not in missing
        assert "perhaps you meant" not in missing
