"""Plan the memory of a script's step in its process, and end it before the step has run.

The first step runs on fake tensors: a step that runs out of memory is planned as any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from stepscope.advisor.scope.once_imported import FAILED
from stepscope.advisor.scope.steps import BackwardCalls
from stepscope.advisor.trial.first_call import FirstCall, unwrapped
from stepscope.errors import StepscopeError, UsageError, one_line
from stepscope.planning.application import application_of, described
from stepscope.planning.fit import FakeStep, fastest_within
from stepscope.planning.loop import FakeLoop, LoopBatch
from stepscope.planning.operators import known_rates
from stepscope.planning.plans import Lever
from stepscope.records.plans import PLANNED, FittedStep, Frontier, thinned

_MOST = 40
"""Plans of a frontier that are kept."""


class MemoryPlanner:
    """Writes the fastest plan within a budget of bytes; 0 for the memory of the device."""

    def __init__(self, folder: Path, budget: int, allow: Collection[Lever]) -> None:
        self._folder, self._budget, self._allow = folder, budget, allow
        self._model: nn.Module
        self._compiled = False
        self._loop: FakeLoop | None = None

    def attach(self) -> None:
        FirstCall(self._called).attach()
        BackwardCalls(self._backward_begins, lambda: None).attach()

    def write(self) -> None:
        """The script ended: nothing was planned."""
        self._failed(
            "the backward pass of its first step was not reached"
            if self._loop is not None
            else "no model was called that an optimizer updates"
        )

    def _called(
        self, model: nn.Module, optimizer: Optimizer, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        del run
        try:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            self._budget = self._budget or _memory_of(device)
            self._model, self._compiled = unwrapped(model)
            self._loop = FakeLoop(self._model, optimizer)
            return self._loop.call(device.type, args, kwargs)
        except Exception as error:
            self._end(error)

    def _backward_begins(self, roots: Any) -> None:
        if self._loop is None:
            return
        try:
            losses = [leaf for leaf in tree_leaves(roots) if isinstance(leaf, Tensor)]
            if len(losses) != 1:
                raise UsageError(
                    f"the backward pass starts from {len(losses)} tensors", "use one loss"
                )
            self._loop.end(losses[0])
            planned = self._planned(self._loop)
            (self._folder / PLANNED).write_bytes(msgspec.json.encode(planned))
        except Exception as error:
            self._end(error)
        self._end()

    def _planned(self, loop: FakeLoop) -> FittedStep:
        rates, batch = known_rates(), loop.batch
        with loop.fakes.active():
            step = FakeStep(loop.model, loop.optimizer, batch, loop.options)
            chosen = fastest_within(
                loop.fakes, step, self._budget, rates, compiled=self._compiled, allow=self._allow
            )
        plan = described(chosen.plan)
        if chosen.prediction is not None:
            plan = msgspec.structs.replace(plan, peak=chosen.prediction.peak.allocated)
        return FittedStep(
            frontier=Frontier(
                plans=tuple(map(described, thinned(chosen.plans, _MOST))), device=rates.device
            ),
            budget=self._budget,
            plan=plan,
            apply=application_of(chosen.plan),
            model=type(self._model).__name__,
            batch=_rows(batch),
            is_estimate=chosen.prediction is None,
            assumed=tuple(loop.fakes.values.assumed),
        )

    def _failed(self, reason: str) -> None:
        (self._folder / FAILED).write_text(reason)

    def _end(self, error: Exception | None = None) -> NoReturn:
        """End the script at once: one that catches an exception would continue."""
        if error is not None:
            self._failed(str(error) if isinstance(error, StepscopeError) else one_line(error))
        sys.stdout.flush()
        os._exit(0)


def _memory_of(device: torch.device) -> int:
    if device.type != "cuda":
        raise UsageError("a budget of memory is needed on a CPU", "give --budget, such as 60GiB")
    return int(torch.cuda.get_device_properties(device).total_memory)


def _rows(batch: LoopBatch) -> int:
    sizes = {
        leaf.shape[0] for leaf in tree_leaves(batch[:2]) if isinstance(leaf, Tensor) and leaf.dim()
    }
    return sizes.pop() if len(sizes) == 1 else 0
