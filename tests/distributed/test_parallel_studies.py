"""The studies on several ranks, measured on two real ranks."""

from __future__ import annotations

import pytest

from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.analysis.links import COLLECTIVES
from stepscope.studies.fsdp.gathers import RankGathers
from stepscope.studies.registry import find_study
from stepscope.studies.sharding.view import moved


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_are_timed_without_process_startup(collective: str) -> None:
    study = find_study("allreduce")
    flags = study.flags(collective=(collective,), sizes=(1024, 2**22), rounds=4)
    (case,) = study.cases(flags)
    measured = study.measure(case, QuietBench())
    assert {(s.size, s.rank) for s in measured.series} == {
        (size, rank) for size in (1024, 2**22) for rank in (0, 1)
    }
    assert all(len(series.values) == 4 for series in measured.series)
    # A process takes seconds to start; the smallest message does not.
    assert min(min(s.values) for s in measured.series if s.size == 1024) < 100.0
    assert [(one.size, one.value) for one in measured.quantities] == [(1024, 0), (2**22, 0)]
    assert measured.notes == {"backend": "gloo"}


def test_every_strategy_of_averaging_gradients_is_timed() -> None:
    study = find_study("ddp")
    # A bucket of 200 MiB is as that of 100 MiB, with all gradients.
    flags = study.flags(
        size=("tiny",), context=(16,), vocab=256, bucket_mb=(0.1, 100.0, 200.0), rounds=3,
        ranks=(2,),
    )  # fmt: skip
    (case,) = study.cases(flags)
    measured = study.measure(case, QuietBench())
    steps = {(s.variant, s.rank) for s in measured.series if s.name == "step"}
    strategies = (
        "no communication",
        "naive",
        "flat",
        "overlap",
        "bucketed 0.1 MiB",
        "bucketed 100 MiB",
        "torch DDP",
    )
    assert steps == {(strategy, rank) for strategy in strategies for rank in (0, 1)}
    assert all(len(series.values) == 3 for series in measured.series)
    assert value_of(measured.quantities, "gradient_bytes") == 4 * 590_464
    sent = {
        name: value_of(measured.quantities, "reductions", variant=name) for name in strategies[1:5]
    }
    assert value_of(measured.quantities, "reductions", variant="bucketed 100 MiB") == 1
    quantities = measured.quantities
    change = value_of(quantities, "change")
    off = {name: value_of(quantities, "difference", variant=name) for name in strategies}
    assert all(off[name] < 0.01 * change for name in strategies[1:])
    assert off["no communication"] > 0.1 * change
    assert sent["naive"] == sent["overlap"] > sent["bucketed 0.1 MiB"] > sent["flat"] == 1
    lanes = measured.attachments["timeline"]
    for name in strategies[1:5]:
        backward = next(s for s in lanes[name]["compute"] if s[2] == "backward")
        assert len(lanes[name]["reductions"]) == sent[name]
        early = [s for s in lanes[name]["reductions"] if s[0] < backward[1]]
        assert bool(early) == (name in ("overlap", "bucketed 0.1 MiB")), name


def test_sharded_state_is_counted_on_every_rank() -> None:
    study = find_study("sharding")
    (case,) = study.cases(study.flags(size=("tiny",), context=16, vocab=256, rounds=2, ranks=(2,)))
    measured = study.measure(case, QuietBench())
    quantities = measured.quantities
    unsharded = value_of(quantities, "state", variant="unsharded")
    size = value_of(quantities, "parameters", variant="unsharded")
    assert unsharded == pytest.approx(2 * size, rel=1e-3)
    for variant in ("broadcast", "scatter", "torch ZeRO"):
        shares = [value_of(quantities, "state", variant=variant, rank=rank) for rank in (0, 1)]
        assert sum(shares) == pytest.approx(unsharded, rel=1e-3)
        if variant != "torch ZeRO":
            assert max(shares) == pytest.approx(unsharded / 2, rel=0.02), variant
        sent = value_of(quantities, "sent", variant=variant)
        assert sent == pytest.approx(moved(variant, size, 2), rel=1e-3), variant
    assert {len(series.values) for series in measured.series} == {2}
    change = value_of(quantities, "change")
    for variant in ("unsharded", "broadcast", "scatter", "torch ZeRO"):
        assert value_of(quantities, "difference", variant=variant) < 0.01 * change

    def bytes_of(kind: str, phase: str) -> float:
        return value_of(quantities, kind, variant="broadcast", phase=phase)

    phases = ("after model", "after backward", "", "before next step")
    assert [bytes_of("parameters", phase) for phase in phases] == [size] * 4
    assert [bytes_of("gradients", phase) for phase in phases] == [0, size, size, size]
    state = bytes_of("state", "")
    assert [bytes_of("state", phase) for phase in phases] == [0, 0, state, state]


def test_fully_sharded_memory_is_close_to_an_equal_share() -> None:
    study = find_study("fsdp")
    flags = study.flags(size=("tiny",), context=16, vocab=256, rounds=2, ranks=(3,), batch=3)
    (case,) = study.cases(flags)
    measured = study.measure(case, QuietBench())
    quantities = measured.quantities
    for variant in ("FSDP", "torch fully_shard"):
        for kind in ("parameters", "gradients", "state"):
            share = max(value_of(quantities, kind, variant=variant, rank=rank) for rank in range(3))
            unsharded = value_of(quantities, kind, variant="unsharded")
            assert share == pytest.approx(unsharded / 3, rel=0.05), variant
        change = value_of(quantities, "change")
        assert value_of(quantities, "difference", variant=variant) < 0.01 * change
    ranks: list[RankGathers] = measured.attachments["gathers"]
    assert len(ranks) == 3
    for rank in ranks:
        order = [(gather.phase, gather.weight) for gather in rank.gathers]
        forward = [weight for phase, weight in order if phase == "forward"]
        backward = [weight for phase, weight in order if phase == "backward"]
        # 2 blocks of 7 matrices, embedding and head; the embedding's backward needs no weight.
        assert (len(forward), len(backward)) == (16, 15)
        assert forward[0] == "embedding.weight"
        assert backward[0] == forward[-1] == "head.weight"
        for gather in rank.gathers:
            assert len(gather.issued) == len(gather.ended) == len(gather.needed) == len(rank.phases)
            assert all(start < end for start, end in zip(gather.issued, gather.ended, strict=True))
        # All but the first of a pass are prefetched.
        late = [g.weight for g in rank.gathers if min(g.issued) > max(g.needed)]
        assert set(late) <= {"embedding.weight", "head.weight"}
