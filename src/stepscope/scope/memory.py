"""The account of the memory of a step that someone else's program makes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from stepscope.measure.allocator import CudaAllocator
from stepscope.measure.flops import FlopCount
from stepscope.measure.ledger import StorageLedger
from stepscope.records.memory import ELSEWHERE

_NO_BACKWARD = -1


class WatchedLedger(StorageLedger):  # type: ignore[no-untyped-call]
    """Tells the phase by itself: the autograd engine is at work, an optimizer steps, or neither."""

    def __init__(self, device: torch.device, allocator: CudaAllocator | None) -> None:
        super().__init__(device, allocator)
        self._optimizing = False
        self._phase = ""
        self.flops = FlopCount()

    @contextmanager
    def step(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[None]:
        with self.watching_all(models, optimizers):
            self.count(self._unknown(_living_tensors()), ELSEWHERE)
            self._turn("forward")
            yield
            self.end()

    def optimizing(self, on: bool) -> None:
        self._optimizing = on

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        backward = torch._C._current_graph_task_id() != _NO_BACKWARD
        self._turn("backward" if backward else "optimizer" if self._optimizing else "forward")
        result = super().__torch_dispatch__(function, types, arguments, keywords)
        self.flops.add(function, arguments, keywords or {}, result)
        return result

    def _turn(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.begin(phase)

    def _unknown(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tensor in tensors:
            if self.held(tensor) is None:
                yield tensor


def _living_tensors() -> Iterator[torch.Tensor]:
    """Tensors with a storage of their own that Python knows of; the compiler's stand-ins have none,
    and parameters that wait for their first forward."""
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), FakeTensor):
            try:
                found.untyped_storage()
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            yield found
