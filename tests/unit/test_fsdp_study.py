"""The study of fully sharded data parallelism: what it says of given bytes and times."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_records import fsdp_record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.registry import find_study


def shown(kind: type[Any], **how: Any) -> list[Any]:
    blocks = find_study("fsdp").view([fsdp_record(**how)])
    return [block for block in blocks if isinstance(block, kind)]


@pytest.mark.parametrize(
    ("shares", "tone", "words"),
    [([0.51, 0.51], "good", "2.0 % above"), ([0.6, 0.5], "warn", "20.0 % above")],
)
def test_the_distance_from_an_equal_share_is_told(
    shares: list[float], tone: str, words: str
) -> None:
    first = shown(Finding, shares=shares)[0]
    assert "4.00 GiB on every rank unsharded" in first.text
    assert words in first.text
    assert first.tone == tone


def test_the_cost_in_time_is_told_against_both() -> None:
    said = [f.text for f in shown(Finding, steps={"broadcast": 150.0, "torch ZeRO": 200.0})]
    assert "takes 1.5" in said[1]
    assert "an unsharded one" in said[1]
    assert "takes 0.75" in said[2]
    assert "fully_shard" in said[2]


def test_the_table_and_the_figure_have_a_place_for_each_way() -> None:
    (table,) = shown(Table)
    assert [row[2] for row in table.rows] == ["unsharded", "FSDP", "torch fully_shard"]
    assert [row[-3] / 2**30 for row in table.rows] == [4.0, 2.0, 2.0]
    (figure,) = shown(Figure)
    assert figure.curves[0].x == ("unsharded", "FSDP", "torch fully_shard")
