"""Flags, cases and presets of the study of collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from stepscope.analysis.links import COLLECTIVES
from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flag_checks import check_each
from stepscope.studies.ranked import RankedCase, default_ranks

BACKENDS = ("auto", "gloo", "nccl")


class AllReduceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: every combination of the values is a case, sizes excepted."""

    collective: tuple[str, ...] = ("all-reduce",)
    """Collectives: all-reduce, all-gather, reduce-scatter, broadcast."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, each a process on this machine; under torchrun as many as it started."""
    backend: tuple[str, ...] = ("auto",)
    """nccl, gloo, or auto: nccl where every rank has a GPU of its own."""
    sizes: tuple[int, ...] = tuple(2**power for power in range(10, 27, 2))
    """Sizes of the message in bytes, of float32."""
    rounds: int = 10
    """Samples of each size."""

    def __post_init__(self) -> None:
        for name in self.collective:
            if name not in COLLECTIVES:
                raise unknown_name("collective", name, COLLECTIVES)
        for name in self.backend:
            if name not in BACKENDS:
                raise unknown_name("backend", name, BACKENDS)
        check_each("ranks", self.ranks, lambda ranks: ranks >= 1, "give numbers from 1 on")
        least = 4 * max(self.ranks)
        check_each("sizes", self.sizes, lambda size: size >= least, "every rank needs 4 bytes")
        if self.rounds < 1:
            raise UsageError(f"rounds is {self.rounds}", "it must be at least 1")


class AllReduceCase(RankedCase, frozen=True, kw_only=True):
    """One collective among so many ranks, at several sizes."""

    collective: str
    sizes: tuple[int, ...]
    rounds: int

    @property
    def key(self) -> str:
        sizes = f"{min(self.sizes)}-{max(self.sizes)}B"
        return f"{self.collective}_r{self.ranks}_{self.backend}_{sizes}"


class AllReduce(Study[AllReduceFlags, AllReduceCase]):
    name = "allreduce"
    title = "Collectives"
    question = "How long do collectives take at each size, and what do the links carry?"
    examples = (
        "stepscope run allreduce --ranks 2 4 --sizes 1048576 67108864",
        "stepscope run allreduce --collective all-gather reduce-scatter broadcast",
    )
    flags = AllReduceFlags
    case = AllReduceCase
    no_model = "it measures collectives alone"

    def cases(self, flags: AllReduceFlags) -> tuple[AllReduceCase, ...]:
        return tuple(
            AllReduceCase(
                collective=collective, ranks=ranks, backend=backend, sizes=flags.sizes,
                rounds=flags.rounds,
            )
            for ranks in flags.ranks
            for backend in flags.backend
            for collective in flags.collective
        )  # fmt: skip

    def measure(self, case: AllReduceCase, bench: Bench) -> Measurement:
        from stepscope.studies.allreduce.measure import measure_case

        return measure_case(self.name, case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.allreduce.view import collective_blocks

        return collective_blocks(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AllReduceFlags]]:
        seeds = (2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
        everything = COLLECTIVES
        if environment.device_kind == "cpu":
            quick = AllReduceFlags(ranks=(2,), sizes=(2**10, 2**14, 2**18, 2**22))
        else:
            quick = AllReduceFlags(ranks=(1,))
        # On one GPU: NCCL with itself, and gloo between two ranks that share it.
        short = tuple(2**power for power in range(10, 29, 6))
        return {
            "quick": (quick,),
            "seeds": (AllReduceFlags(ranks=(1, 2), sizes=seeds),),
            "cs336-2026": (AllReduceFlags(ranks=(2, 4, 6), sizes=seeds),),
            "h200": (
                AllReduceFlags(ranks=(1,), collective=everything, sizes=short),
                AllReduceFlags(
                    ranks=(2,), backend=("gloo",), collective=everything, sizes=short, rounds=5
                ),
            ),
            "full": (
                AllReduceFlags(
                    ranks=(1, 2, 3, 4, 5, 6),
                    collective=everything,
                    sizes=tuple(2**power for power in range(10, 31, 2)),
                ),
            ),
        }


STUDY = AllReduce()
