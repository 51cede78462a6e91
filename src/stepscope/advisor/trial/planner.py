"""Plan the memory of a script's step in its process, and end it before the step has run.

The first step runs on fake tensors: a step that runs out of memory is planned as any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn

from stepscope.acceleration.train_step_arguments import Lever
from stepscope.advisor.scope.steps import BackwardCalls
from stepscope.advisor.scope.trained_calls import (
    OuterCalls,
    Trained,
    available_memory,
    trained_by,
)
from stepscope.errors import StepscopeError, one_line
from stepscope.planning.fake_run import FakeStep
from stepscope.planning.fit import fastest_within
from stepscope.planning.loop import FakeLoop
from stepscope.planning.operators import known_rates
from stepscope.records.plans import FAILED, PLANNED, FittedStep


class MemoryPlanner:
    """Writes the fastest plan within a budget of bytes; 0 for the memory of the device."""

    def __init__(self, folder: Path, budget: int, allow: Collection[Lever]) -> None:
        self._folder, self._budget, self._allow = folder, budget, allow
        self._trained: Trained
        self._loop: FakeLoop | None = None

    def attach(self) -> None:
        OuterCalls(self._call).attach()
        BackwardCalls(self._backward_begins, lambda: None).attach()

    def write(self) -> None:
        """The script ended: nothing was planned. If it failed, its own error says why."""
        if sys.exc_info()[0] is None:
            self._failed(
                "no model was called that an optimizer updates"
                if self._loop is None
                else "no backward pass was called"
            )

    def _call(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._ending():
            if self._loop is None and (trained := trained_by(module)) is not None:
                self._begin(trained)
        if self._loop is None or not self._loop.has(part := self._trained.part(module)):
            return original(*args, **kwargs)
        with self._ending():
            return self._loop.call(part, args, kwargs)

    def _begin(self, trained: Trained) -> None:
        device = next((p.device for p in trained.model.parameters()), torch.device("cpu"))
        self._budget = self._budget or available_memory(device)
        self._trained = trained
        self._loop = FakeLoop(trained.model, trained.optimizer)

    def _backward_begins(self, roots: Any) -> None:
        if self._loop is None:
            return
        with self._ending():
            self._loop.end(
                roots[0] if isinstance(roots, tuple | list) and len(roots) == 1 else roots
            )
            planned = self._planned(self._loop)
            (self._folder / PLANNED).write_bytes(msgspec.json.encode(planned))
        self._exit()

    def _planned(self, loop: FakeLoop) -> FittedStep:
        rates, batch = known_rates(), loop.batch
        with loop.fakes.active():
            step = FakeStep(loop.fakes, loop.model, loop.optimizer, batch, loop.options)
            chosen = fastest_within(
                step,
                self._budget,
                rates,
                compiled=self._trained.compiled,
                allow=self._allow,
            )
        planned = chosen.described(self._budget, rates, type(self._trained.model).__name__)
        return msgspec.structs.replace(planned, batch=_rows(batch))

    def _failed(self, reason: str) -> None:
        (self._folder / FAILED).write_text(reason)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the script with an error: one that catches exceptions would continue."""
        try:
            yield
        except Exception as error:
            self._failed(str(error) if isinstance(error, StepscopeError) else one_line(error))
            self._exit()

    def _exit(self) -> NoReturn:
        sys.stdout.flush()
        os._exit(0)


def _rows(batch: list[Tensor]) -> int:
    """Return the length of the first dimension of the model's first input."""
    return next((one.shape[0] for one in batch if one.dim() and one.numel()), 0)
