"""benchmarks/rehearsal_check: predictions compared with planted ranks, and the measured channel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rehearsal_check import STUDY as CHECK
from rehearsal_check import view
from rehearsal_check.cases import Sampled
from rehearsal_check.channel import measured_channel
from rehearsal_check.contention import ContendedQueue
from rehearsal_check.view import compare

from rehearsal_records import Line, check_record, recording
from stepscope.analysis.rehearsal.recording import recording_of
from stepscope.analysis.rehearsal.replay import Replay, Upkeep, replay
from stepscope.errors import UsageError
from stepscope.parallel.buckets import MEGABYTE
from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Finding, Table
from stepscope.training.ranks import one_process
from view_blocks import findings_of, table_of


def check_of(record: Record) -> view.Check | None:
    (result,) = CHECK.results([record])
    return view.check_of(*result)


def findings(*records: Record) -> list[Finding]:
    return findings_of(CHECK.view(records))


def table(name: str, *records: Record) -> Table:
    return table_of(CHECK.view(records), name)


def test_a_correct_prediction_has_a_small_error() -> None:
    check = check_of(check_record())
    assert check is not None
    assert check.comparison.channel.alone(2**20) == pytest.approx(2.0)
    assert check.comparison.upkeep.agree == 0.5
    assert [row.error for row in check.comparison.rows] == pytest.approx([0.0] * 4, abs=2e-3)
    (finding,) = findings(check_record())
    assert finding.code == "rehearsal.prediction-error"
    assert finding.values["error"] == pytest.approx(0.0, abs=2e-3)
    assert finding.records == (check.record.id,)
    assert "tiny at context 32 on 2 waiting ranks over gloo" in finding.text


def test_a_wrong_prediction_is_reported_with_its_error() -> None:
    record = check_record({"flat": 0.25})
    (finding,) = findings(record)
    assert finding.values["strategy"] == "flat"
    assert finding.values["error"] == pytest.approx(-0.2, abs=2e-3)
    assert "is at most 20.0 % (flat:" in finding.text
    rows = {row[1]: row for row in table("rehearsal-checks", record).rows}
    assert rows["flat"][4] == pytest.approx(-0.2, abs=2e-3)
    # Exposed communication, predicted and measured.
    assert rows["naive"][5] == pytest.approx(rows["naive"][6], rel=0.02)


def test_contention_of_packing_and_reductions() -> None:
    record = check_record()
    times = {
        Sampled("alone", size=1000): 2.0,
        Sampled("alone", size=1_000_000): 10.0,
        Sampled("pack", size=1000): 0.5,
        Sampled("pack", size=1_000_000): 1.0,
        Sampled("issue"): 0.1,
        Sampled("agree"): 0.5,
        Sampled("step", "no communication"): 100.0,
        Sampled("step", "flat"): 110.0,
        # Four of each: 3 ms instead of 2, 6 instead of 4; both finish 1 and 2 ms late.
        Sampled("packed", "4", 1000): 3.1,
        Sampled("packed", "4", 1_000_000): 6.1,
        Sampled("beside", "4", 1000): 4.1,
        Sampled("beside", "4", 1_000_000): 12.0,
    }
    series = [Series(**what._asdict(), unit="ms", values=(ms,) * 5) for what, ms in times.items()]
    recorded = recording_of(record)
    assert recorded is not None
    comparison = compare(recorded, series, [2.0])
    assert comparison is not None
    assert comparison.contention == pytest.approx((1.5, 0.5))
    assert check_of(record).comparison.contention == (1.0, 0.0)  # type: ignore[union-attr]


def test_a_check_without_samples_of_the_link_is_none() -> None:
    record = check_record()
    phases = tuple(s for s in record.series if not s.variant and not s.size)
    assert check_of(msgspec.structs.replace(record, series=phases)) is None


def test_computing_ranks_have_the_recorded_model() -> None:
    flags = CHECK.flags(size=("tiny",), context=(8,), batch=(3,), ranks=(2,), d_ff=96, layers=1)
    (case,) = CHECK.cases(flags)
    world: Any = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"))
    trained, model = one_process.subject_of(world, case, case.batch, case.dtype)
    assert model.config == case.model()
    assert trained.fed.batch.shape == (3, 9)


def test_a_failed_case_is_in_the_table_of_failed_cases() -> None:
    failed = check_record(ranks=4, status="error", reason="no network")
    assert table("rehearsal-check-lost", failed).rows == ((failed.case, "error", "no network"),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": (2, -1)}, "ranks is -1"),
        ({"bucket_mb": (0.0,)}, "bucket-mb is 0 "),
        ({"bucket_mb": ()}, "bucket-mb has no value"),
    ],
)
def test_invalid_flags_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CHECK.flags(**options)


def test_a_channel_is_measured_with_single_and_queued_messages() -> None:
    alone = {size: 1.0 + size / 1e6 for size in (1000, 10**6, 10**7)}
    bursts = {(size, 8): alone[size] + 7 * (0.25 + size / 2e6) for size in (1000, 10**6)}
    channel = measured_channel(alone, bursts)
    assert channel is not None
    assert channel.alone(5e6) == pytest.approx(6.0)
    assert channel.alone(2e7) == pytest.approx(21.0)
    assert channel.alone(10) == pytest.approx(1.001)
    assert channel.queued(5e6) == pytest.approx(2.75)
    assert channel.line.latency_ms == pytest.approx(1.0)
    single = measured_channel(alone, {})
    assert single is not None
    assert single.queued(5e6) == pytest.approx(6.0)
    assert measured_channel({1000: 1.0}, {}) is None


def test_a_larger_message_is_never_faster() -> None:
    channel = measured_channel({1000: 2.0, 2000: 1.0, 10**6: 5.0, 2 * 10**6: 4.0}, {})
    assert channel is not None
    assert channel.alone(2000) == 2.0
    assert channel.alone(10**9) == 5.0


def test_concurrent_work_takes_longer_and_delays_messages() -> None:
    slow = Line(1.0, 0.1 * MEGABYTE)

    def contended(*ready: float) -> Replay:
        queue = ContendedQueue(1.5, 0.5)
        return replay(recording(ready), "overlap", slow, upkeep=Upkeep(pack=2.0), queue=queue)

    result = contended(60.0, 30.0, 20.0)
    # At 50 nothing is in flight: 2 ms. At 62 a message is until 63: 3 ms, and it ends at 64.
    assert [(m.ready, m.start, m.end) for m in result.messages] == [
        (52, 52, 64),
        (65, 65, 76),
        (97, 97, 108),
    ]
    # The third gradient is ready at 95, when nothing is in flight.
    assert result.backward_end == 97.0
    queue = contended(23.0, 22.0, 20.0)
    # Two messages, one of them still queued, are both delayed by a ms.
    assert [(m.start, m.end) for m in queue.messages] == [(52, 65), (65, 76), (76, 87)]
