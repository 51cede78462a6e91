"""The FSDP study: report blocks of given bytes and times."""

from __future__ import annotations

import re
from typing import Any

import pytest

from parallel_records import fsdp_record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.registry import find_study


def shown(kind: type[Any], **options: Any) -> list[Any]:
    blocks = find_study("fsdp").view([fsdp_record(**options)])
    return [block for block in blocks if isinstance(block, kind)]


def finding(code: str, **options: Any) -> Finding:
    (match,) = (one for one in shown(Finding, **options) if one.code == code)
    assert match.records == (fsdp_record(**options).id,)
    return match


@pytest.mark.parametrize(
    ("shares", "tone", "off"), [([0.51, 0.51], "good", 0.02), ([0.6, 0.5], "warn", 0.2)]
)
def test_the_deviation_from_an_equal_share_is_reported(
    shares: list[float], tone: str, off: float
) -> None:
    match = finding("fsdp.share", shares=shares)
    assert match.values["whole_bytes"] == 2**32
    assert match.values["off"] == pytest.approx(off)
    assert match.tone == tone
    assert "4.00 GiB on every rank unsharded" in match.text
    assert f"{100 * off:.1f} % above an equal share." in match.text


def test_step_time_is_compared_with_unsharded_and_torch() -> None:
    steps = {"broadcast": 150.0, "torch ZeRO": 200.0}
    unsharded = finding("fsdp.against-unsharded", steps=steps)
    assert unsharded.values["ratio"] == pytest.approx(1.5, rel=0.02)
    words = r"a fully sharded step takes 1\.\d+× \[.*\] the time of an unsharded one\."
    assert re.search(words, unsharded.text)
    torch = finding("fsdp.against-torch", steps=steps)
    assert torch.values["ratio"] == pytest.approx(0.75, rel=0.02)
    assert "] the time of one with torch's fully_shard." in torch.text


def test_one_rank_reports_the_overhead_of_the_wrappers() -> None:
    text = finding("fsdp.one-rank", ranks=1).text
    assert "with one rank there is no communication" in text
    assert "fsdp.share" not in {one.code for one in shown(Finding, ranks=1)}


def test_cases_are_the_same_as_in_sharding() -> None:
    fsdp, sharding = find_study("fsdp"), find_study("sharding")
    flags = fsdp.flags(size=("tiny", "small"), ranks=(2, 4))
    planned = [(case.key, case.config) for case in fsdp.planned(flags)]
    assert planned == [(case.key, case.config) for case in sharding.planned(flags)]
    assert {case.study for case in fsdp.planned(flags)} == {"fsdp"}


def test_the_table_and_the_figure_show_all_strategies() -> None:
    table = next(table for table in shown(Table) if table.name == "fsdp-ways")
    assert [row[2] for row in table.rows] == ["unsharded", "FSDP", "torch fully_shard"]
    assert [row[-4] / 2**30 for row in table.rows] == [4.0, 2.0, 2.0]
    (figure,) = shown(Figure)
    assert figure.curves[0].x == ("unsharded", "FSDP", "torch fully_shard")
