"""Recording of some steps of a trainer's loop: the part that all callbacks share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stepscope.acceleration.accelerate import accelerate
from stepscope.acceleration.report import Report
from stepscope.advisor.observer.observer import Observer
from stepscope.advisor.scope.library import Scope
from stepscope.advisor.scope.stages import Effort
from stepscope.analysis.limits import mfu, step_ms, tokens_per_second
from stepscope.analysis.verdict import AtMost, Verdict, plain
from stepscope.cli.messages import log, write_line
from stepscope.errors import StepscopeError, one_line
from stepscope.measure.modules import trained_models
from stepscope.records.schema import Record
from stepscope.report.verdict import verdict_lines
from stepscope.views.program.rows import ProgramRecord

Metrics = dict[str, float]
PREFIX = "stepscope/"


class TrainerRecording:
    """Base of the callbacks: records steps with a `Scope`, then prints the verdict, writes the
    page and logs metrics.

    A subclass calls `_start` before the first step, `_step_ended` after each optimizer step, and
    `_end`. An error is reported once on standard error and ends the recording, never the training.
    Only the leading process records; all processes are accelerated, and observed with `observe`.
    """

    def __init__(
        self,
        *,
        warmup: int = 5,
        steps: int = 10,
        traced: int = 3,
        memory: bool = True,
        page: str | Path = "stepscope-out/trainer.html",
        accelerate: bool = False,
        observe: bool = False,
    ) -> None:
        # An invalid plan is an error of the caller, before any training.
        self._effort = Effort(warmup=warmup, timed=steps, traced=traced, memory=memory)
        self._page = Path(page)
        self._accelerate = accelerate
        self._observe = observe
        self._scope: Scope | None = None
        self.observer: Observer | None = None
        """The observer of all steps with `observe=True`; its files are next to the page."""
        self.acceleration: Report | None = None
        """What `accelerate=True` changed, until training ends."""
        self.record: Record | None = None
        """The record of the steps, once they are recorded."""
        self.verdict: Verdict | None = None
        self.metrics: Metrics = {}
        """The logged numbers."""

    def _start(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, leads: bool
    ) -> None:
        self._guarded(lambda: self._begin(model, optimizers, leads))

    def _step_ended(self, log_metrics: Callable[[Metrics], None]) -> None:
        """Mark the end of a step. After the last step of the recording, `log_metrics` is called
        once with the numbers for the trainer's loggers."""
        if self.observer is not None and (numbers := self.observer.take_metrics()):
            self._guarded(lambda: log_metrics(numbers))
        if self._scope is not None:
            self._guarded(lambda: self._next_step(log_metrics))

    def _end(self, log_metrics: Callable[[Metrics], None]) -> None:
        """End the recording, complete or not; restore an accelerated model."""
        if self._scope is not None:
            self._guarded(lambda: self._finish(log_metrics))
        self._restore()

    def _restore(self) -> None:
        """End the observation, and restore an accelerated model."""
        if self.observer is not None:
            self.observer.close()
        if self.acceleration is not None:
            report, self.acceleration = self.acceleration, None
            self._guarded(report.undo)

    def _abandon(self) -> None:
        """End without a result, because the training failed."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def _begin(
        self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], leads: bool
    ) -> None:
        self._abandon()
        if self._observe:
            self.observer = Observer(self._page.parent / "observer")
        plain = [unwrapped(one) for one in optimizers]
        if self._accelerate:
            self.acceleration = accelerate(model, plain[0] if len(plain) == 1 else None)
            for line in str(self.acceleration).splitlines() if leads else ():
                log(line)
        if leads:
            # The loop may call a wrapper of the model (DDP, torch.compile).
            parameters = [p for one in plain for group in one.param_groups for p in group["params"]]
            models = trained_models(parameters) or [model]
            effort = self._effort
            self._scope = Scope(
                models,
                plain,
                warmup=effort.warmup,
                timed=effort.timed,
                traced=effort.traced,
                memory=effort.memory,
                name=_program_name() or type(model).__name__,
            )

    def _next_step(self, log_metrics: Callable[[Metrics], None]) -> None:
        assert self._scope is not None
        self._scope.next_step()
        if self._scope.done:
            self._finish(log_metrics)

    def _finish(self, log_metrics: Callable[[Metrics], None]) -> None:
        scope, self._scope = self._scope, None
        assert scope is not None
        self.record, self.verdict = scope.record(), scope.verdict()
        page = scope.report(self._page)
        if sys.stderr.isatty():
            # A progress bar may have left the cursor within its line.
            write_line("")
        for line in verdict_lines(self.verdict) if self.verdict is not None else ():
            write_line(line)
        log(f"page: {page.resolve()}")
        self.metrics = metrics_of(self.record)
        log_metrics(self.metrics)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            why = str(error) if isinstance(error, StepscopeError) else one_line(error)
            log(f"the recording ended, training continues: {why}")
            self._abandon()


def metrics_of(record: Record) -> Metrics:
    """Numbers for the loggers of a trainer; what is not known is left out. MFU is relative to the
    measured matmul rate of this machine (`mfu_at_most` if that may be too low), and to the rate in
    the device's data sheet."""
    step, trace = step_ms(record), ProgramRecord(record).summary
    utilization, peak = mfu(record), mfu(record, measured=False)
    values = {
        "step_ms": None if step is None else step.median,
        "tokens_per_second": tokens_per_second(record),
        "mfu": utilization if isinstance(utilization, float) else None,
        "mfu_at_most": utilization.value if isinstance(utilization, AtMost) else None,
        "mfu_of_data_sheet": None if peak is None else plain(peak),
        "exposed_communication_ms": None if trace is None else trace.class_ms("communication"),
        "peak_memory_bytes": record.quantity("peak_bytes"),
    }
    return {f"{PREFIX}{name}": float(value) for name, value in values.items() if value is not None}


def _program_name() -> str:
    """Name of the running script; empty in a notebook, whose `sys.argv` is that of the kernel."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").name


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of torch within the wrapper of a library, whose hooks torch does not call."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
