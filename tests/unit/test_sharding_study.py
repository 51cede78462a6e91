"""The study of the sharded optimizer: its accounts, and what it says of given bytes and times."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from parallel_records import sharding_record
from stepscope.errors import UsageError
from stepscope.records.schema import Quantity
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.registry import find_study
from stepscope.studies.sharding.traffic import Traffic
from stepscope.studies.sharding.view import moved

GIB = 2.0**30


def shown(kind: type[Any], **how: Any) -> list[Any]:
    blocks = find_study("sharding").view([sharding_record(**how)])
    return [block for block in blocks if isinstance(block, kind)]


@pytest.mark.parametrize(
    ("shares", "tone", "words"),
    [([0.5, 0.5], "good", "0.0 % off"), ([0.55, 0.45], "info", "10.0 % off")],
)
def test_uneven_shares_are_told(shares: list[float], tone: str, words: str) -> None:
    first = shown(Finding, shares=shares)[0]
    assert words in first.text
    assert first.tone == tone


def test_bytes_moved_follow_from_the_collectives() -> None:
    assert moved("unsharded", 4.0, 4) == moved("scatter", 4.0, 4) == 6.0
    assert moved("broadcast", 4.0, 4) == moved("torch ZeRO", 4.0, 4) == 9.0
    said = shown(Finding)[1].text
    assert "moves 1.50 GiB per rank and step" in said
    assert "moves 1.00 GiB, as much as averaging" in said


@pytest.mark.parametrize(("ours", "tone"), [(90.0, "good"), (110.0, "warn"), (100.0, "info")])
def test_torch_is_the_measure(ours: float, tone: str) -> None:
    assert shown(Finding, steps={"broadcast": ours})[2].tone == tone


def test_stages_of_zero_divide_one_part_after_the_other() -> None:
    stages = next(t for t in shown(Table, ranks=4) if t.name == "sharding-stages")
    sums = {row[1]: row[-2] for row in stages.rows}
    assert [row[-1] for row in stages.rows] == [1.5 * GIB, 1.5 * GIB, 1.5 * GIB, 2.25 * GIB]
    assert sums == {
        "none": 4 * GIB, "ZeRO 1": 2.5 * GIB, "ZeRO 2": 1.75 * GIB, "ZeRO 3": GIB,
    }  # fmt: skip


def test_the_figure_stacks_what_a_rank_holds() -> None:
    (figure,) = shown(Figure)
    state = next(curve for curve in figure.curves if curve.label == "state")
    assert state.y == (2048.0, 1024.0, 1024.0, 1024.0)


@pytest.mark.parametrize("how", [{"batch": 1}, {"ranks": (0,)}, {"rounds": 0}])
def test_bad_flags_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot be shared out|rounds is 0"):
        find_study("sharding").flags(**how)


def test_the_counters_of_a_gpu_are_shown_where_there_are_some() -> None:
    base = sharding_record()
    stations = {
        f"unsharded.after {place}.{counter}.rank{rank}": Quantity(value=GIB + rank, unit="B")
        for place in ("model", "forward", "backward", "step")
        for counter in ("allocated", "reserved", "driver")
        for rank in (0, 1)
    }
    record = msgspec.structs.replace(base, quantities={**base.quantities, **stations})
    (held,) = (
        b for b in find_study("sharding").view([record])
        if isinstance(b, Table) and b.name == "sharding-stations"
    )  # fmt: skip
    assert [row[2] for row in held.rows] == ["model", "forward", "backward", "step"]
    assert all(row[3:] == (GIB + 1,) * 3 for row in held.rows)


def test_traffic_is_counted_by_collective() -> None:
    whole, part = torch.zeros(8), torch.zeros(2)
    traffic = Traffic(4)
    traffic.add("allreduce_", ([whole],))
    assert traffic.sent == 48.0
    traffic.add("_allgather_base_", (whole, part))
    traffic.add("_reduce_scatter_base_", (part, whole))
    traffic.add("broadcast_", ([whole],))
    traffic.add("barrier", (whole,))
    assert traffic.sent == 48.0 + 3 * 24.0
