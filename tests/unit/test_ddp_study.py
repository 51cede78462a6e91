"""The data parallelism study: rejected flags, and report blocks of given times."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from parallel_records import ddp_record
from stepscope.errors import UsageError
from stepscope.records.schema import Series
from stepscope.report.blocks import Figure, Finding, Table, Timeline
from stepscope.studies.ddp.view import DDPResult, _without_covered_labels
from stepscope.studies.registry import find_study
from view_blocks import coded, findings_of, rows_of, table_of


def findings(**options: Any) -> list[Finding]:
    return findings_of(find_study("ddp").view([ddp_record(**options)]))


def finding(code: str, **options: Any) -> Finding:
    match = coded(find_study("ddp").view([ddp_record(**options)]), code)
    assert match.records == (ddp_record(**options).id,)
    return match


def table(name: str, **options: Any) -> Table:
    return table_of(find_study("ddp").view([ddp_record(**options)]), name)


def test_exposed_is_step_time_minus_time_without_communication() -> None:
    rows = {row[4]: row for row in table("ddp-steps", steps={"naive": 140.0, "flat": 130.0}).rows}
    assert rows["naive"][-3] == pytest.approx(40.0, rel=0.05)
    assert rows["flat"][-3] == pytest.approx(30.0, rel=0.05)
    assert rows["no communication"][-3] is None


FAST = {"naive": 140.0, "bucketed 10 MiB": 108.0}


def test_the_fastest_strategy_is_reported() -> None:
    match = finding("ddp.fastest", steps=FAST)
    assert match.values["strategy"] == "bucketed 10 MiB"
    assert match.values["step_ms"] == pytest.approx(108.0, rel=0.02)
    assert match.values["exposed_naive_ms"] == pytest.approx(40.0, rel=0.05)
    assert match.values["gradient_bytes"] == 2**29
    assert match.values["alike"] == ""
    fastest = "bucketed 10 MiB is the fastest at 108 ms per step for 512 MiB of gradients"
    assert fastest in match.text
    assert match.sentence.endswith(" ms with naive.")


def test_the_overlapping_share_is_that_of_the_best_strategy() -> None:
    match = finding("ddp.hidden", steps=FAST, communication=40.0)
    assert match.values["strategy"] == "bucketed 10 MiB"
    assert match.values["share"] == pytest.approx(0.8, abs=0.05)
    assert match.conclusion.startswith("At least 7")
    assert match.conclusion.endswith(" % of that overlaps with the backward pass.")
    none = finding("ddp.hidden", steps=FAST, communication=4.0)
    assert none.values["share"] == 0.0
    assert none.conclusion.endswith("so none of that overlaps.")


def test_a_negative_exposed_time_is_not_a_result() -> None:
    """Exposed -66.6 ms of one bucket is noise, not an overlap of 100 %."""
    record = ddp_record(steps={"bucketed 10 MiB": 33.4}, communication=40.0)
    blocks = find_study("ddp").view([record])
    hidden = coded(blocks, "ddp.hidden")
    assert (hidden.values["share"], hidden.conclusion) == (None, "")
    assert coded(blocks, "ddp.fastest").values["exposed_ms"] is None
    rows = rows_of(table_of(blocks, "ddp-steps"))
    assert {row["exposed"] for row in rows if row["strategy"] == "bucketed 10 MiB"} == {None}


def test_indistinguishable_strategies_are_reported_together() -> None:
    match = finding("ddp.fastest", steps=FAST | {"flat": 108.0})
    other = {"flat", "bucketed 10 MiB"} - {match.values["strategy"]}
    assert {match.values["alike"]} == other
    assert " has the lowest median, 108 ms per step" in match.text
    assert match.text.endswith(f"Statistically indistinguishable: {other.pop()}.")


@pytest.mark.parametrize(
    ("ours", "tone", "words"),
    [
        (110.0, "good", "it is faster."),
        (140.0, "warn", "it is slower."),
        (120.0, "info", "statistically indistinguishable."),
    ],
)
def test_the_comparison_with_torch_uses_the_interval(ours: float, tone: str, words: str) -> None:
    steps = {"bucketed 1 MiB": ours, "bucketed 10 MiB": 150.0, "torch DDP": 120.0}
    match = finding("ddp.against-torch", steps=steps)
    assert match.values["strategy"] == "bucketed 1 MiB"
    assert match.values["ratio"] == pytest.approx(ours / 120, rel=0.02)
    assert match.tone == tone
    assert match.text.endswith(words)


def test_waits_are_split_for_every_rank() -> None:
    rows = table("ddp-waits").rows
    assert {row[2] for row in rows} == {0, 1}
    assert all(row[3] == pytest.approx(2.0, rel=0.01) for row in rows)
    assert all(row[4] == pytest.approx(18.0, rel=0.01) for row in rows)


def test_phases_are_those_of_one_round_and_add_up_to_its_step() -> None:
    """Medians of each phase separately would not add up."""
    base = ddp_record()
    steps = {  # by rank, in three rounds
        0: {"step": (10.0, 20.0, 30.0), "forward": (9.0, 1.0, 5.0), "backward": (1.0, 19.0, 25.0)},
        1: {"step": (12.0, 18.0, 33.0), "forward": (2.0, 17.0, 3.0), "backward": (10.0, 1.0, 30.0)},
    }
    series = tuple(
        Series(name=phase, variant="flat", unit="ms", rank=rank, values=values)
        for rank, phases in steps.items()
        for phase, values in phases.items()
    )
    (result,) = find_study("ddp").results([msgspec.structs.replace(base, series=series)])
    ways = DDPResult(*result)
    # The slowest took 12, 20 and 33; the median is rank 0's second round.
    assert ways.median("step", "flat") == 20.0
    assert ways.phases("flat") == {"forward": 1.0, "backward": 19.0}


def test_only_our_strategies_have_a_wait() -> None:
    waited = {row[4]: row[8] for row in table("ddp-steps").rows}
    assert waited["no communication"] is None
    assert waited["torch DDP"] is None
    assert waited["naive"] == pytest.approx(20.0, rel=0.1)


def test_labels_of_covered_spans_are_removed() -> None:
    shown = list(_without_covered_labels([(0.0, 5.0, "a"), (4.0, 6.0, "b"), (6.0, 7.0, "c")]))
    assert [label for *_, label in shown] == ["", "b", "c"]


def test_one_rank_reports_the_overhead_of_the_wrappers() -> None:
    options = {"steps": {"naive": 109.0, "no communication": 100.0}, "ranks": 1}
    match = finding("ddp.one-rank", **options)
    assert match.values["naive"] == pytest.approx(9.0, rel=0.3)
    assert match.values["alone_ms"] == pytest.approx(100.0, rel=0.02)
    assert "with one rank there is no communication; this is the overhead" in match.text
    assert "without a wrapper; the overhead is" in match.text
    assert "ms with naive" in match.text
    assert {one.code for one in findings(**options)} == {"ddp.one-rank", "ddp.against-torch"}


def test_a_failed_case_is_a_row_with_its_status() -> None:
    (row,) = table("ddp-steps", status="oom", reason="too large").rows
    assert row == ("small", 128, 2, "float32", None, "OOM", *(None,) * 8)


def test_a_record_without_a_dtype_is_float32() -> None:
    record = ddp_record()
    old = {name: value for name, value in record.config.items() if name != "dtype"}
    (result,) = find_study("ddp").results([msgspec.structs.replace(record, config=old)])
    assert result.case.dtype == "float32"
    assert result.case.config["dtype"] == "float32"


def test_figures_show_phases_and_reductions() -> None:
    shown = find_study("ddp").view([ddp_record()])
    figure = next(block for block in shown if isinstance(block, Figure))
    assert [curve.label for curve in figure.curves] == [
        "forward",
        "backward",
        "waited",
        "optimizer",
    ]
    timeline = next(block for block in shown if isinstance(block, Timeline))
    assert [lane.label for lane in timeline.lanes] == ["naive: compute", "naive: reductions"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 1}, "a batch of 1 cannot be divided among 2 ranks"),
        ({"batch": 3}, "choose a multiple of the ranks"),
        ({"ranks": (0,)}, "ranks is 0"),
        ({"bucket_mb": (0.0,)}, "bucket-mb is 0 "),
        ({"rounds": 0}, "rounds is 0"),
        ({"dtype": ("bfloat",)}, "perhaps you meant bfloat16"),
    ],
)
def test_invalid_flags_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_study("ddp").flags(**options)


def test_an_unknown_size_is_rejected() -> None:
    study = find_study("ddp")
    with pytest.raises(UsageError, match="smal"):
        study.cases(study.flags(size=("smal",)))
