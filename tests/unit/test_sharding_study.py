"""The study of the sharded optimizer: its accounts, and what it says of given bytes and times."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from parallel_records import sharding_record
from stepscope.errors import UsageError
from stepscope.parallel import RankFailed
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies import sharding
from stepscope.studies.registry import find_study
from stepscope.studies.sharding.ranks import WAYS, RankResult
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
    with pytest.raises(UsageError, match=r"cannot be shared out|ranks is 0|rounds is 0"):
        find_study("sharding").flags(**how)


def on_gpu(driver: dict[str, float]) -> Record:
    """With counters of a GPU: rank 1 has a byte more of everything."""
    base = sharding_record()
    counters = (
        Quantity(
            name=counter, variant=way, phase=f"after {place}", rank=rank, value=value + rank,
            unit="B",
        )
        for way, allocated in (("unsharded", 4 * GIB), ("broadcast", 3 * GIB))
        for place in ("model", "forward", "backward", "step")
        for counter, value in (
            ("allocated", allocated), ("reserved", 5 * GIB), ("driver", driver[way]),
        )
        for rank in (0, 1)
    )  # fmt: skip
    peaks = (
        Quantity(name="allocated", variant=way, phase="peak", value=6 * GIB, unit="B")
        for way in ("unsharded", "broadcast")
    )
    return msgspec.structs.replace(base, quantities=(*base.quantities, *counters, *peaks))


def test_the_counters_of_a_gpu_are_shown_where_there_are_some() -> None:
    blocks = find_study("sharding").view([on_gpu({"unsharded": 9 * GIB, "broadcast": 8 * GIB})])
    (held,) = (b for b in blocks if isinstance(b, Table) and b.name == "sharding-stations")
    stations = [f"after {place}" for place in ("model", "forward", "backward", "step")]
    assert [row[2] for row in held.rows] == [*stations, "peak"] * 2
    assert held.rows[0][3:] == (4 * GIB + 1, 5 * GIB + 1, 9 * GIB + 1)
    assert held.rows[4][3:] == (6 * GIB, None, None)


@pytest.mark.parametrize(("sharded", "up"), [(8.0, False), (9.5, True)])
def test_a_driver_s_figure_that_goes_up_is_explained(sharded: float, up: bool) -> None:
    blocks = find_study("sharding").view(
        [on_gpu({"unsharded": 9 * GIB, "broadcast": sharded * GIB})]
    )
    (said,) = (b.text for b in blocks if isinstance(b, Finding) and "the driver shows" in b.text)
    assert "allocated 4.00 GiB and 3.00 GiB" in said
    assert ("goes up where less is allocated" in said) is up


def test_one_rank_is_said_to_share_with_nobody() -> None:
    said = [finding.text for finding in shown(Finding, ranks=1)]
    assert said[0].startswith("small, 1 rank, gloo: one rank has nobody to share with")
    assert not any("equal share" in text for text in said)


def test_a_way_that_torch_refuses_is_told_with_its_reason() -> None:
    refused = {"refused": {"torch ZeRO": "no such collective"}}
    said = [finding.text for finding in shown(Finding, attachments=refused)]
    assert said[-1] == "small, 2 ranks, gloo: torch ZeRO does not run here: no such collective"


class Ranks:
    """Stands for the launcher: the ranks die in their step `dies` as long as torch takes part."""

    def __init__(self, dies: int) -> None:
        self.dies, self.asked = dies, []

    def __call__(self, *arguments: Any) -> list[RankResult]:
        _, ways = arguments[-1]
        self.asked.append(ways)
        if "torch ZeRO" in ways:
            raise RankFailed(0, self.dies, "died of SIGSEGV", {})
        return [RankResult({}, [], "gloo", {})]


def test_torch_s_way_may_end_a_rank_and_ours_are_still_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(dies=WAYS.index("torch ZeRO"))
    monkeypatch.setattr(sharding, "on_ranks", ranks)
    done = sharding.measure_on_ranks("sharding", {}, None, WAYS)  # type: ignore[arg-type]
    assert ranks.asked == [WAYS, WAYS[:-1]]
    assert done.attachments["refused"] == {"torch ZeRO": "rank 0 died of SIGSEGV at step 3"}
    monkeypatch.setattr(sharding, "on_ranks", Ranks(dies=0))
    with pytest.raises(RankFailed):
        sharding.measure_on_ranks("sharding", {}, None, WAYS)  # type: ignore[arg-type]


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
