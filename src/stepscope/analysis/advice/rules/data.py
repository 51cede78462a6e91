"""DataLoader workers, which load batches ahead."""

from __future__ import annotations

import math
import os
from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule
from stepscope.analysis.advice.timeline import host_limits_ms

_OUTSIDE = ("outside",)
_MAX_WORKERS = 8


@rule("data-ahead", "DataLoader workers that load batches ahead")
def _workers(facts: Facts) -> Change | Left | None:
    if not facts.data_ms:
        return Left("no time is spent in a DataLoader")
    if facts.loader_workers:
        return _more_workers(facts)
    return _workers_on_gpu(facts) if facts.on_gpu else _workers_on_cpu(facts)


def _workers_on_cpu(facts: Facts) -> Change | Left | None:
    """DataLoader workers for a step on the CPU.

    With all cores busy, loading still costs `data_ms / cores` of the step. On cores that PyTorch
    leaves idle, loading overlaps with the step.
    """
    if facts.cores < 2:
        return Left("there is no second core for a worker")
    free = max(0, facts.cores - facts.threads)
    workers = min(_MAX_WORKERS, free or facts.cores - 1)
    overlappable = max(0.0, facts.step_ms - facts.data_ms)
    left = max(0.0, facts.data_ms / workers - overlappable) if free else facts.data_ms / facts.cores
    hidden = max(0.0, facts.data_ms - left)
    after = facts.with_work(lambda work: work.less(hidden), _OUTSIDE)
    shared = (
        f"{free} of {facts.cores} cores are free to load ahead"
        if free
        else f"PyTorch computes on all {facts.cores} cores, so workers take theirs from the step"
    )
    return Change(
        after=replace(after, data_ms=0.0),
        why=f"the loop spends {facts.data_ms:.3g} ms of a step in its DataLoader; {shared}",
        risk="time: workers compete with the step for cores and each batch is copied between"
        " processes, so the step may get slower; CPU memory",
        lines=(f"DataLoader(…, num_workers={workers}, persistent_workers=True)",),
        setting={"data": "workers"},
    )


def _more_workers(facts: Facts) -> Change | Left | None:
    """More workers for a DataLoader that has some. The loop waits for them in every step, so a step
    takes as long as they take for a batch, which is in proportion to their number."""
    now = facts.loader_workers
    step_ms = max(facts.step_ms - facts.data_ms, 1e-3 * facts.step_ms)
    workers = min(facts.cores, math.ceil(now * facts.step_ms / step_ms))
    if workers <= now:
        return Left(
            f"the loop waits {facts.data_ms:.3g} ms for its {now} workers on {facts.cores} cores:"
            " more of them help only if they wait for files or a network; otherwise less work for"
            " each sample does"
        )
    left = max(0.0, facts.step_ms * now / workers - step_ms)
    hidden = max(0.0, facts.data_ms - left)

    def waits_less(work: PhaseWork) -> PhaseWork:
        if facts.on_gpu:
            return replace(work, host_ms=max(0.0, work.host_ms - hidden))
        return work.less(hidden)

    return Change(
        after=replace(facts.with_work(waits_less, _OUTSIDE), data_ms=left),
        title="more DataLoader workers",
        why=f"the loop waits {facts.data_ms:.3g} ms of a step for the {now} workers of its"
        f" DataLoader; there are {facts.cores} cores",
        risk="time: workers need idle cores; CPU memory",
        lines=(f"DataLoader(…, num_workers={workers}, persistent_workers=True)",),
        by_author="the DataLoader sets its number of workers itself",
    )


def _workers_on_gpu(facts: Facts) -> Change:
    after = facts.with_work(
        lambda work: replace(work, host_ms=max(0.0, work.host_ms - facts.data_ms)), _OUTSIDE
    )
    return Change(
        after=replace(after, data_ms=0.0),
        title="DataLoader workers that prepare batches ahead",
        why=f"the CPU spends {facts.data_ms:.3g} ms of a step in its DataLoader, and the device"
        f" waits {host_limits_ms(facts):.3g} ms for the host",
        risk="time: workers need idle cores, other than the one that launches the step's kernels;"
        " CPU memory",
        lines=("DataLoader(…, num_workers=8, persistent_workers=True, prefetch_factor=4)",),
        setting={"data": "workers"},
    )


def default_workers() -> int:
    """Number of workers that a DataLoader is given on this machine."""
    return max(1, min(_MAX_WORKERS, (os.cpu_count() or 2) - 1))


@setting("data", "workers", without="no DataLoader without workers is created")
def _use_workers(program: Program, value: str) -> None:  # noqa: ARG001
    """Give worker processes to DataLoaders that have none."""
    from torch.utils.data import DataLoader

    plain = DataLoader.__init__

    def init(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if not keywords.get("num_workers") and len(arguments) < 5:
            program.applied["data"] += 1
            keywords |= {
                "num_workers": default_workers(),
                "persistent_workers": True,
                "prefetch_factor": 4,
            }
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = init  # type: ignore[method-assign]
