"""Script side of an interleaved run: it waits at the end of a step for the next turn.

It sends one line of JSON each: `Ready` once its warm-up is over, `TurnResult` after each turn. It
receives a `Turn` before each; the end of the connection ends it.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from stepscope.advisor.advise.interleaved import Ready, Turn, TurnResult
from stepscope.advisor.scope.following import StepFollower
from stepscope.advisor.scope.once_imported import SEED, seed_numpy
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.analysis.advice.rules.train_step import STEP
from stepscope.errors import StepscopeError
from stepscope.records.decoding import from_json

if TYPE_CHECKING:
    from stepscope.advisor.trial.backwards import Backwards
    from stepscope.advisor.trial.changes import Changes
    from stepscope.measure.device import Device, Timestamp
    from stepscope.measure.instructions import Counter

_SET_DEATH_SIGNAL = 1


def _cpu_s() -> float:
    """Return the CPU time of this process and of those that it has started: work that moves into
    workers is not saved."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


class InterleavedRun(StepFollower):
    """One of the two runs of a script, controlled over a socket."""

    def __init__(
        self, channel: int, settings: dict[str, str], warmup: int, optimizers: int = 0
    ) -> None:
        super().__init__()
        self._channel = socket.socket(fileno=channel)
        self._lines = self._channel.makefile("rb")
        self._settings = settings
        self._warmup, self._optimizers = warmup, optimizers
        self._known = 0
        self._steps = 0
        self._left = 0
        self._turn = Turn(steps=0)
        self._warm_since = 0.0
        self._turn_start: Timestamp | None = None
        self._cpu_start_s = 0.0
        self._counter: Counter
        self._counted: int | None = None
        self._device: Device
        self._backwards: Backwards
        self._changes: Changes

    def start(self) -> None:
        # A run stopped between its turns would outlive a controller that died.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        random.seed(SEED)
        when_imported("numpy", seed_numpy)
        when_imported("torch", self._attach)

    def finish(self) -> None:
        """Do nothing: the controller sees that the channel closes."""

    def _attach(self) -> None:
        import torch

        from stepscope.advisor.trial.backwards import Backwards
        from stepscope.advisor.trial.changes import Changes
        from stepscope.measure.instructions import Counter

        # Before torch has threads: those that are started later are counted.
        self._counter = Counter()
        torch.manual_seed(SEED)
        self._backwards = Backwards()
        self._backwards.attach()
        self._changes = Changes(self._settings, self._backwards)
        self._changes.on_torch_imported()
        self.follow()
        if STEP not in self._settings:
            self._follow_train_steps()

    def _follow_train_steps(self) -> None:
        """Count the calls of a `TrainStep` that the program itself makes: the hooks of torch do not
        run in the replay of a CUDA graph."""
        from stepscope.acceleration.train_step import TrainStep

        plain = TrainStep.__call__

        def call(step: Any, batch: Any) -> Any:
            if os.getpid() != self._pid:
                return plain(step, batch)
            self._finder.optimizer_begins(step.optimizer)
            self._backwards.paused = True
            try:
                loss = plain(step, batch)
            finally:
                self._backwards.paused = False
            self._backwards.note(loss)
            if not step.pending and self._finder.optimizer_stepped(step.optimizer):
                self.end_step()
            return loss

        TrainStep.__call__ = call  # type: ignore[method-assign, assignment]

    @property
    def _is_own(self) -> bool:
        """Whether the program itself does it: not a child process, nor a `TrainStep`."""
        return super()._is_own and not self._changes.paused

    def on_misdetected(self) -> None:
        if self._steps >= self._warmup:
            raise StepscopeError(
                "the program's first optimizer step came after its backward calls had been"
                " counted as steps"
            )
        self._steps = 0

    def on_optimizer_stepped(self, optimizer: Any) -> None:
        self._changes.optimizer_stepped(optimizer)
        if self._steps:
            self._find_more_models()

    def end_step(self) -> None:
        if len(self._finder.optimizers) < self._optimizers:
            return
        self._steps += 1
        self._backwards.end_step()
        if self._steps == 1:
            self._find_models()
        self._find_more_models()
        self._changes.end_step(self._steps)
        if self._steps == self._warmup - 1:
            self._finder.anchor.freeze()
            self._device.synchronize()
            self._warm_since = time.perf_counter()
        elif self._steps == self._warmup:
            self._device.synchronize()
            took = time.perf_counter() - self._warm_since
            self._device.reset_peak()
            self._send(
                Ready(
                    step_ms=1e3 * took,
                    losses=self._backwards.take(),
                    missing=self._changes.without_effect(),
                    switchable=self._changes.switchable(),
                )
            )
            self._await_turn()
        elif self._steps > self._warmup:
            self._within_turn()

    def _find_more_models(self) -> None:
        """Search for models again when another optimizer appears: each may have its own model."""
        if len(self._finder.optimizers) != self._known:
            self._find_models()

    def _find_models(self) -> None:
        from stepscope.measure.device import CpuDevice, CudaDevice
        from stepscope.measure.modules import trained_models

        self._known = len(self._finder.optimizers)
        parameters = self._finder.parameters
        device = parameters[0].device
        self._device = CudaDevice(device.index or 0) if device.type == "cuda" else CpuDevice()
        self._changes.on_models_known(trained_models(parameters), self._finder.optimizers.values())

    def _within_turn(self) -> None:
        self._left -= 1
        if self._left == self._turn.steps:
            self._start_timing()
        if self._left == 0:
            on_host, on_device, cpu_ms = self._timed()
            after = self._counter.read()
            counted = None if after is None or self._counted is None else after - self._counted
            peak = self._device.peak_with_graphs() if self._device.kind == "cuda" else None
            steps = max(1, self._turn.steps)
            self._send(
                TurnResult(
                    step_ms=(on_host if on_device is None else on_device) / steps,
                    losses=self._backwards.take(),
                    peak_bytes=peak,
                    cpu_ms=cpu_ms / steps,
                    instructions=None if counted is None else counted / steps,
                )
            )
            self._await_turn()

    def _start_timing(self) -> None:
        self._counted = self._counter.read()
        self._cpu_start_s = _cpu_s()
        self._turn_start = self._device.mark()

    def _timed(self) -> tuple[float, float | None, float]:
        """Milliseconds since the start of the timed steps: on the host, on the device, on CPUs."""
        assert self._turn_start is not None
        end = self._device.mark()
        self._device.synchronize()
        cpu_ms = 1e3 * (_cpu_s() - self._cpu_start_s)
        on_device = self._device.device_ms(self._turn_start, end)
        return 1e3 * (end.host_s - self._turn_start.host_s), on_device, cpu_ms

    def _await_turn(self) -> None:
        line = self._lines.readline()
        if not line:
            # Exit immediately: a script that catches an exception would continue, or write its
            # final checkpoint.
            sys.stdout.flush()
            os._exit(0)
        self._turn = from_json(line, Turn)
        if self._turn.settings is not None:
            self._changes.switch(self._turn.settings)
        self._left = self._turn.steps + self._turn.untimed
        if not self._turn.untimed:
            self._start_timing()

    def _send(self, message: Ready | TurnResult) -> None:
        self._channel.sendall(msgspec.json.encode(message) + b"\n")
