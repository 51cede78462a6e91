"""What does dividing the optimizer's state among ranks save, and what does it cost?

    stepscope run sharding --size small --context 128 --ranks 2

Each way first runs alone, and what its tensors take is counted by kind; then all take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.errors import UsageError
from stepscope.parallel.errors import ParallelError, RankFailed
from stepscope.records.schema import Environment, Record, Series
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.flag_checks import check_ranks
from stepscope.studies.rank_subject import subject_config
from stepscope.studies.ranked import default_ranks, on_ranks
from stepscope.studies.sharding.ranks import PEERS, WAYS, measure_ways
from stepscope.studies.sharding.view import sharding_blocks


class ShardingFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: sizes and numbers of ranks are cases."""

    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025) or 10b (2026); tiny, mini, midi for a CPU."""
    table: str = "2025"
    """Which year's size table: xl differs between them."""
    context: int = 128
    """Sequence length in tokens."""
    batch: int = 4
    """Sequences per step, shared out among the ranks."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, each a process on this machine; under torchrun as many as it started."""
    backend: str = "auto"
    """nccl, gloo, or auto: nccl where every rank has a GPU of its own."""
    rounds: int = 10
    """Samples of each way."""
    model: str = ""
    """A model of your own instead of a size: package.module:function (see `run own --help`)."""

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.batch)
        if self.rounds < 1:
            raise UsageError(f"rounds is {self.rounds}", "it must be at least 1")


class Sharding(Study[ShardingFlags, Any]):
    name = "sharding"
    title = "Sharded optimizer"
    question = "What does dividing the optimizer's state among ranks save, and what does it cost?"
    examples = ("stepscope run sharding --size small --ranks 2",)
    flags = ShardingFlags

    def cases(self, flags: ShardingFlags) -> tuple[PlannedCase, ...]:
        made = []
        for size in flags.size[:1] if flags.model else flags.size:
            name, subject = subject_config(flags.model, size, flags.table, flags.context)
            for ranks in flags.ranks:
                config = subject | {
                    "batch": flags.batch, "ranks": ranks, "backend": flags.backend,
                    "rounds": flags.rounds,
                }  # fmt: skip
                key = f"{name}_b{flags.batch}_r{ranks}_{flags.backend}"
                made.append(PlannedCase(study=self.name, key=key, config=config))
        return tuple(made)

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        return measure_on_ranks(self.name, config, bench, WAYS)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return sharding_blocks(records)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[ShardingFlags]]:
        quick = (
            ShardingFlags(size=("tiny",), context=32, rounds=5, ranks=(2,))
            if environment.device_kind == "cpu"
            else ShardingFlags(ranks=(1,))
        )
        return {
            "quick": (quick,),
            "seeds": (ShardingFlags(size=("medium",), ranks=(2,)),),
            "cs336-2026": (ShardingFlags(size=("xl",), table="2026", ranks=(2,)),),
            # Two ranks on one GPU go over gloo: memory is what it would be, time is not.
            "h200": (
                ShardingFlags(ranks=(1,), rounds=5),
                ShardingFlags(ranks=(2,), backend="gloo", rounds=5),
            ),
            "full": (ShardingFlags(size=("small", "medium", "large"), ranks=(2, 4)),),
        }


def measure_on_ranks(
    study: str, config: dict[str, Any], bench: Bench, ways: tuple[str, ...]
) -> Measurement:
    """Memory and times of these ways, from every rank."""
    lost: dict[str, str] = {}
    try:
        ranks = on_ranks(study, config, bench, measure_ways, (config, ways))
    except ParallelError as error:
        peer = fallen_peer(error, ways)
        if peer is None:
            raise
        lost[peer] = str(error)
        kept = tuple(way for way in ways if way != peer)
        ranks = on_ranks(study, config, bench, measure_ways, (config, kept))
    series = tuple(
        Series(
            name=phase,
            variant=way,
            unit="ms",
            rank=rank,
            values=tuple(result.samples[way, phase]),
        )
        for way, phase in ranks[0].samples
        for rank, result in enumerate(ranks)
    )
    quantities = tuple(
        msgspec.structs.replace(one, rank=rank)
        for rank, result in enumerate(ranks)
        for one in result.held
    )
    return Measurement(
        series=series,
        quantities=quantities,
        notes={"backend": ranks[0].backend},
        attachments={"refused": ranks[0].refused | lost},
    )


def fallen_peer(error: ParallelError, ways: tuple[str, ...]) -> str | None:
    """The way of torch's whose first step ended a rank: some crash on a backend they cannot use."""
    step = error.step if isinstance(error, RankFailed) else -1
    way = ways[step] if 0 <= step < len(ways) else None
    return way if way in PEERS else None


STUDY = Sharding()
