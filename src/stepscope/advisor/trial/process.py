"""Script side of an interleaved run: it waits at the end of a step for the next turn.

It sends one line of JSON each: `Ready` once its warm-up is over, `TurnResult` after each turn. It
receives the number of steps of the next turn; 0 ends it.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.advisor.advise.interleaved import Ready, TurnResult
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.errors import StepscopeError
from stepscope.records.decoding import from_json

if TYPE_CHECKING:
    from stepscope.advisor.scope.steps import StepFinder
    from stepscope.advisor.trial.backwards import Backwards
    from stepscope.advisor.trial.changes import Changes
    from stepscope.measure.device import Device, Timestamp

_SEED = 0
_SET_DEATH_SIGNAL = 1
_LEAD = 1
"""Untimed steps at the start of a turn: the first starts on an idle device."""


class InterleavedRun:
    """One of the two runs of a script, controlled over a socket."""

    def __init__(self, channel: int, settings: dict[str, str], warmup: int) -> None:
        self._channel = socket.socket(fileno=channel)
        self._lines = self._channel.makefile("rb")
        self._settings = settings
        self._warmup = warmup
        self._known = 0
        self._pid = os.getpid()
        self._steps = 0
        self._left = 0
        self._turn = 0
        self._warm_since = 0.0
        self._turn_start: Timestamp | None = None
        self._device: Device
        self._finder: StepFinder
        self._backwards: Backwards
        self._changes: Changes

    def start(self) -> None:
        # A run stopped between its turns would outlive a controller that died.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        random.seed(_SEED)
        when_imported("numpy", _seed_numpy)
        when_imported("torch", self._attach)

    def finish(self) -> None:
        """Do nothing: the controller sees that the channel closes."""

    def _attach(self) -> None:
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from stepscope.advisor.scope.steps import BackwardCalls, StepFinder
        from stepscope.advisor.trial.backwards import Backwards
        from stepscope.advisor.trial.changes import Changes

        torch.manual_seed(_SEED)
        self._backwards = Backwards()
        self._backwards.attach()
        self._changes = Changes(self._settings, self._backwards)
        self._changes.on_torch_imported()
        self._finder = StepFinder()
        BackwardCalls(self._backward_begins, self._backward_ended).attach()
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_stepped)

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        if self._counts() and self._finder.optimizer_begins(optimizer):
            if self._steps >= self._warmup:
                raise StepscopeError(
                    "the program's first optimizer step came after its backward calls had been"
                    " counted as steps"
                )
            self._steps = 0

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if not self._counts():
            return
        self._changes.optimizer_stepped(optimizer)
        if self._finder.optimizer_stepped(optimizer):
            self._end_step()
        elif self._steps:
            self._find_more_models()

    def _backward_begins(self, roots: Any) -> None:
        if self._counts():
            self._finder.backward_begins(roots)

    def _backward_ended(self) -> None:
        if self._counts() and self._finder.backward_ended():
            self._end_step()

    def _counts(self) -> bool:
        """Return True for what the program itself does: not a child process, nor a `TrainStep`."""
        return os.getpid() == self._pid and not self._changes.paused

    def _end_step(self) -> None:
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
            missing = self._changes.without_effect()
            self._send(Ready(step_ms=1e3 * took, losses=self._backwards.take(), missing=missing))
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
        if self._left == self._turn:
            self._turn_start = self._device.mark()
        elif self._left == 0:
            assert self._turn_start is not None
            end = self._device.mark()
            self._device.synchronize()
            on_device = self._device.device_ms(self._turn_start, end)
            on_host = 1e3 * (end.host_s - self._turn_start.host_s)
            took = on_host if on_device is None else on_device
            peak = self._device.peak_with_graphs() if self._device.kind == "cuda" else None
            self._send(
                TurnResult(
                    step_ms=took / self._turn, losses=self._backwards.take(), peak_bytes=peak
                )
            )
            self._await_turn()

    def _await_turn(self) -> None:
        line = self._lines.readline()
        self._turn = from_json(line, int) if line else 0
        if not self._turn:
            # Exit immediately: a script that catches an exception would continue, or write its
            # final checkpoint.
            sys.stdout.flush()
            os._exit(0)
        self._left = self._turn + _LEAD

    def _send(self, message: Ready | TurnResult) -> None:
        self._channel.sendall(msgspec.json.encode(message) + b"\n")


def _seed_numpy() -> None:
    import numpy as np

    np.random.seed(_SEED)
