"""The study of collectives: rejected flags, measurements, findings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from parallel_records import SIZES, collective_record
from quiet_bench import QuietBench
from stepscope.analysis.links import bus_factor, fit_link
from stepscope.errors import UsageError
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Interval, Table
from stepscope.studies.base import CaseSkipped
from stepscope.studies.registry import find_study
from view_blocks import figures_of, findings_of, tables_of


def findings(*records: Record) -> list[Finding]:
    return findings_of(find_study("allreduce").view(records))


def tables(*records: Record) -> dict[str, Table]:
    return tables_of(find_study("allreduce").view(records))


def test_a_line_is_fitted_to_exact_times() -> None:
    link = fit_link(SIZES, [0.25 + size / 2e6 for size in SIZES])
    assert link is not None
    assert link.latency_ms == pytest.approx(0.25)
    assert link.bytes_per_ms == pytest.approx(2e6)
    assert link.residual == pytest.approx(0.0, abs=1e-9)


def test_no_line_is_fitted_without_a_trend() -> None:
    assert fit_link([1024], [1.0]) is None
    assert fit_link([1024, 2**20], [5.0, 0.001]) is None
    steep = fit_link([10, 1000], [0.001, 1.0])
    assert steep is not None
    assert steep.latency_ms == 0.0
    assert steep.residual > 0.5


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all-reduce", 1.5), ("all-gather", 0.75), ("reduce-scatter", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_follows_the_nccl_definition(collective: str, factor: float) -> None:
    assert bus_factor(collective, 4) == factor
    for row in tables(collective_record(collective, ranks=4))["allreduce-times"].rows:
        size, count, time, algorithm, bus = row[3], row[4], row[6], row[7], row[8]
        assert isinstance(time, Interval)
        assert count == size // 4
        assert algorithm == pytest.approx(size / time.value * 1e3)
        assert bus == pytest.approx(algorithm * factor)


def test_the_time_is_that_of_the_slowest_rank() -> None:
    shown = tables(collective_record(latency_ms=1.0, bytes_per_ms=1e9))
    time = shown["allreduce-times"].rows[0][6]
    assert isinstance(time, Interval)
    assert time.value == pytest.approx(1.01, rel=1e-3)


def test_a_finding_gives_latency_and_bandwidth() -> None:
    record = collective_record(latency_ms=0.1, bytes_per_ms=1e6)
    by_size, finding = findings(record)
    assert by_size.code == "allreduce.by-size"
    assert by_size.values["bytes"] == pytest.approx(4096)
    assert by_size.values["time"] == pytest.approx(4.33 / 0.102, rel=0.05)
    assert finding.code == "allreduce.link"
    assert finding.records == (record.id,)
    assert finding.values["latency_ms"] == pytest.approx(0.101, rel=1e-3)
    assert finding.values["bytes_per_s"] == pytest.approx(990e6, rel=1e-3)
    assert finding.text == (
        "all-reduce, 2 ranks, gloo: 1.00 KiB take 102 µs; the links reach 967 MB/s (busbw at 4.00"
        " MiB)."
    )
    assert re.fullmatch(
        r"Linear fit: a latency of 101 µs per message and 990 MB/s, with a residual of at most"
        r" \S+ %; below 97\.7 KiB the latency dominates\.",
        finding.conclusion,
    )


def test_wrong_results_are_counted() -> None:
    record = collective_record(wrong=3)
    finding = findings(record)[0]
    assert (finding.code, finding.tone) == ("allreduce.wrong-elements", "warn")
    assert (finding.values["elements"], finding.values["bytes"]) == (3, 1024)
    assert finding.records == (record.id,)
    assert finding.sentence == (
        "all-reduce, 2 ranks, gloo: 3 elements of 1.00 KiB are wrong; its times are meaningless."
    )


def test_collectives_of_the_same_ranks_share_a_finding_and_a_figure() -> None:
    records = [
        collective_record("all-reduce", latency_ms=0.2),
        collective_record("broadcast", bytes_per_ms=2e6),
        collective_record("all-reduce", ranks=4),
    ]
    shown = {one.code: one for one in findings(*records)}
    both, other = shown["allreduce.compared"], shown["allreduce.link"]
    more = shown["allreduce.by-ranks"]
    assert more.records == (records[0].id, records[2].id)
    assert more.values["ring"] == pytest.approx(1.5)
    assert both.records == (records[0].id, records[1].id)
    assert other.values["ranks"] == 4
    assert (both.values["quickest"], both.values["slowest"]) == ("broadcast", "all-reduce")
    assert both.values["busbw of broadcast"] > both.values["busbw of all-reduce"]  # type: ignore[operator]
    assert both.text.startswith("2 ranks, gloo: 1.00 KiB take 102 µs (broadcast) to 203 µs (all-")
    assert re.search(r"busbw of \S+ MB/s \(all-reduce\) to \S+ GB/s \(broadcast\)", both.text)
    figures = figures_of(find_study("allreduce").view(records)).values()
    assert [[curve.label for curve in figure.curves] for figure in figures] == [
        ["all-reduce", "broadcast"],
        ["all-reduce"],
    ]


def test_one_rank_reports_no_link() -> None:
    record = collective_record(ranks=1)
    (finding,) = findings(record)
    assert finding.code == "allreduce.one-rank"
    assert finding.values["ms"] == pytest.approx(0.101, rel=1e-2)
    assert finding.sentence == (
        "all-reduce, 1 rank, gloo: a call takes 101 µs (1.00 KiB); one rank uses no link."
    )
    shown = tables(record)
    assert {row[8] for row in shown["allreduce-times"].rows} == {None}
    assert "allreduce-links" not in shown
    assert not figures_of(find_study("allreduce").view([record]))
    (several,) = findings(record, collective_record("broadcast", ranks=1))
    assert several.code == "allreduce.compared"
    assert several.text.endswith("; one rank uses no link.")


def test_a_failed_case_is_a_row_with_its_status() -> None:
    (row,) = tables(collective_record(status="oom", reason="too large"))["allreduce-times"].rows
    assert row == ("all-reduce", 2, "auto", "OOM", *(None,) * 6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"collective": ("all-reduse",)}, "perhaps you meant all-reduce"),
        ({"backend": ("mpi",)}, "backend 'mpi' does not exist"),
        ({"ranks": (2, 0)}, "ranks is 0 "),
        ({"ranks": (4,), "sizes": (8,)}, "every rank needs 4 bytes"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_invalid_flags_are_rejected(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_study("allreduce").flags(**flags)


def test_nccl_without_gpus_is_skipped() -> None:
    study = find_study("allreduce")
    (case,) = study.cases(study.flags(backend=("nccl",)))
    with pytest.raises(CaseSkipped, match="needs GPUs"):
        study.measure(case, QuietBench())  # type: ignore[arg-type]
