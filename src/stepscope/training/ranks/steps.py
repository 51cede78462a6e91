"""Steps of a wrapped model on a rank, timed by phase, and the interleaved timing of several
wrappers of which one is in memory at a time. Imports torch lazily.

A turn builds a wrapper with its model and optimizer, runs unrecorded steps and then samples, and
frees it; turns of all wrappers alternate in an order that changes. Every turn starts from the same
weights and an empty optimizer, so a wrapper cannot profit or suffer from the ones before it, and
the memory that a study needs is that of its largest wrapper.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.records.schema import Series
from stepscope.training.ranks.cases import TIME_S
from stepscope.training.ranks.subject import Fed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.parallel import World

WARMUP = 1
"""Unrecorded steps of a turn; the first step creates the optimizer's state."""
PER_TURN = 2
"""Samples of a turn."""
PHASES = ("forward", "backward", "waited", "optimizer")
Samples = dict[tuple[str, str], list[float]]
"""Times in ms by variant and phase."""
Span = tuple[float, float, str]
"""Start and end in ms from the start of a step, and a label."""
Lanes = dict[str, list[Span]]
Step = Callable[[], Mapping[str, float]]
"""Run one step and return the times of its phases in ms."""


class Trained(NamedTuple):
    """A wrapped model with its optimizer."""

    model: nn.Module
    """The wrapper."""
    module: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: bool = False

    def average(self) -> None:
        """Finish averaging gradients, unless the wrapper's backward pass did."""
        finish: Any = getattr(self.model, "finish_gradient_synchronization", None)
        if finish is not None:
            finish()


def settle(world: World) -> None:
    """Wait until the rank's device is idle."""
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


def begin() -> None:
    """Exclude what is loaded from garbage collections: with torch, each takes 0.3 s."""
    gc.collect()
    gc.freeze()


def free(world: World) -> None:
    """Return freed memory to the system; hooks form reference cycles, which need a collection."""
    import torch

    from stepscope.measure.device import trim_heap

    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


class Laps:
    """Times in ms of the consecutive phases of a step that begins on all ranks at once.

    The device of the rank is idle at every mark.
    """

    def __init__(self, world: World) -> None:
        import torch.distributed as dist

        self._world = world
        self.ms: dict[str, float] = {}
        settle(world)
        dist.barrier()
        self.began = self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End a phase."""
        settle(self._world)
        now = time.perf_counter()
        self.ms[phase] = (now - self._last) * 1e3
        self._last = now

    @property
    def total_ms(self) -> float:
        """Time from the start to the last mark."""
        return (self._last - self.began) * 1e3


def one_step(
    world: World, trained: Trained, fed: Fed, laps: Laps | None = None
) -> dict[str, float]:
    """Run one step and return the times of its phases in ms; the device is idle at each mark."""
    import torch

    laps = laps or Laps(world)
    with torch.autocast(world.device.type, torch.bfloat16, enabled=trained.autocast):
        loss = fed.loss_of(trained.model)
    laps.mark("forward")
    loss.backward()  # type: ignore[no-untyped-call]
    # On a GPU this waits for the backward pass and overlapping reductions, like the calls below.
    laps.mark("backward")
    trained.average()
    laps.mark("waited")
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    laps.mark("optimizer")
    timing: Any = getattr(trained.model, "timing", None)
    waits = (
        {"slowest": timing.slowest * 1e3, "transfer": timing.transfer * 1e3}
        if timing is not None
        else {}
    )
    return {"step": laps.total_ms, **laps.ms, **waits}


def progress() -> None:
    """Tell the supervisor that the step it knows about goes on."""
    from stepscope.parallel.heartbeat import HEARTBEAT, State

    HEARTBEAT.state(State.WORKING)


def turn(world: World, build: Callable[[], Step], samples: int) -> list[Mapping[str, float]]:
    """Build a step, sample it and free it."""
    step = build()
    taken = []
    for index in range(-WARMUP, samples):
        progress()
        phases = step()
        if index >= 0:
            taken.append(phases)
    del step
    free(world)
    return taken


def interleaved(
    world: World,
    variants: Mapping[str, Callable[[], Step]],
    samples_each: int,
    numbers: Iterator[int],
    began_s: float | None = None,
) -> Samples:
    """Samples of all variants, in rounds that have one turn of each.

    `numbers` are those by which the supervisor reports turns. No round starts that would end more
    than `TIME_S` after `began_s`, a monotonic time; the first one always runs.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    order, shuffle = list(variants), random.Random(0).shuffle
    taken = 0
    while taken < samples_each:
        round_began = time.monotonic()
        count = min(PER_TURN, samples_each - taken)
        shuffle(order)
        for name in order:
            world.step(next(numbers))
            for phases in turn(world, variants[name], count):
                for phase, ms in phases.items():
                    samples[name].setdefault(phase, []).append(ms)
        taken += count
        now = time.monotonic()
        if began_s is not None and _on_rank_0(world, 2 * now - round_began - began_s > TIME_S):
            break
    return {
        (name, phase): ms for name, phases_of in samples.items() for phase, ms in phases_of.items()
    }


def _on_rank_0(world: World, decision: bool) -> bool:
    """The decision of rank 0, on every rank."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor(int(decision), device=world.device)
    dist.broadcast(shared, 0)
    return bool(shared)


def series_of(ranks: Sequence[Samples]) -> tuple[Series, ...]:
    """Series from the samples of each rank."""
    return tuple(
        Series(
            name=phase, variant=variant, unit="ms", rank=rank, values=tuple(samples[variant, phase])
        )
        for variant, phase in ranks[0]
        for rank, samples in enumerate(ranks)
    )


class Stopwatch:
    """Moments of a step that `one_step` runs with `laps`, also of its collectives.

    Only the device queue knows when a collective of NCCL ends: its callback runs when it is issued,
    on a stream that waits for it. CUDA events therefore mark the times there.
    """

    def __init__(self, world: World) -> None:
        self._events = world.backend == "nccl"
        self.laps = Laps(world)
        # A second reading of the clock would shift the collectives against the phases.
        self._began: Any = self.now() if self._events else self.laps.began

    def now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def at_end(self, work: Any, keep: Callable[[Any], None]) -> None:
        """Call `keep` with the moment when the collective ends."""
        work.get_future().then(lambda _: keep(self.now()))

    def ms(self, moment: Any) -> float:
        """Time of a moment since the start of the step; on a GPU the device must be idle."""
        if self._events:
            return float(self._began.elapsed_time(moment))
        return float((moment - self._began) * 1e3)

    def phases(self) -> list[Span]:
        spans, at = [], 0.0
        for name in PHASES:
            spans.append((at, at + self.laps.ms[name], name))
            at += self.laps.ms[name]
        return spans


def trained_step(world: World, make: Callable[[], Trained], fed: Fed) -> Step:
    """Build a wrapper; a call runs one step of it."""
    return partial(one_step, world, make(), fed)
