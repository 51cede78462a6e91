"""Memory ledger of a step of a user's program."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stepscope.errors import StepscopeError, one_line
from stepscope.measure.allocator import CudaAllocator
from stepscope.measure.flops import FlopCount
from stepscope.measure.ledger import FunctionNames, StorageLedger
from stepscope.measure.saving import seen_while_allowed
from stepscope.measure.tensors import stored
from stepscope.records.memory import ELSEWHERE

_NO_BACKWARD, _NEVER = -1, -2


class WatchedLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Memory ledger that detects the phase itself: backward, optimizer step, or neither."""

    def __init__(
        self,
        device: torch.device,
        allocator: CudaAllocator | None,
        most_operators: int = sys.maxsize,
    ) -> None:
        super().__init__(device, allocator)
        self.operators = 0
        """Operators seen so far."""
        self.too_many = False
        """True if there were more than `most_operators`; the count has then ended."""
        self._most_operators = most_operators
        self._optimizing_in = _NEVER
        self._phase = ""
        self.flops = FlopCount()
        self.failure = ""
        """Error that ended the count early; the ledger is then invalid."""
        self.saved_unseen = False
        """True if tensors saved for backward were not identified; totals and FLOPs are valid."""

    @contextmanager
    def step(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[None]:
        with self.watching_all(models, optimizers):
            self.aside(self._begin_step)
            yield
            self.aside(self.end)

    def can_leave(self) -> bool:
        """Return True if its contexts are innermost on this thread, so that exiting them does not
        exit a context of the program instead."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return (
            _get_current_dispatch_mode() is self
            and isinstance(_get_current_function_mode(), FunctionNames)  # type: ignore[no-untyped-call]
            and (self.saved_unseen or (top is not None and top[0] == self._pack))
        )

    def optimizing(self, on: bool) -> None:
        """Mark the start or end of an optimizer step. An optimizer may step inside a backward, and
        a backward may run inside its step: the one that began last determines the phase."""
        self._optimizing_in = torch._C._current_graph_task_id() if on else _NEVER

    def aside(self, note: Callable[..., None], *given: Any) -> None:
        if self.failure:
            return
        try:
            note(*given)
        except Exception as error:
            self.failure = one_line(error)

    def seeing_saved(
        self, pack: Callable[[torch.Tensor], torch.Tensor]
    ) -> AbstractContextManager[None]:
        return seen_while_allowed(pack, self._unseen)

    def before(self) -> None:
        self.operators += 1
        if self.operators > self._most_operators:
            self.too_many = True
            raise StepscopeError(f"a step runs more than {self._most_operators:,} operators")
        task = torch._C._current_graph_task_id()
        if task == self._optimizing_in:
            self._turn("optimizer")
        else:
            self._turn("forward" if task == _NO_BACKWARD else "backward")
        super().before()

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        super().after(function, arguments, keywords, result)
        self.flops.add(function, arguments, keywords, result)

    def _begin_step(self) -> None:
        self.count(self._unknown(_living_tensors()), ELSEWHERE)
        self._turn("forward")

    def _unseen(self) -> None:
        self.saved_unseen = True

    def _turn(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.begin(phase)

    def _unknown(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tensor in tensors:
            if not self.storages_of(tensor):
                yield tensor


def _living_tensors() -> Iterator[torch.Tensor]:
    """Tensors with storage that are known to Python's garbage collector; excludes fake tensors and
    uninitialized lazy parameters."""
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and not issubclass(type(tensor), FakeTensor):
            try:
                for part in stored(tensor):
                    part.untyped_storage()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            yield tensor
