"""Steps of a program under torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

from stepscope.advisor.scope.user_profiler import OtherProfilers
from stepscope.measure.capture import STEP_MARK, Tracer
from stepscope.measure.device import Device
from stepscope.measure.modules import ModuleRanges

STEP_EDGE = "StepEdge#"


class StepTrace:
    """`prepare` in the step before; `begin` and `end` around each step, `write` after the last."""

    def __init__(self, path: Path, give_way: Callable[[], None]) -> None:
        self.path = path
        self.steps = 0
        """Traced so far."""
        self.forwards = 0
        """Calls of the model in these."""
        self.evaluations: list[int] = []
        """In each of them, the calls without gradients."""
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
        """By the program itself."""
        return self._others.busy

    def watching_others(self) -> AbstractContextManager[None]:
        """Inside it is seen whether the program uses a profiler of its own."""
        return self._others.watched()

    def prepare(
        self,
        device: Device,
        models: Sequence[torch.nn.Module],
        called: Sequence[torch.nn.Module],
    ) -> None:
        """Let the profiler start up; the ranges of modules are there from now on."""
        self._ranges = ModuleRanges(models, called)
        self._open.enter_context(self._ranges.entered())
        with self._others.ours():
            self._tracer = Tracer(device.kind)
            self._tracer.prepare()
            if device.kind == "cuda":
                # Kernels of this step may still run when the next begins: by their launches they
                # are told from its own.
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
        """Where a step ends as the next begins."""
        with record_function(f"{STEP_EDGE}{self.steps}"):
            pass

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is of that phase, unless a range in it says another."""
        with record_function(name) if self.running else nullcontext():
            yield

    def drop(self) -> None:
        """Ends it; what was traced so far is of no use."""
        self._stop()
        self.steps = self.forwards = 0
        self.evaluations.clear()

    def write(self) -> None:
        """Ends it, and keeps it where there is a step in it."""
        tracer = self._stop()
        if tracer is not None and self.steps:
            tracer.write(self.path)

    def _stop(self) -> Tracer | None:
        tracer, self._tracer = self._tracer, None
        self._step.close()
        if tracer is not None:
            with self._others.ours():
                tracer.stop()
        self._open.close()
        return tracer
