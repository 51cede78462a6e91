"""The study of fully sharded data parallelism: what it says of given bytes and times."""

from __future__ import annotations

import re
from typing import Any

import pytest

from parallel_records import fsdp_record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.registry import find_study


def shown(kind: type[Any], **how: Any) -> list[Any]:
    blocks = find_study("fsdp").view([fsdp_record(**how)])
    return [block for block in blocks if isinstance(block, kind)]


def finding(code: str, **how: Any) -> Finding:
    (found,) = (one for one in shown(Finding, **how) if one.code == code)
    assert found.records == (fsdp_record(**how).id,)
    return found


@pytest.mark.parametrize(
    ("shares", "tone", "off"), [([0.51, 0.51], "good", 0.02), ([0.6, 0.5], "warn", 0.2)]
)
def test_the_distance_from_an_equal_share_is_told(
    shares: list[float], tone: str, off: float
) -> None:
    found = finding("fsdp.share", shares=shares)
    assert found.values["whole_bytes"] == 2**32
    assert found.values["off"] == pytest.approx(off)
    assert found.tone == tone
    assert "4.00 GiB on every rank unsharded" in found.text
    assert f"{100 * off:.1f} % above an equal share." in found.text


def test_the_cost_in_time_is_told_against_both() -> None:
    steps = {"broadcast": 150.0, "torch ZeRO": 200.0}
    whole = finding("fsdp.against-unsharded", steps=steps)
    assert whole.values["ratio"] == pytest.approx(1.5, rel=0.02)
    assert re.search(r"a fully sharded step takes 1\.\d+× an unsharded one \[", whole.text)
    torch = finding("fsdp.against-torch", steps=steps)
    assert torch.values["ratio"] == pytest.approx(0.75, rel=0.02)
    assert "× one with torch's fully_shard [" in torch.text


def test_one_rank_has_nobody_to_share_with() -> None:
    assert "one rank has nobody to share with" in finding("fsdp.one-rank", ranks=1).text
    assert "fsdp.share" not in {one.code for one in shown(Finding, ranks=1)}


def test_cases_are_those_of_sharding() -> None:
    fsdp, sharding = find_study("fsdp"), find_study("sharding")
    flags = fsdp.flags(size=("tiny", "small"), ranks=(2, 4))
    planned = [(case.key, case.config) for case in fsdp.planned(flags)]
    assert planned == [(case.key, case.config) for case in sharding.planned(flags)]
    assert {case.study for case in fsdp.planned(flags)} == {"fsdp"}


def test_the_table_and_the_figure_have_a_place_for_each_way() -> None:
    (table,) = shown(Table)
    assert [row[2] for row in table.rows] == ["unsharded", "FSDP", "torch fully_shard"]
    assert [row[-3] / 2**30 for row in table.rows] == [4.0, 2.0, 2.0]
    (figure,) = shown(Figure)
    assert figure.curves[0].x == ("unsharded", "FSDP", "torch fully_shard")
