"""Trace of some steps of a program with torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

from stepscope.advisor.scope.user_profiler import OtherProfilers
from stepscope.measure.device import Device
from stepscope.measure.modules import ModuleRanges
from stepscope.measure.profiler import STEP_MARK, Tracer

STEP_EDGE = "StepEdge#"


class StepTrace:
    """Call `prepare` in the step before, `begin` and `end` around each step, `write` after the
    last."""

    def __init__(self, path: Path, give_way: Callable[[], None]) -> None:
        self.path = path
        self.steps = 0
        """Steps traced so far."""
        self.forwards = 0
        """Calls of the model in the traced steps."""
        self.evaluations: list[int] = []
        """Calls of the model without gradients, for each traced step."""
        self._others = OtherProfilers(give_way)
        self._tracer: Tracer | None = None
        self._ranges: ModuleRanges | None = None
        self._open = ExitStack()
        self._step = ExitStack()

    @property
    def running(self) -> bool:
        return self._tracer is not None

    @property
    def profiler_is_taken(self) -> bool:
        """True if the program itself uses the profiler."""
        return self._others.busy

    def watching_others(self) -> AbstractContextManager[None]:
        """Context that detects profilers started by the program."""
        return self._others.watched()

    def prepare(
        self, device: Device, models: Sequence[torch.nn.Module], called: Sequence[torch.nn.Module]
    ) -> None:
        """Start up the profiler and add ranges to the modules."""
        self._ranges = ModuleRanges(models, called)
        self._open.enter_context(self._ranges.entered())
        with self._others.ours():
            self._tracer = Tracer(device.kind)
            self._tracer.prepare()
            if device.kind == "cuda":
                # Kernels of this step may still run when the next begins; recording their launches
                # distinguishes them from the kernels of the next step.
                self._tracer.start()

    def begin(self, *, by_edges: bool) -> None:
        assert self._tracer is not None
        assert self._ranges is not None
        if self._tracer.prepared:
            with self._others.ours():
                self._tracer.start()
        self._ranges.evaluations = 0
        if not self.steps:
            self._ranges.forget_calls()
        if by_edges:
            self.mark_edge()
        else:
            self._step.enter_context(record_function(f"{STEP_MARK}{self.steps}"))
            self._step.enter_context(record_function("outside"))

    def end(self) -> None:
        assert self._ranges is not None
        self.steps += 1
        self.forwards = self._ranges.forwards
        self.evaluations.append(self._ranges.evaluations)
        self._step.close()

    def mark_edge(self) -> None:
        """Mark the end of a step that is also the start of the next."""
        with record_function(f"{STEP_EDGE}{self.steps}"):
            pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign what runs inside to a phase, unless an inner range names another."""
        with record_function(name) if self.running else nullcontext():
            yield

    def drop(self) -> None:
        """Stop, and discard what was traced so far."""
        self._stop()
        self.steps = self.forwards = 0
        self.evaluations.clear()

    def write(self) -> None:
        """Stop, and write the trace if it contains a step."""
        self.stopped()()

    def stopped(self) -> Callable[[], None]:
        """Stop, and return the function that writes the trace if it contains a step."""
        tracer = self._stop()
        if tracer is None or not self.steps:
            return lambda: None
        return partial(tracer.write, self.path)

    def _stop(self) -> Tracer | None:
        tracer, self._tracer = self._tracer, None
        self._step.close()
        if tracer is not None:
            with self._others.ours():
                tracer.stop()
        self._open.close()
        return tracer
