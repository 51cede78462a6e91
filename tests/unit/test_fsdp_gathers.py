"""The gathers of FSDP steps: margins, late gathers, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from parallel_records import fsdp_record
from stepscope.report.blocks import Timeline
from stepscope.studies.fsdp.gathers import Gather, RankGathers
from stepscope.studies.registry import find_study
from view_blocks import coded, codes, rows_of, table_of

STEPS = 9
WEIGHTS = ("embedding.weight", "blocks.0.query.weight", "blocks.0.w1.weight", "head.weight")


def gather(weight: str, margin: float, spread: float, phase: Any = "forward") -> Gather:
    """A gather that ends `margin` ms before its weight is needed, give or take `spread`."""
    needed = 10.0 * (WEIGHTS.index(weight) + 1)
    offsets = [spread * (step % 3 - 1) for step in range(STEPS)]
    return Gather(
        weight=weight,
        phase=phase,
        issued=[needed - 9.0] * STEPS,
        ended=[needed - margin - offset for offset in offsets],
        needed=[needed] * STEPS,
    )


def blocks(
    margins: Sequence[float], spread: float = 0.1, other: float = 3.0, **options: Any
) -> Any:
    """View of ranks of which the first has these margins and the second `other` everywhere."""
    phases = [[(0.0, 40.0, "forward"), (40.0, 100.0, "backward")]] * STEPS
    ranks = [
        RankGathers(
            gathers=[
                gather(weight, margin, spread) for weight, margin in zip(WEIGHTS, each, strict=True)
            ],
            phases=phases,
        )
        for each in (margins, [other] * len(WEIGHTS))
    ]
    record = fsdp_record(**options)
    attachments = {**record.attachments, "gathers": msgspec.to_builtins(ranks)}
    return find_study("fsdp").view([msgspec.structs.replace(record, attachments=attachments)])


def test_late_gathers_and_the_wait_for_them_are_reported() -> None:
    finding = coded(blocks((-4.0, 2.0, -1.0, 0.0)), "fsdp.in-time")
    assert (finding.values["gathers"], finding.values["in_time"], finding.values["late"]) == (
        8,
        5,
        2,
    )
    assert finding.values["weight"] == "embedding.weight"
    assert finding.values["rank"] == 0
    assert finding.values["margin_ms"] == pytest.approx(-4.0)
    assert finding.values["margin_low_ms"] == pytest.approx(-4.1)
    assert finding.values["wait_ms"] == pytest.approx(5.0)
    assert finding.values["step_ms"] == 100.0
    assert finding.conclusion.startswith("The gathers are not in time: a step waits 5.00 ms")


def test_every_gather_may_be_in_time() -> None:
    finding = coded(blocks((1.0, 2.0, 1.0, 0.5)), "fsdp.in-time")
    assert (finding.values["in_time"], finding.values["late"]) == (8, 0)
    assert finding.conclusion == "Every gather is in time."


def test_margins_within_the_noise_are_no_answer() -> None:
    finding = coded(blocks((-0.5, 0.5, 0.1, 0.0), spread=3.0, other=1.0), "fsdp.in-time")
    assert (finding.values["in_time"], finding.values["late"]) == (0, 0)
    assert finding.conclusion == ""


def test_a_layer_has_the_margin_of_its_latest_weight() -> None:
    rows = rows_of(table_of(blocks((4.0, 2.0, -1.0, 0.5)), "fsdp-gathers"))
    first = {row["layer"]: row for row in rows if row["rank"] == 0}
    assert list(first) == ["embedding", "blocks.0", "head"]
    block = first["blocks.0"]
    assert (block["gathers"], block["in time"], block["latest"]) == (2, 1, "blocks.0.w1.weight")
    assert (block["needed"], block["gather ends"]) == (30.0, pytest.approx(31.0))
    assert block["margin"].value == pytest.approx(-1.0)


def test_the_timeline_shows_gathers_and_waits() -> None:
    (timeline,) = (
        block
        for block in blocks((-4.0, 2.0, -1.0, 1.0))
        if isinstance(block, Timeline) and "timeline" in block.name
    )
    lanes = {lane.label: lane.spans for lane in timeline.lanes}
    assert list(lanes) == ["step", "forward: gathers", "forward: waits", "backward: gathers"]
    groups = [span.group for span in lanes["forward: gathers"]]
    assert groups == ["gather late", "gather in time", "gather late", "gather in time"]
    wait = lanes["forward: waits"][0]
    assert wait.end - wait.start == pytest.approx(4.0, abs=0.2)


def test_one_rank_and_older_records_have_no_gathers() -> None:
    assert "fsdp.in-time" not in codes(blocks((1.0, 1.0, 1.0, 1.0), ranks=1))
    assert "fsdp.in-time" not in codes(find_study("fsdp").view([fsdp_record()]))
