"""Changes of DDP and FSDP2 on constructed steps."""

from __future__ import annotations

from typing import Any

from stepscope.analysis.advice.changes import afterwards, not_applicable, predictions
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.rule import Advice
from stepscope.records.sharing import Sharing

MIB = 1 << 20


def facts(sharing: Sharing, **changes: Any) -> Facts:
    """Return a step of 100 ms on one of 8 GPUs, 15 ms of it exposed communication."""
    forward = {"matmul": 25.0, "communication": 5.0}
    backward = {"matmul": 55.0, "copy/cast": 5.0, "communication": 10.0}
    fields: dict[str, Any] = {
        "on_gpu": True,
        "step_ms": 100.0,
        "dtype": "bfloat16",
        "phases": (
            PhaseWork(name="forward", classes=forward, launches=1000.0, host_ms=10.0),
            PhaseWork(name="backward", classes=backward, launches=2000.0),
        ),
        "ranks": 8,
        "sharing": sharing,
        "exposed_ms": 15.0,
        "messages": 40.0,
        "gathers_ms": {"forward": 20.0, "backward": 20.0},
        "collectives_ms": {"forward": 20.0, "backward": 50.0},
        "bandwidth": 4e12,
        "parameters": 1_000_000_000,
        "peak_bytes": 30 << 30,
        "memory_bytes": 80 << 30,
    }
    return Facts(**fields | changes)


def advised(given: Facts) -> dict[str, Advice]:
    return {one.code: one for one, _ in predictions(given)}


def left(given: Facts) -> dict[str, str]:
    return {one.code: one.reason for one in not_applicable(given)}


DDP = Sharing(kind="ddp", tensors=300, finds_unused=True)
FSDP2 = Sharing(kind="fsdp2", tensors=300, units=20, resharded_bytes=2000 * MIB)


def test_options_of_ddp() -> None:
    given = facts(DDP)
    advice = advised(given)
    # 300 parameters at 5 microseconds.
    assert advice["static-graph"].gain_ms == 1.5
    views = advice["gradient-views"]
    # 4 GB are read and written.
    assert (round(views.gain_ms, 6), views.gain_bytes) == (2.0, 4_000_000_000)
    assert not {"keep-gathered", "prefetch-units", "shard-blocks", "larger-units"} & set(advice)
    tuned = left(facts(Sharing(kind="ddp", gradient_views=True)))
    assert tuned["gradient-views"] == "gradients are views of the buckets"
    assert tuned["static-graph"] == "DDP does not search for unused parameters"
    assert "on a CPU" in left(facts(DDP, on_gpu=False))["bucket-size"]


def test_the_size_of_buckets_is_rehearsed() -> None:
    """4 GB in 60 ms of backward."""
    reduced = {"collectives_ms": {"backward": 40.0}}
    # Nothing overlaps with the last of 4 buckets: 10 ms.
    few = advised(facts(DDP, messages=4.0, exposed_ms=10.0, **reduced))["bucket-size"]
    assert float(few.setting["bucket_mb"]) < 100
    assert 8.0 < few.gain_ms < 10.0
    assert few.title == "smaller gradient buckets"
    # A message for each of 300 small gradients: nearly all latency, and longer than the pass.
    short = {
        "parameters": 1_000_000,
        "collectives_ms": {"backward": 9.0},
        "phases": (PhaseWork(name="backward", classes={"matmul": 4.0, "communication": 5.0}),),
    }
    many = advised(facts(DDP, messages=300.0, exposed_ms=5.0, **short))["bucket-size"]
    assert many.title == "larger gradient buckets"
    assert 4.0 < many.gain_ms < 5.0
    usual = left(facts(DDP, messages=300.0, exposed_ms=1.0, **reduced))
    assert "are as good as any" in usual["bucket-size"]
    forward = PhaseWork(name="forward", classes={"matmul": 25.0, "communication": 5.0})
    assert "does not explain" in left(facts(DDP, phases=(forward,)))["bucket-size"]


def test_gathers_of_fsdp2() -> None:
    given = facts(FSDP2)
    advice = advised(given)
    assert not {"bucket-size", "static-graph", "gradient-views", "sharded-optimizer"} & set(advice)
    kept = advice["keep-gathered"]
    # Two fifths of the exposed 10 ms are gathers; 2 GB are copied out of their buffer.
    assert round(kept.gain_ms, 3) == round(4.0 + 2e3 * 2000 * MIB / 4e12, 3)
    assert kept.gain_bytes == -2000 * MIB
    # The first of 20 gathers in each pass has nothing to overlap with: 1 ms of 5 and of 4.
    assert round(advice["prefetch-units"].gain_ms, 6) == 7.0
    both = afterwards(given, ["keep-gathered", "prefetch-units"])
    assert round(both.exposed_ms, 6) == 15.0 - 4.0 - 4.0


def test_a_reason_why_gathers_stay_as_they_are() -> None:
    full = left(facts(FSDP2, peak_bytes=63 << 30))
    assert "no room for 1.95 GiB" in full["keep-gathered"]
    slow = advised(facts(FSDP2, gathers_ms={"forward": 60.0}, collectives_ms={"forward": 60.0}))
    # The forward pass computes 25 ms: 35 of 60 ms cannot be hidden, more than is exposed.
    assert slow["prefetch-units"].gain_ms == 0.0
    on_cpu = left(facts(FSDP2, on_gpu=False))
    assert on_cpu["prefetch-units"] == "on a CPU each gather ends before FSDP2 continues"
    set_already = left(facts(Sharing(kind="fsdp2", units=4, prefetches=True)))
    assert "name those that they prefetch" in set_already["prefetch-units"]
    assert "keep their parameters" in set_already["keep-gathered"]
    assert left(facts(DDP))["keep-gathered"] == "no parameters are sharded by fully_shard"


def test_blocks_as_units_of_fsdp2() -> None:
    whole = Sharing(kind="fsdp2", tensors=300, units=1)
    gathers = {
        "gathers_ms": {"forward": 15.0},
        "collectives_ms": {"forward": 15.0, "backward": 15.0},
        "exposed_ms": 30.0,
        "phases": (
            PhaseWork(name="forward", classes={"matmul": 25.0, "communication": 15.0}),
            PhaseWork(name="backward", classes={"matmul": 60.0, "communication": 15.0}),
        ),
    }
    given = facts(whole, blocks=20, **gathers)
    blocks = advised(given)["shard-blocks"]
    assert blocks.setting == {"units": "blocks"}
    # A gather, and a reduction of two, are left of 21.
    assert 20.0 < blocks.gain_ms < 30.0
    assert blocks.gain_bytes == int(2e9 * 19 / 21)
    assert "shard-blocks" not in advised(afterwards(given, ["shard-blocks"]))
    on_cpu = advised(facts(whole, blocks=20, on_gpu=False))["shard-blocks"]
    assert (on_cpu.gain_ms, on_cpu.gain_bytes > 0) == (0.0, True)
    assert left(facts(whole, blocks=0))["shard-blocks"] == "the model has no repeated blocks"
    assert (
        "does not show what its gathers"
        in left(facts(whole, blocks=20, gathers_ms={}))["shard-blocks"]
    )


def test_blocks_are_gathered_in_pairs() -> None:
    """Where latency is most of what a collective takes."""
    sharing = Sharing(kind="fsdp2", tensors=300, units=21, resharded_bytes=40 * MIB)
    small = {
        "parameters": 20_000_000,
        "gathers_ms": {"forward": 0.8, "backward": 0.8},
        "collectives_ms": {"forward": 0.8, "backward": 1.6},
        "exposed_ms": 1.2,
        "step_ms": 4.0,
        "phases": (
            PhaseWork(name="forward", classes={"matmul": 0.7, "communication": 0.4}),
            PhaseWork(name="backward", classes={"matmul": 1.0, "communication": 0.8}),
        ),
    }
    given = facts(sharing, blocks=20, **small)
    pairs = advised(given)["larger-units"]
    assert pairs.setting == {"units": "2"}
    assert pairs.excludes == ("prefetch",)
    assert 0.0 < pairs.gain_ms < 1.2
    assert pairs.gain_bytes < 0
    assert "are not the blocks" in left(facts(sharing, blocks=7))["larger-units"]
    # Many bytes: what pairs leave exposed at either end is more than their latency.
    assert advised(facts(FSDP2, blocks=19))["larger-units"].gain_ms < 0.0
