"""Flags, cases and presets of rehearsals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from stepscope.analysis.rehearsal.cluster import LINKS
from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flag_checks import check_each
from stepscope.studies.workload import Workload, WorkloadFlags, case_of, workloads

if TYPE_CHECKING:
    from stepscope.parallel.reducer import Strategy

Compute = Literal["auto", "real", "waits"]


class Sampled(NamedTuple):
    """What a series of the ranks is of."""

    name: str
    """`step`; of messages: `alone`, `burst`, `pack`, `packed`, `beside`; `issue`, `agree`."""
    variant: str = ""
    """The way of a step, or how many messages at once."""
    size: int = 0


def strategies(bucket_mb: Sequence[float]) -> list[tuple[Strategy, float]]:
    """Strategies of the real ranks with their bucket sizes, which only `bucketed` uses."""
    return [("naive", 1.0), ("flat", 1.0), ("overlap", 1.0), *(("bucketed", s) for s in bucket_mb)]


class RehearsalFlags(WorkloadFlags, frozen=True, kw_only=True):
    """What to record, and which clusters the page answers for; `rehearse` answers for others."""

    steps: int = 10
    """Steps to record."""
    ranks: tuple[int, ...] = (8, 64, 1024)
    """Numbers of ranks to predict."""
    link: tuple[str, ...] = tuple(LINKS)
    """Links to predict: nvlink, infiniband, ethernet."""
    check_ranks: tuple[int, ...] = ()
    """Numbers of real ranks, over gloo on this machine, to hold the prediction against."""
    bucket_mb: tuple[float, ...] = (1.0, 4.0)
    """Bucket sizes of the real ranks, in MiB."""
    compute: Compute = "auto"
    """Real ranks compute, or wait as long as was recorded; auto waits below two cores a rank."""
    rounds: int = 9
    """Samples of each way on the real ranks."""

    def __post_init__(self) -> None:
        for name in ("ranks", "check_ranks"):
            for ranks in getattr(self, name):
                if ranks < 1:
                    raise UsageError(f"{name} has {ranks}", "give numbers from 1 on")
        for link in self.link:
            if link not in LINKS:
                raise unknown_name("link", link, LINKS)
        if not (self.ranks and self.link):
            raise UsageError("there is no cluster to predict", "give --ranks and --link a value")
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")
        if self.steps < 1 or self.rounds < 1:
            raise UsageError("steps and rounds must be at least 1")


class RecordingCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="recording"):
    """A step to record, and the clusters that its section of the page predicts."""

    steps: int
    ranks: tuple[int, ...]
    link: tuple[str, ...]


class CheckCase(Workload, frozen=True, kw_only=True, tag_field="kind", tag="check"):
    """A step to record, predict and run on real ranks."""

    steps: int
    ranks: int
    bucket_mb: tuple[float, ...]
    rounds: int
    compute: Compute

    @property
    def key(self) -> str:
        return f"{super().key}_check_r{self.ranks}_{self.compute}"


RehearsalCase = RecordingCase | CheckCase


class Rehearsal(Study[RehearsalFlags, RehearsalCase]):
    name = "rehearsal"
    title = "Rehearsal for a cluster"
    question = "What would this step take on ranks that one does not have, and what would bound it?"
    examples = (
        "stepscope run rehearsal --size small --context 512 --dtype bfloat16",
        "stepscope run rehearsal --size tiny --context 32 --check-ranks 2 4",
    )
    flags = RehearsalFlags
    case = RehearsalCase
    no_model = "its predictions come from the closed forms of the model here"

    def cases(self, flags: RehearsalFlags) -> tuple[RehearsalCase, ...]:
        made: list[RehearsalCase] = []
        for workload in workloads(flags, ("train-step",)):
            made.append(
                case_of(
                    workload, RecordingCase, steps=flags.steps, ranks=flags.ranks, link=flags.link
                )
            )
            made += (
                case_of(
                    workload, CheckCase, steps=flags.steps, ranks=ranks, compute=flags.compute,
                    bucket_mb=flags.bucket_mb, rounds=flags.rounds,
                )
                for ranks in flags.check_ranks
            )  # fmt: skip
        return tuple(made)

    def measure(self, case: RehearsalCase, bench: Bench) -> Measurement:
        from stepscope.studies.rehearsal.measure import measure_case

        return measure_case(case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.rehearsal.view import rehearsal_blocks

        return rehearsal_blocks(records, self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[RehearsalFlags]]:
        modern = RehearsalFlags(dtype=("bfloat16",), attention=("sdpa",))
        change = msgspec.structs.replace
        if environment.device_kind == "cpu":
            quick = RehearsalFlags(
                size=("tiny",), context=(16,), batch=(1,), steps=5, check_ranks=(2,),
                bucket_mb=(1.0,), rounds=5, compute="waits",
            )  # fmt: skip
        else:
            quick = modern
        return {
            "quick": (quick,),
            "seeds": (change(modern, size=("medium",)),),
            "cs336-2026": (change(modern, size=("xl",), table="2026"),),
            "h200": (
                change(modern, size=("small", "medium", "large", "xl")),
                RehearsalFlags(size=("small",), check_ranks=(2, 4), bucket_mb=(4.0, 25.0)),
            ),
            "full": (RehearsalFlags(size=("small", "medium", "large"), check_ranks=(2, 4)),),
        }


STUDY = Rehearsal()
