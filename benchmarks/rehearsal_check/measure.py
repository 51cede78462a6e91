"""Record a step, and run it on real ranks interleaved with samples of their links.

Importing this module does not import torch.
"""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from rehearsal_check.cases import CheckCase, Sampled, strategies
from stepscope.analysis.rehearsal.recording import NOTE, Recording
from stepscope.analysis.rehearsal.replay import name_of
from stepscope.records.schema import Series
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.ddp import measure as ddp
from stepscope.studies.ddp.cases import ALONE, TORCH
from stepscope.studies.rehearsal.measure import record_step
from stepscope.training.ranks.cases import patience
from stepscope.training.ranks.one_process import subject_of
from stepscope.training.ranks.steps import trained_step, turn

if TYPE_CHECKING:
    from torch import Tensor

    from rehearsal_check.simulated_step import WaitingStep
    from stepscope.parallel import World

WARMUP = 2
BURST = 8
"""Concurrent small messages, to measure how they delay each other; large ones come in twos."""
LARGEST_BURST = 2**21
REPEATS = 4
"""Consecutive messages of the sizes that have several."""
SMALLEST = 2**12
REST_S = 0.01
"""Pause before each start: in a step, too, reductions begin on ranks that were busy otherwise."""
SPIN_S = 2e-4
"""A sleep may end late by about this; the remaining time is a busy wait."""


Step = Callable[[], float]
"""Run one step and return its time in ms."""
Samples = dict[Sampled, list[float]]
"""Samples of one rank, in ms."""


def measure(case: CheckCase, bench: Bench) -> Measurement:
    cores = os.cpu_count() or 1
    threads = max(1, cores // case.ranks)
    with _threads(threads):
        series, times = record_step(
            case,
            bench.device,
            case.steps,
            lambda done, total: bench.progress(done, total, "steps recorded"),
        )
    if case.compute == "auto":
        enough = bench.device.kind == "cpu" and cores >= 2 * case.ranks
        case = msgspec.structs.replace(case, compute="real" if enough else "waits")
    bench.progress(0, 1, f"{case.ranks} ranks")
    return Measurement(
        series=(*series, *_run_on_ranks(case, Recording.of_samples(series, times), threads)),
        quantities=case.quantities(),
        notes={"compute": case.compute, "backend": "gloo"},
        attachments={NOTE: times},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with the number of threads that each rank will have."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_on_ranks(case: CheckCase, recording: Recording, threads: int) -> tuple[Series, ...]:
    from stepscope.parallel import launch

    results = launch(
        run_strategies,
        (recording, case),
        ranks=case.ranks,
        backend="gloo",
        device="cpu",
        limits=patience(),
        threads=threads,
    )
    return series_of(results)


def series_of(results: Sequence[Samples]) -> tuple[Series, ...]:
    """Series from what `run_ways` returned on each rank."""
    return tuple(
        Series(**what._asdict(), unit="ms", rank=rank, values=tuple(samples[what]))
        for what in results[0]
        for rank, samples in enumerate(results)
    )


def run_strategies(world: World, recording: Recording, case: CheckCase) -> Samples:
    """Run all strategies; runs on each rank.

    A round has one step of each strategy, in shuffled order, and one sample of the channel.
    """
    import torch.distributed as dist

    steps = (
        computing_steps(world, case)
        if case.compute == "real"
        else waiting_steps(recording, case.bucket_mb)
    )
    probe = Probe(world, recording.gradient_bytes)
    samples: Samples = {Sampled("step", name): [] for name in steps}
    shuffle = random.Random(0).shuffle
    order = list(steps)
    index = 0
    for round_index in range(-WARMUP, case.rounds):
        shuffle(order)
        times: dict[Sampled, float] = {}
        for name in order:
            world.step(index)
            index += 1
            times[Sampled("step", name)] = steps[name]()
        world.step(index)
        index += 1
        times |= probe.sample()
        for what, ms in times.items() if round_index >= 0 else ():
            samples.setdefault(what, []).append(ms)
    dist.barrier()
    return samples


def waiting_steps(recording: Recording, bucket_mb: Sequence[float]) -> dict[str, Step]:
    """Strategies with real reductions, whose compute waits for the recorded time."""
    from rehearsal_check.simulated_step import Due, WaitingStep
    from stepscope.parallel import DDP

    gradients = [
        Due(g.item.elements, g.item.kind.split()[0].removeprefix("torch."), g.ready)
        for g in recording.gradients
    ]

    def make(like: WaitingStep | None = None) -> WaitingStep:
        return WaitingStep(
            recording.forward_ms, gradients, recording.backward_ms, recording.optimizer_ms, like
        )

    def step_of(own: WaitingStep, model: Any) -> Step:
        def step() -> float:
            began = start_together()
            model().backward()
            if model is not own:
                model.finish_gradient_synchronization()
            own.optimize(synchronized=model is not own)
            return _since(began)

        return step

    plain = make()
    steps = {ALONE: step_of(plain, plain)}
    for strategy, size in strategies(bucket_mb):
        own = make(plain)
        wrapped = DDP(own, strategy, size)
        own.count_hooks()
        steps[name_of(strategy, size)] = step_of(own, wrapped)
    return steps


def computing_steps(world: World, case: CheckCase) -> dict[str, Step]:
    """Strategies that run the recorded model on every rank, each with the recorded batch."""
    subject, model = subject_of(world, case, case.batch, case.dtype)
    subject = subject._replace(model=lambda: copy.deepcopy(model))

    def step_of_turn(wrap: ddp.Wrap) -> float:
        make = partial(ddp.train, subject, wrap, case.dtype)
        (phases,) = turn(world, partial(trained_step, world, make, subject.fed), 1)
        return phases["step"]

    return {
        name: partial(step_of_turn, wrap)
        for name, wrap in ddp.strategies(case.bucket_mb).items()
        if name != TORCH
    }


def start_together() -> float:
    """Wait for a common start time; all ranks are on one machine and share its clock.

    Ranks leave a barrier one after the other, apart by about the latency of a small message, and
    the first would include its wait for the last.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    arrived = time.monotonic()
    latest = torch.tensor([arrived], dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    # Leave a multiple of the duration of that exchange for the ranks that finish it last.
    took = torch.tensor([time.monotonic() - float(latest)], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    start = float(latest) + 4 * float(took) + REST_S
    while (left := start - time.monotonic()) > 0:
        time.sleep(max(0.0, left - SPIN_S))
    return start


class Probe:
    """Samples of the channel that the steps use, from 4 KiB to the size of all gradients."""

    def __init__(self, world: World, most_bytes: int) -> None:
        import torch

        self._world = world
        self.sizes = probe_sizes(most_bytes)
        self._messages: dict[int, list[Tensor]] = {
            size: [torch.zeros(size // 4) for _ in range(_at_once(size, self.sizes[-1]))]
            for size in self.sizes
        }
        self._buckets = {size: torch.zeros(size // 4) for size in self.sizes}

    def sample(self) -> dict[Sampled, float]:
        import torch.distributed as dist

        times: dict[Sampled, float] = {}
        for size, messages in self._messages.items():
            began = start_together()
            for message in messages[:REPEATS]:
                dist.all_reduce(message)
            times[Sampled("alone", size=size)] = _since(began) / len(messages[:REPEATS])
            times[Sampled("pack", size=size)] = self._pack(size, messages[:REPEATS])
            if len(messages) > 1:
                issued, done = self._burst(messages)
                times[Sampled("burst", str(len(messages)), size)] = done
                if size == self.sizes[0]:
                    times[Sampled("issue")] = issued / len(messages)
            packed, both = self._beside(size, messages[:REPEATS])
            times[Sampled("packed", str(REPEATS), size)] = packed
            times[Sampled("beside", str(REPEATS), size)] = both
        times[Sampled("agree")] = self._agree()
        return times

    def _pack(self, size: int, messages: list[Tensor]) -> float:
        """Time per gradient of scaling gradients into a bucket, on all ranks at the same time."""
        import torch

        gradients = [message.clone() for message in messages]
        began = start_together()
        for gradient in gradients:
            torch.mul(gradient, 0.5, out=self._buckets[size])
        return _since(began) / len(gradients)

    def _burst(self, messages: list[Tensor]) -> tuple[float, float]:
        """Times until concurrent messages are issued and until they are finished."""
        import torch.distributed as dist

        began = start_together()
        works = [dist.all_reduce(message, async_op=True) for message in messages]
        issued = _since(began)
        for work in works:
            work.wait()
        return issued, _since(began)

    def _beside(self, size: int, messages: list[Tensor]) -> tuple[float, float]:
        """Times of scaling gradients during a reduction: until scaled, and until both finished."""
        import torch
        import torch.distributed as dist

        gradients = [message.clone() for message in messages]
        began = start_together()
        work = dist.all_reduce(messages[0], async_op=True)
        for index in range(REPEATS):
            torch.mul(gradients[index % len(gradients)], 0.5, out=self._buckets[size])
        packed = _since(began)
        work.wait()
        return packed, _since(began)

    def _agree(self) -> float:
        """Time of the small all-gather at the end of a backward pass."""
        import torch
        import torch.distributed as dist

        own = torch.zeros(64, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self._world.size)]
        began = start_together()
        dist.all_gather(gathered, own)
        return _since(began)


def probe_sizes(most_bytes: int) -> tuple[int, ...]:
    """Sizes from 4 KiB by factors of 16, then half of the largest message, then the largest."""
    sizes = [SMALLEST]
    while sizes[-1] * 16 < most_bytes // 4:
        sizes.append(sizes[-1] * 16)
    half = max(most_bytes // 8 * 4, 2 * sizes[-1])
    return (*sizes, half, max(most_bytes // 4 * 4, 2 * half))


def _at_once(size: int, largest: int) -> int:
    if size <= LARGEST_BURST and size < largest:
        return BURST
    return 2 if size < largest else 1


def _since(began: float) -> float:
    return (time.monotonic() - began) * 1e3
