"""A study whose cases run on several ranks, one of which may fail. Made known to a process by
STEPSCOPE_STUDIES=planted_ranks_study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.ranked import default_ranks, on_ranks

if TYPE_CHECKING:
    from stepscope.parallel import World


class PlantedRanksFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What the cases do."""

    fails: tuple[int, ...] = (-1,)
    """The rank that fails, one case each; -1 is none."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks."""


def add_up(world: World, fails: int) -> float:
    import torch
    import torch.distributed as dist

    held = torch.tensor([float(world.rank)])
    for step in range(3):
        world.step(step)
        if world.rank == fails and step == 1:
            raise ValueError("planted")
        dist.all_reduce(held)
    return held.item()


class PlantedRanks(Study[PlantedRanksFlags, Any]):
    name = "planted-ranks"
    title = "Planted ranks"
    question = "What becomes of a case in which a rank fails?"
    flags = PlantedRanksFlags

    def cases(self, flags: PlantedRanksFlags) -> tuple[PlannedCase, ...]:
        return tuple(
            PlannedCase(
                study=self.name,
                key=f"r{ranks}-fails{fails}",
                config={"fails": fails, "ranks": ranks, "backend": "gloo"},
            )
            for ranks in flags.ranks
            for fails in flags.fails
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        found = on_ranks(self.name, config, bench, add_up, (config["fails"],))
        return Measurement(
            series=tuple(
                Series(name="sum", unit="ranks", rank=rank, values=(value,))
                for rank, value in enumerate(found)
            )
        )

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:  # noqa: ARG002
        return ()


STUDY = PlantedRanks()
