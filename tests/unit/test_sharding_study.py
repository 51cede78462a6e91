"""The sharded optimizer study: traffic, and report blocks of given bytes and times."""

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
from stepscope.studies.sharding.cases import STRATEGIES
from stepscope.studies.sharding.measure import RankResult
from stepscope.studies.sharding.traffic import Traffic
from stepscope.studies.sharding.view import moved
from view_blocks import coded, table_of

GIB = 2.0**30


def shown(kind: type[Any], **options: Any) -> list[Any]:
    blocks = find_study("sharding").view([sharding_record(**options)])
    return [block for block in blocks if isinstance(block, kind)]


def finding(code: str, **options: Any) -> Finding:
    (match,) = (one for one in shown(Finding, **options) if one.code == code)
    assert match.records == (sharding_record(**options).id,)
    return match


@pytest.mark.parametrize(
    ("shares", "tone", "off"), [([0.5, 0.5], "good", 0.0), ([0.55, 0.45], "info", 0.1)]
)
def test_uneven_shares_are_reported(shares: list[float], tone: str, off: float) -> None:
    match = finding("sharding.share", shares=shares)
    assert match.values["off"] == pytest.approx(off)
    assert match.tone == tone
    assert match.sentence == (
        "small, 2 ranks, gloo: the AdamW state takes 2.00 GiB on every rank unsharded and at most"
        f" {2 * max(shares):.2f} GiB when parameters are assigned to ranks by size:"
        f" {100 * off:.1f} % from an equal share."
    )


def test_bytes_sent_follow_from_the_collectives() -> None:
    assert moved("unsharded", 4.0, 4) == moved("scatter", 4.0, 4) == 6.0
    assert moved("broadcast", 4.0, 4) == moved("torch ZeRO", 4.0, 4) == 9.0
    assert moved("FSDP", 4.0, 4) == moved("torch fully_shard", 4.0, 4) == 9.0
    match = finding("sharding.stage-1")
    assert match.values["moved broadcast"] == 1.5 * GIB
    assert match.values["moved scatter"] == GIB
    assert match.values["ratio"] == pytest.approx(1.0, rel=0.02)
    assert "sends 1.50 GiB per rank and step" in match.text
    assert "sends 1.00 GiB, as much as averaging alone, and shards element by" in match.text
    assert "Here its step takes 1.0" in match.text
    assert match.conclusion == ""


def test_a_slower_stage_1_is_explained_only_if_the_interval_shows_it() -> None:
    """A ratio of 1.04 [0.98, 1.33] has no cause, a ratio of 1.3 has one, one of 0.7 another."""
    slower = finding("sharding.stage-1", steps={"scatter": 130.0})
    assert slower.conclusion == (
        "It is slower because its reduction starts after the backward pass, while the other's"
        " overlaps with it, and gloo implements reduce-scatter by all-reduce."
    )
    assert finding("sharding.stage-1", steps={"scatter": 70.0}).conclusion == ""
    record = sharding_record(steps={"scatter": 104.0})
    series = tuple(
        msgspec.structs.replace(
            one, values=tuple(v * (1.3 if i % 2 else 0.85) for i, v in enumerate(one.values))
        )
        if (one.name, one.variant) == ("step", "scatter")
        else one
        for one in record.series
    )
    noisy = msgspec.structs.replace(record, series=series)
    match = coded(find_study("sharding").view([noisy]), "sharding.stage-1")
    assert float(str(match.values["low"])) < 1 < float(str(match.values["high"]))
    assert match.conclusion == ""


@pytest.mark.parametrize(("ours", "tone"), [(90.0, "good"), (110.0, "warn"), (100.0, "info")])
def test_the_step_is_compared_with_torch(ours: float, tone: str) -> None:
    match = finding("sharding.against-torch", steps={"broadcast": ours})
    assert match.tone == tone
    assert match.values["ratio"] == pytest.approx(ours / 100, rel=0.02)
    assert "] the time of torch's ZeroRedundancyOptimizer." in match.text


def test_zero_stages_shard_state_then_gradients_then_parameters() -> None:
    stages = next(t for t in shown(Table, ranks=4) if t.name == "sharding-stages")
    sums = {row[1]: row[-2] for row in stages.rows}
    assert [row[-1] for row in stages.rows] == [1.5 * GIB, 1.5 * GIB, 1.5 * GIB, 2.25 * GIB]
    assert sums == {
        "none": 4 * GIB,
        "ZeRO 1": 2.5 * GIB,
        "ZeRO 2": 1.75 * GIB,
        "ZeRO 3": GIB,
    }


def test_the_figure_stacks_the_memory_of_a_rank() -> None:
    (figure,) = shown(Figure)
    state = next(curve for curve in figure.curves if curve.label == "state")
    assert state.y == (2048.0, 1024.0, 1024.0, 1024.0)


@pytest.mark.parametrize("options", [{"batch": 1}, {"ranks": (0,)}, {"rounds": 0}])
def test_invalid_flags_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot be divided|ranks is 0|rounds is 0"):
        find_study("sharding").flags(**options)


def on_gpu(driver: dict[str, float]) -> Record:
    """A record with GPU counters; rank 1 has one byte more of everything."""
    base = sharding_record()
    counters = (
        Quantity(
            name=counter,
            variant=strategy,
            phase=f"after {phase}",
            rank=rank,
            value=value + rank,
            unit="B",
        )
        for strategy, allocated in (("unsharded", 4 * GIB), ("broadcast", 3 * GIB))
        for phase in ("model", "forward", "backward", "step")
        for counter, value in (
            ("allocated", allocated),
            ("reserved", 5 * GIB),
            ("driver", driver[strategy]),
        )
        for rank in (0, 1)
    )
    peaks = (
        Quantity(name="allocated", variant=strategy, phase="peak", value=6 * GIB, unit="B")
        for strategy in ("unsharded", "broadcast")
    )
    return msgspec.structs.replace(base, quantities=(*base.quantities, *counters, *peaks))


def test_gpu_counters_are_shown() -> None:
    blocks = find_study("sharding").view([on_gpu({"unsharded": 9 * GIB, "broadcast": 8 * GIB})])
    table = table_of(blocks, "sharding-stations")
    phases = [f"after {phase}" for phase in ("model", "forward", "backward", "step")]
    with_counters = [row for row in table.rows if row[-3] is not None]
    assert [row[2] for row in with_counters] == [*phases, "peak"] * 2
    assert table.rows[0][-3:] == (4 * GIB + 1, 5 * GIB + 1, 9 * GIB + 1)
    assert table.rows[4][-3:] == (6 * GIB, None, None)


@pytest.mark.parametrize(("sharded", "up"), [(8.0, False), (9.5, True)])
def test_a_higher_driver_value_is_explained(sharded: float, up: bool) -> None:
    blocks = find_study("sharding").view(
        [on_gpu({"unsharded": 9 * GIB, "broadcast": sharded * GIB})]
    )
    match = coded(blocks, "sharding.counters")
    assert match.values["allocated unsharded"] == 4 * GIB + 1
    assert match.values["driver broadcast"] == sharded * GIB + 1
    assert "allocated 4.00 GiB and 3.00 GiB" in match.text
    assert match.conclusion.startswith("The driver reports more although less is") is up


def test_one_rank_reports_the_overhead_of_the_wrappers() -> None:
    match = finding("sharding.one-rank", ranks=1)
    assert match.text.startswith("small, 1 rank, gloo: with one rank there is no communication")
    assert {one.code for one in shown(Finding, ranks=1)} == {
        "sharding.one-rank",
        "sharding.against-torch",
    }


def test_a_strategy_that_torch_refuses_is_reported() -> None:
    refused = {"refused": {"torch ZeRO": "no such collective"}}
    match = finding("sharding.refused", attachments=refused)
    assert match.values == {
        "ranks": 2,
        "backend": "gloo",
        "way": "torch ZeRO",
        "reason": "no such collective",
    }
    assert match.tone == "warn"
    assert (
        match.sentence == "small, 2 ranks, gloo: torch ZeRO does not run here: no such collective"
    )


def test_a_failed_case_is_a_row_with_its_status() -> None:
    (table,) = shown(Table, status="timeout", reason="too slow")
    assert table.rows == (("small", 2, None, "timeout", *(None,) * 8),)


class Ranks:
    """Fake launcher whose ranks die in step `dies` as long as torch takes part."""

    def __init__(self, dies: int) -> None:
        self.dies, self.requests = dies, []

    def __call__(self, *arguments: Any) -> list[RankResult]:
        *_, strategies, _ = arguments
        self.requests.append(strategies)
        if "torch ZeRO" in strategies:
            raise RankFailed(0, self.dies, "died of SIGSEGV", {})
        return [RankResult({}, [], "gloo", {})]


def test_if_torch_crashes_a_rank_ours_are_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    study = find_study("sharding")
    (case,) = study.cases(study.flags(ranks=(2,)))
    ranks = Ranks(dies=STRATEGIES.index("torch ZeRO"))
    monkeypatch.setattr(measure, "on_ranks", ranks)
    done = study.measure(case, QuietBench())
    assert ranks.requests == [STRATEGIES, STRATEGIES[:-1]]
    assert done.attachments["refused"] == {"torch ZeRO": "rank 0 died of SIGSEGV at step 3"}
    monkeypatch.setattr(measure, "on_ranks", Ranks(dies=0))
    with pytest.raises(RankFailed):
        study.measure(case, QuietBench())


def test_traffic_is_counted_by_collective() -> None:
    full, part = torch.zeros(8), torch.zeros(2)
    traffic = Traffic(4)
    traffic.add("allreduce_", ([full],))
    assert traffic.sent == 48.0
    traffic.add("_allgather_base_", (full, part))
    traffic.add("_reduce_scatter_base_", (part, full))
    traffic.add("broadcast_", ([full],))
    traffic.add("barrier", (full,))
    assert traffic.sent == 48.0 + 3 * 24.0
