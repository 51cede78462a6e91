"""The account of the memory of a step that someone else's program makes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from stepscope.errors import one_line
from stepscope.measure.allocator import CudaAllocator
from stepscope.measure.flops import FlopCount
from stepscope.measure.ledger import StorageLedger
from stepscope.measure.saving import seen_while_allowed
from stepscope.measure.tensors import stored
from stepscope.records.memory import ELSEWHERE

_NO_BACKWARD = -1


class WatchedLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Tells the phase by itself: the autograd engine is at work, an optimizer steps, or neither."""

    def __init__(self, device: torch.device, allocator: CudaAllocator | None) -> None:
        super().__init__(device, allocator)
        self._optimizing = False
        self._phase = ""
        self.flops = FlopCount()
        self.failure = ""
        """What ended the count before the step: then nothing of it holds."""
        self.saved_unseen = False
        """What is saved for backward was not told from the rest; sums and FLOPs hold."""

    @contextmanager
    def step(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[None]:
        with self.watching_all(models, optimizers):
            self.aside(self._begin_step)
            yield
            self.aside(self.end)

    def optimizing(self, on: bool) -> None:
        self._optimizing = on

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
        backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        self._turn("backward" if backward else "optimizer" if self._optimizing else "forward")
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
            if not self.held(tensor):
                yield tensor


def _living_tensors() -> Iterator[torch.Tensor]:
    """Tensors with numbers that Python knows of; the compiler's stand-ins have none, and parameters
    that wait for their first forward."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), FakeTensor):
            try:
                for part in stored(found):
                    part.untyped_storage()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            yield found
