"""Waterfall of an observed step: the parts always add up to the step."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_records import attached, inspected_record
from sample_records import environment
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.analysis.verdict import Limit
from stepscope.records.schema import Ceiling, Quantity, Reading, Record
from stepscope.report.blocks import Timeline
from stepscope.views.program.rows import ProgramRecord
from stepscope.views.program.waterfall import (
    program_waterfall,
    step_limit,
    waterfall_blocks,
)
from view_blocks import codes, findings_of

KNOWN = (
    Ceiling(name="matmul.float32", value=1e12, unit="FLOP/s", source="measured"),
    Ceiling(name="memory.copy", value=1e12, unit="B/s", source="measured"),
)


def watched(flops: float = 2e9, ceilings: tuple[Ceiling, ...] = KNOWN, **changes: object) -> Record:
    return inspected_record(step=10.0, quantities=known(flops), ceilings=ceilings, **changes)


def known(flops: float) -> tuple[Quantity, ...]:
    return (
        Quantity(name="flops", value=flops, unit="FLOP"),
        Quantity(name="parameters", value=1e7, unit="parameters"),
    )


def with_lines(summary: Summary, *lines: tuple[str, str, float]) -> Summary:
    new_lines = tuple(LedgerLine(phase=phase, kind=kind, ms=ms) for phase, kind, ms in lines)
    return msgspec.structs.replace(summary, lines=new_lines)


def test_minimum_time_is_that_of_matmuls_and_the_optimizer() -> None:
    limit = step_limit(ProgramRecord(watched()))
    assert limit is not None
    assert (limit.matmul_ms, limit.update_ms) == (pytest.approx(2.0), pytest.approx(0.28))
    assert step_limit(ProgramRecord(watched(ceilings=()))) is None
    assert step_limit(ProgramRecord(watched(flops=0))) is None


def limit_of(matmul_ms: float, update_ms: float = 0.0) -> Limit:
    return Limit(matmul_ms=matmul_ms, update_ms=update_ms, dtype="float32")


def test_every_line_of_the_ledger_has_a_cause() -> None:
    lead = ProgramRecord(watched())
    assert lead.summary is not None
    summary = with_lines(
        lead.summary,
        ("forward", "matmul", 3.0),
        ("backward", "attention", 1.0),
        ("forward", "softmax", 0.5),
        ("backward", "copy/cast", 0.25),
        ("optimizer", "elementwise", 1.0),
        ("backward", "communication", 0.5),
        ("outside", "reduction", 0.125),
        ("idle", "host launches late", 2.0),
        ("", "unattributed", 0.125),
    )
    assert program_waterfall(summary, limit_of(2.0, 0.28), 10.0).beyond == {
        "matmuls beyond the limit": pytest.approx(2.0),
        "memory-bound operations": 0.5,
        "casts and copies": 0.25,
        "optimizer": pytest.approx(0.72),
        "exposed communication": 0.5,
        "outside the model": 0.125,
        "idle: host launches late": 2.0,
        # Unattributed in the trace, or not in the traced steps.
        "not attributed": pytest.approx(1.625),
    }


@pytest.mark.parametrize(
    ("step_ms", "late", "waits", "matmuls"),
    [(8.0, 3.0, 1.0, 2.0), (6.0, 1.5, 0.5, 2.0), (3.0, 0.0, 0.0, 1.0)],
)
def test_profiler_overhead_is_idle_time(
    step_ms: float, late: float, waits: float, matmuls: float
) -> None:
    assert SUMMARY is not None
    lines = ("forward", "matmul", 4.0), ("idle", "host launches late", 3.0), ("idle", "waits", 1.0)
    beyond = program_waterfall(with_lines(SUMMARY, *lines), limit_of(2.0), step_ms).beyond
    assert beyond["idle: host launches late"] == pytest.approx(late)
    assert beyond["idle: waits"] == pytest.approx(waits)
    # If operators alone take longer than the step, the machine was slower: all are scaled.
    assert beyond["matmuls beyond the limit"] == pytest.approx(matmuls)
    assert beyond["not attributed"] == pytest.approx(0.0)


WATCHED = watched()
SUMMARY = ProgramRecord(WATCHED).summary
PHASES = st.sampled_from(("forward", "backward", "optimizer", "outside", "idle"))
KINDS = st.sampled_from(("matmul", "attention", "softmax", "copy/cast", "communication", "other"))


ledgers = st.lists(st.tuples(PHASES, KINDS, st.floats(0, 100)), max_size=12)


@given(
    lines=ledgers,
    unattributed=st.floats(-20, 20),
    matmuls=st.floats(0, 100),
    update=st.floats(0, 100),
    step_ms=st.floats(0.1, 1000),
)
def test_parts_are_shares_of_the_step(
    lines: list[tuple[str, str, float]],
    unattributed: float,
    matmuls: float,
    update: float,
    step_ms: float,
) -> None:
    """Parts are non-negative and add up to the step: no share or sum of shares exceeds it."""
    assert SUMMARY is not None
    least = {"matmuls": matmuls, "bytes of the optimizer": update}
    summary = with_lines(SUMMARY, *lines, ("", "unattributed", unattributed))
    parts = program_waterfall(summary, limit_of(matmuls, update), step_ms)
    every = [*parts.ideal.values(), *parts.beyond.values()]
    assert min(every) >= -1e-12 * step_ms
    assert sum(every) == pytest.approx(step_ms)
    assert all(ms <= least[label] for label, ms in parts.ideal.items())
    for label, ms in least.items():
        far = ms - parts.ideal[label] >= 0.01 * step_ms
        assert (parts.faster.get(label) == ms) is far


@given(lines=ledgers, flops=st.floats(1e6, 1e12))
def test_minimum_time_above_the_measured_one_is_explained(
    lines: list[tuple[str, str, float]], flops: float
) -> None:
    assert SUMMARY is not None
    record = msgspec.structs.replace(WATCHED, quantities=known(flops))
    lead = ProgramRecord(attached(record, profile=with_lines(SUMMARY, *lines)))
    blocks = waterfall_blocks(lead, "inspect")
    assert lead.step_ms is not None
    limit = step_limit(lead)
    assert limit is not None
    if limit.ms > 1.02 * lead.step_ms:
        assert "inspect.rate-too-low" in codes(blocks)
    (picture,) = (block for block in blocks if isinstance(block, Timeline))
    ends = [span.end for lane in picture.lanes for span in lane.spans]
    assert max(ends) <= lead.step_ms * (1 + 1e-9)


def test_page_has_a_waterfall_if_the_rate_is_known() -> None:
    blocks = waterfall_blocks(ProgramRecord(watched()), "inspect")
    assert codes(blocks) == []
    (picture,) = (block for block in blocks if isinstance(block, Timeline))
    assert picture.lanes[-1].label == "measured"
    assert waterfall_blocks(ProgramRecord(watched(ceilings=())), "inspect") == ()


def test_power_cap_is_reported_with_the_waterfall() -> None:
    capped = Reading(at_s=1.0, sm_clock_mhz=1700.0, throttle=("power-cap",))
    here = environment(max_sm_clock_mhz=1980.0)
    blocks = waterfall_blocks(
        ProgramRecord(watched(readings=(capped,), environment=here)), "inspect"
    )
    text = [finding.text for finding in findings_of(blocks)]
    assert text[0].startswith(
        "At the power cap: this step, in 1 of 1 readings, its clock at 1.70 of 1.98 GHz."
    )
