"""Plans of the memory of a program's step, from one step that is watched after its recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stepscope.advisor.scope.steps import BackwardCalls
from stepscope.advisor.scope.trained_calls import OuterCalls, Trained, available_memory
from stepscope.errors import one_line
from stepscope.planning.loop import RealLoop
from stepscope.planning.variants import planned_steps
from stepscope.records.plans import Planned


class LoopPlans:
    """Watches the next step up to its backward pass, then plans on fake tensors; errors are noted
    and never reach the program."""

    def __init__(self, trained: Trained, then: Callable[[], None]) -> None:
        """`then` is called at the end, also after an error."""
        self.planned: Planned = ()
        self.failure = ""
        self._trained, self._then = trained, then
        self._loop = RealLoop(trained.model)
        self._calls = OuterCalls(self._call)
        self._backwards = BackwardCalls(self._begins, self._ended)
        self._done = False

    def attach(self) -> None:
        self._calls.attach()
        self._backwards.attach()

    def _call(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        part = self._trained.part(module)
        if self._done or not self._loop.has(part):
            return original(*args, **kwargs)
        return self._loop.call(part, original, args, kwargs)

    def _begins(self, roots: Any) -> None:
        if not self._done:
            self._loop.begin_backward(roots[0] if isinstance(roots, tuple | list) else roots)

    def _ended(self) -> None:
        if self._done:
            return
        self._done = True
        try:
            self._calls.detach()
            self._backwards.remove()
            self._loop.end()
            device = next(self._trained.model.parameters()).device
            self.planned = tuple(
                planned_steps(
                    self._loop,
                    self._trained.model,
                    self._trained.optimizer,
                    available_memory(device),
                    compiled=self._trained.compiled,
                )
            )
        except Exception as error:
            self.failure = one_line(error)
        self._then()
