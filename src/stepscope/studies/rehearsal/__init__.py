"""What would this step take on ranks that one does not have?

    stepscope run rehearsal --size small --context 512 --dtype bfloat16
    stepscope rehearse --ranks 64 --link infiniband

One step is recorded on this device: how long its phases take, and when each gradient is ready. The
rest is played: reductions under a model of the links, for any number of ranks, strategy and bucket
size. With --check-ranks the play is held against real ranks of this machine over gloo: their links
are measured, the step is predicted, then run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stepscope.analysis.rehearsal.cluster import LINKS
from stepscope.analysis.rehearsal.recording import NOTE, Recording
from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record, Series
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.flag_checks import check_each
from stepscope.studies.ranked import patience
from stepscope.studies.rehearsal.view import CHECK, RECORDING, rehearsal_blocks
from stepscope.studies.workload import Workload, WorkloadFlags, workloads

if TYPE_CHECKING:
    from stepscope.analysis.rehearsal.recording import ReadyTimes


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
    compute: Literal["auto", "real", "waits"] = "auto"
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


class Rehearsal(Study[RehearsalFlags, Any]):
    name = "rehearsal"
    title = "Rehearsal for a cluster"
    question = "What would this step take on ranks that one does not have, and what would bound it?"
    examples = (
        "stepscope run rehearsal --size small --context 512 --dtype bfloat16",
        "stepscope run rehearsal --size tiny --context 32 --check-ranks 2 4",
    )
    flags = RehearsalFlags
    no_model = "its predictions come from the closed forms of the model here"

    def cases(self, flags: RehearsalFlags) -> tuple[PlannedCase, ...]:
        made = []
        for workload in workloads(flags, ("train-step",)):
            step = msgspec.to_builtins(workload)
            asked = {"steps": flags.steps, "ranks": list(flags.ranks), "link": list(flags.link)}
            made.append(
                PlannedCase(
                    study=self.name,
                    key=workload.key,
                    config=step | asked | {"kind": RECORDING},
                    needs=workload.needs,
                )
            )
            for ranks in flags.check_ranks:
                check = {
                    "steps": flags.steps, "ranks": ranks, "bucket_mb": list(flags.bucket_mb),
                    "rounds": flags.rounds, "compute": flags.compute, "kind": CHECK,
                }  # fmt: skip
                made.append(
                    PlannedCase(
                        study=self.name,
                        key=f"{workload.key}_check_r{ranks}_{flags.compute}",
                        config=step | check,
                        needs=workload.needs,
                    )
                )
        return tuple(made)

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.rehearsal.recording import record_step

        workload = msgspec.convert(config, Workload)

        def progress(done: int, total: int) -> None:
            bench.progress(done, total, "steps recorded")

        if config["kind"] == RECORDING:
            series, times = record_step(workload, bench.device, config["steps"], progress)
            return Measurement(
                series=series,
                quantities=workload.quantities(),
                attachments={NOTE: times},
            )
        cores = os.cpu_count() or 1
        threads = max(1, cores // config["ranks"])
        with _threads(threads):
            series, times = record_step(workload, bench.device, config["steps"], progress)
        compute = config["compute"]
        if compute == "auto":
            enough = bench.device.kind == "cpu" and cores >= 2 * config["ranks"]
            compute = "real" if enough else "waits"
        bench.progress(0, 1, f"{config['ranks']} ranks")
        played = _play(config | {"compute": compute}, series, times, threads)
        return Measurement(
            series=(*series, *played),
            quantities=workload.quantities(),
            notes={"compute": compute, "backend": "gloo"},
            attachments={NOTE: times},
        )

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return rehearsal_blocks(records)

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


def _play(
    config: dict[str, Any],
    series: tuple[Series, ...],
    times: tuple[ReadyTimes, ...],
    threads: int,
) -> tuple[Series, ...]:
    """The recorded step on real ranks, and what their links take, in turns."""
    from stepscope.parallel import launch
    from stepscope.studies.rehearsal.ranks import run_ways

    recording = Recording.of_samples(series, times)
    ranks = launch(
        run_ways,
        (recording, config),
        ranks=config["ranks"],
        backend="gloo",
        device="cpu",
        limits=patience(),
        threads=threads,
    )
    return tuple(
        Series(**what._asdict(), unit="ms", rank=rank, values=tuple(result.samples[what]))
        for what in ranks[0].samples
        for rank, result in enumerate(ranks)
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with as many threads as one of the ranks will have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


STUDY = Rehearsal()
