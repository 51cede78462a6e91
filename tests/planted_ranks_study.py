"""A study whose cases run on several ranks, one of which may fail. Registered with
STEPSCOPE_STUDIES=planted_ranks_study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.schema import Record, Series
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.training.ranks.cases import RankedCase, default_ranks, on_ranks

if TYPE_CHECKING:
    from stepscope.parallel import World


class PlantedRanksFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of the cases."""

    fails: tuple[int, ...] = (-1,)
    """The rank that fails, one case each; -1 for no failure."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks."""


class PlantedRanksCase(RankedCase, frozen=True, kw_only=True):
    fails: int

    @property
    def key(self) -> str:
        return f"r{self.ranks}-fails{self.fails}"


def add_up(world: World, case: PlantedRanksCase) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(world.rank)])
    for step in range(3):
        world.step(step)
        if world.rank == case.fails and step == 1:
            raise ValueError("planted")
        dist.all_reduce(total)
    return total.item()


class PlantedRanks(Study[PlantedRanksFlags, PlantedRanksCase]):
    name = "planted-ranks"
    title = "Planted ranks"
    question = "What becomes of a case in which a rank fails?"
    flags = PlantedRanksFlags
    case = PlantedRanksCase

    def cases(self, flags: PlantedRanksFlags) -> tuple[PlantedRanksCase, ...]:
        return tuple(
            PlantedRanksCase(fails=fails, ranks=ranks, backend="gloo")
            for ranks in flags.ranks
            for fails in flags.fails
        )

    def measure(self, case: PlantedRanksCase, bench: Bench) -> Measurement:
        sums = on_ranks(self.name, case, bench, add_up)
        return Measurement(
            series=tuple(
                Series(name="sum", unit="ranks", rank=rank, values=(value,))
                for rank, value in enumerate(sums)
            )
        )

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:  # noqa: ARG002
        return ()


STUDY = PlantedRanks()
