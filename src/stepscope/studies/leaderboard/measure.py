"""Time the step as the handout does, from empty caches. Imports torch lazily."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from stepscope.records.schema import Quantity, Series
from stepscope.report.format import bytes_
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.leaderboard.cases import LIMIT_S, LeaderboardCase
from stepscope.training.plans import prediction_for
from stepscope.training.ranks.cases import on_ranks
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.parallel import World

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_LEAST_SAMPLES = 3


class RankTimes(NamedTuple):
    """Measurements of one rank, in seconds and milliseconds."""

    build_s: float
    first_s: float
    """The first step: it compiles and tunes."""
    steps_ms: list[float]
    peak_bytes: int | None
    backend: str


def measure(case: LeaderboardCase, bench: Bench) -> Measurement:
    _refuse_too_few_gpus(case, bench.device.kind)
    _refuse_too_little_memory(case, bench.device)
    start = time.perf_counter()
    with empty_caches():
        ranks: list[RankTimes] = on_ranks("leaderboard", case, bench, time_steps)
    total = time.perf_counter() - start
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    seconds = {
        "build_s": max(rank.build_s for rank in ranks),
        "first_s": max(rank.first_s for rank in ranks),
        "total_s": total,
        "limit_s": LIMIT_S,
    }
    return Measurement(
        series=tuple(
            Series(name="step", unit="ms", rank=index, values=tuple(rank.steps_ms))
            for index, rank in enumerate(ranks)
        ),
        quantities=(
            *(Quantity(name=name, value=value, unit="s") for name, value in seconds.items()),
            *(Quantity(name="peak_bytes", value=max(peaks), unit="B") for _ in peaks[:1]),
        ),
        notes={"backend": ranks[0].backend},
    )


def _refuse_too_few_gpus(case: LeaderboardCase, kind: str) -> None:
    import torch

    if kind != "cuda" or case.backend == "gloo":
        return
    here = torch.cuda.device_count()
    if case.ranks > here:
        raise CaseSkipped(
            f"it needs {case.ranks} GPUs, here is {here}: --ranks {here} runs their share of the"
            " batch"
        )


def _refuse_too_little_memory(case: LeaderboardCase, device: Device) -> None:
    """Skip a case that is predicted not to fit, before a machine without limits starts to swap."""
    predicted = prediction_for(workload_of(case, device.kind), device.kind)
    if predicted is None:
        return
    on_one = 1 if device.kind == "cuda" and case.backend != "gloo" else case.ranks
    needed = predicted.peak.allocated * on_one
    if needed > device.memory_bytes:
        raise CaseSkipped(
            f"it needs {bytes_(needed)} by the prediction, here are {bytes_(device.memory_bytes)}:"
            " choose a smaller --size, --layers or --context"
        )


@contextmanager
def empty_caches() -> Iterator[None]:
    """Give torch.compile and Triton empty cache folders, which the ranks inherit."""
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(prefix="stepscope-caches-") as folder:
        os.environ.update({name: os.path.join(folder, name) for name in _CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def time_steps(world: World, case: LeaderboardCase) -> RankTimes:
    """Build the step and time it; runs on each rank."""
    import torch

    from stepscope.parallel import DDP
    from stepscope.training.factory import make_step

    start = time.perf_counter()
    device = _device_of(world)
    step = make_step(workload_of(case, world.device.type), device)
    phases = step.phases()
    averaged = None
    if world.size > 1:
        # Buckets are averaged while the backward pass goes on.
        averaged = DDP(step.model, strategy="bucketed")
    device.synchronize()
    build_s = time.perf_counter() - start
    number = 0

    def one_step() -> float:
        nonlocal number
        world.step(number)
        number += 1
        began = time.perf_counter()
        step.reset()
        for phase in phases:
            if phase.name == "optimizer" and averaged is not None:
                averaged.finish_gradient_synchronization()
            phase.run()
        device.synchronize()
        return time.perf_counter() - began

    first_s = one_step()
    usual_s = _agreed(world, one_step())
    for _ in range(math.ceil(case.warmup_seconds / usual_s)):
        one_step()
    count = max(_LEAST_SAMPLES, math.ceil(case.seconds / usual_s))
    steps = [one_step() * 1e3 for _ in range(count)]
    peak = torch.cuda.max_memory_allocated() if device.kind == "cuda" else None
    return RankTimes(build_s, first_s, steps, peak, world.backend)


def workload_of(case: LeaderboardCase, kind: str) -> Workload:
    """The step of a rank: on a GPU with the fused kernels, and a checkpoint around each block, as
    the activations of the full context need it."""
    on_gpu = kind == "cuda"
    return Workload(
        size=case.size,
        table=case.table,
        overrides=case.overrides,
        context=case.context,
        batch=case.per_rank,
        dtype=case.dtype,
        attention="auto",
        optimizer="stepscope-fused" if on_gpu else "torch",
        mode="train-step",
        loss="fused",
        fused=on_gpu,
        checkpoint="1" if on_gpu else "no",
    )


def _device_of(world: World) -> Device:
    from stepscope.measure.device import CpuDevice, CudaDevice

    if world.device.type == "cuda":
        return CudaDevice(world.device.index or 0)
    return CpuDevice()


def _agreed(world: World, seconds: float) -> float:
    """The time of the slowest rank, so that all run the same number of steps."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor(seconds, device=world.device)
    if world.size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
