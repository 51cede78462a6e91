"""The study of the sharded optimizer: its accounts, and what it says of given bytes and times."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from parallel_records import sharding_record
from quiet_bench import QuietBench
from stepscope.errors import UsageError
from stepscope.parallel import RankFailed
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.registry import find_study
from stepscope.studies.sharding import measure
from stepscope.studies.sharding.cases import WAYS
from stepscope.studies.sharding.measure import RankResult
from stepscope.studies.sharding.traffic import Traffic
from stepscope.studies.sharding.view import moved

GIB = 2.0**30


def shown(kind: type[Any], **how: Any) -> list[Any]:
    blocks = find_study("sharding").view([sharding_record(**how)])
    return [block for block in blocks if isinstance(block, kind)]


def finding(code: str, **how: Any) -> Finding:
    (found,) = (one for one in shown(Finding, **how) if one.code == code)
    assert found.records == (sharding_record(**how).id,)
    return found


@pytest.mark.parametrize(
    ("shares", "tone", "off"), [([0.5, 0.5], "good", 0.0), ([0.55, 0.45], "info", 0.1)]
)
def test_uneven_shares_are_told(shares: list[float], tone: str, off: float) -> None:
    found = finding("sharding.share", shares=shares)
    assert found.values["off"] == pytest.approx(off)
    assert found.tone == tone
    assert found.sentence == (
        f"small, 2 ranks, gloo: AdamW's state takes 2.00 GiB on every rank unsharded and"
        f" {2 * max(shares):.2f} GiB at most when parameters are shared out by bytes:"
        f" {100 * off:.1f} % off an equal share."
    )


def test_bytes_moved_follow_from_the_collectives() -> None:
    assert moved("unsharded", 4.0, 4) == moved("scatter", 4.0, 4) == 6.0
    assert moved("broadcast", 4.0, 4) == moved("torch ZeRO", 4.0, 4) == 9.0
    assert moved("FSDP", 4.0, 4) == moved("torch fully_shard", 4.0, 4) == 9.0
    found = finding("sharding.stage-1")
    assert found.values["moved broadcast"] == 1.5 * GIB
    assert found.values["moved scatter"] == GIB
    assert found.values["ratio"] == pytest.approx(1.0, rel=0.02)
    assert "moves 1.50 GiB per rank and step" in found.text
    assert found.text.endswith(
        "moves 1.00 GiB, as much as averaging alone, and divides to the element."
    )
    assert found.conclusion.startswith("Here its step takes 1.0")
    assert "and gloo makes a reduce-scatter of an all-reduce. Both keep" in found.conclusion


@pytest.mark.parametrize(("ours", "tone"), [(90.0, "good"), (110.0, "warn"), (100.0, "info")])
def test_torch_is_the_measure(ours: float, tone: str) -> None:
    found = finding("sharding.against-torch", steps={"broadcast": ours})
    assert found.tone == tone
    assert found.values["ratio"] == pytest.approx(ours / 100, rel=0.02)
    assert "× that with torch's ZeroRedundancyOptimizer [" in found.text


def test_stages_of_zero_divide_one_part_after_the_other() -> None:
    stages = next(t for t in shown(Table, ranks=4) if t.name == "sharding-stages")
    sums = {row[1]: row[-2] for row in stages.rows}
    assert [row[-1] for row in stages.rows] == [1.5 * GIB, 1.5 * GIB, 1.5 * GIB, 2.25 * GIB]
    assert sums == {
        "none": 4 * GIB,
        "ZeRO 1": 2.5 * GIB,
        "ZeRO 2": 1.75 * GIB,
        "ZeRO 3": GIB,
    }


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
            name=counter,
            variant=way,
            phase=f"after {place}",
            rank=rank,
            value=value + rank,
            unit="B",
        )
        for way, allocated in (("unsharded", 4 * GIB), ("broadcast", 3 * GIB))
        for place in ("model", "forward", "backward", "step")
        for counter, value in (
            ("allocated", allocated),
            ("reserved", 5 * GIB),
            ("driver", driver[way]),
        )
        for rank in (0, 1)
    )
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
    (found,) = (b for b in blocks if isinstance(b, Finding) and b.code == "sharding.counters")
    assert found.values["allocated unsharded"] == 4 * GIB + 1
    assert found.values["driver broadcast"] == sharded * GIB + 1
    assert "allocated 4.00 GiB and 3.00 GiB" in found.text
    assert found.conclusion.startswith("The driver's figure goes up where less is alloc") is up


def test_one_rank_is_said_to_share_with_nobody() -> None:
    found = finding("sharding.one-rank", ranks=1)
    assert found.text.startswith("small, 1 rank, gloo: one rank has nobody to share with")
    assert {one.code for one in shown(Finding, ranks=1)} == {
        "sharding.one-rank",
        "sharding.against-torch",
    }


def test_a_way_that_torch_refuses_is_told_with_its_reason() -> None:
    refused = {"refused": {"torch ZeRO": "no such collective"}}
    found = finding("sharding.refused", attachments=refused)
    assert found.values == {
        "ranks": 2,
        "backend": "gloo",
        "way": "torch ZeRO",
        "reason": "no such collective",
    }
    assert found.tone == "warn"
    assert (
        found.sentence == "small, 2 ranks, gloo: torch ZeRO does not run here: no such collective"
    )


def test_a_failed_case_is_a_row_with_its_status() -> None:
    (table,) = shown(Table, status="timeout", reason="too slow")
    assert table.rows == (("small", 2, None, "timeout", *(None,) * 7),)


class Ranks:
    """Stands for the launcher: the ranks die in their step `dies` as long as torch takes part."""

    def __init__(self, dies: int) -> None:
        self.dies, self.asked = dies, []

    def __call__(self, *arguments: Any) -> list[RankResult]:
        ways = arguments[-1]
        self.asked.append(ways)
        if "torch ZeRO" in ways:
            raise RankFailed(0, self.dies, "died of SIGSEGV", {})
        return [RankResult({}, [], "gloo", {})]


def test_torch_s_way_may_end_a_rank_and_ours_are_still_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = find_study("sharding")
    (case,) = study.cases(study.flags(ranks=(2,)))
    ranks = Ranks(dies=WAYS.index("torch ZeRO"))
    monkeypatch.setattr(measure, "on_ranks", ranks)
    done = study.measure(case, QuietBench())
    assert ranks.asked == [WAYS, WAYS[:-1]]
    assert done.attachments["refused"] == {"torch ZeRO": "rank 0 died of SIGSEGV at step 3"}
    monkeypatch.setattr(measure, "on_ranks", Ranks(dies=0))
    with pytest.raises(RankFailed):
        study.measure(case, QuietBench())


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
