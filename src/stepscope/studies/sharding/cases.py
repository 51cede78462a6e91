"""Flags, cases and presets of the studies of sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from stepscope.errors import UsageError
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flag_checks import check_ranks
from stepscope.studies.rank_subject import RankedStep, subjects
from stepscope.studies.ranked import default_ranks

WHOLE, BROADCAST, SCATTER, TORCH = "unsharded", "broadcast", "scatter", "torch ZeRO"
WAYS = (WHOLE, BROADCAST, SCATTER, TORCH)
FULLY, TORCH_FULLY = "FSDP", "torch fully_shard"
FULLY_WAYS = (WHOLE, FULLY, TORCH_FULLY)
PEERS = (TORCH, TORCH_FULLY)


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


class Sharding(Study[ShardingFlags, RankedStep]):
    name = "sharding"
    title = "Sharded optimizer"
    question = "What does dividing the optimizer's state among ranks save, and what does it cost?"
    examples = ("stepscope run sharding --size small --ranks 2",)
    flags = ShardingFlags
    case = RankedStep
    ways: ClassVar[tuple[str, ...]] = WAYS

    def cases(self, flags: ShardingFlags) -> tuple[RankedStep, ...]:
        return tuple(
            RankedStep(
                **subject,
                batch=flags.batch,
                ranks=ranks,
                backend=flags.backend,
                rounds=flags.rounds,
            )
            for subject in subjects(flags.model, flags.size, flags.table, (flags.context,))
            for ranks in flags.ranks
        )

    def measure(self, case: RankedStep, bench: Bench) -> Measurement:
        from stepscope.studies.sharding.measure import measure_case

        return measure_case(self.name, case, bench, self.ways)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.sharding.view import sharding_blocks

        return sharding_blocks(self.results(records))

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


STUDY = Sharding()
