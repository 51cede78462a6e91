"""A backend of `stepscope.capture` without a GPU: a capture is undone, a replay runs it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class FakeGraphs:
    """Captures as a GPU does, as far as the host can tell: nothing has run after a capture, and a
    replay writes results and gradients at the addresses of the capture."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, optimizers
        self.generation = 0
        self.bytes_per_graph = 0
        self.captures = 0
        self.log: list[str] = []

    def on_side_stream(self) -> Any:
        return nullcontext()

    def pool_bytes(self) -> int:
        return self.captures * self.bytes_per_graph

    def capture(self, run: Callable[[Any], Any]) -> tuple[FakeGraph, Any]:
        saved = [(tensor, tensor.detach().clone()) for tensor in self.tensors()]

        def cut(work: Callable[[], None]) -> None:
            self.log.append("cut")
            work()
            # What it has created is not changed by the rest of the capture either.
            known = {id(tensor) for tensor, _ in saved}
            new = (tensor for tensor in self.tensors() if id(tensor) not in known)
            saved.extend((tensor, tensor.detach().clone()) for tensor in new)

        entry = [parameter.grad for parameter in self.model.parameters()]
        result = run(cut)
        with torch.no_grad():
            for tensor, before in saved:
                # As on a GPU: torch's version counters do not see that nothing has run.
                tensor.data.copy_(before)
        self.captures += 1
        self.log.append("capture")
        return FakeGraph(self, run, result, entry), result

    def tensors(self) -> list[Tensor]:
        states = [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*self.model.parameters(), *self.model.buffers(), *states, *gradients]


class FakeGraph:
    def __init__(
        self,
        backend: FakeGraphs,
        run: Callable[[Any], Any],
        result: Any,
        entry: Sequence[Tensor | None],
    ) -> None:
        self._backend, self._run, self._result, self._entry = backend, run, result, entry
        self._exit = [parameter.grad for parameter in backend.model.parameters()]

    def replay(self) -> None:
        self._backend.log.append("replay")
        parameters = list(self._backend.model.parameters())
        for parameter, gradient in zip(parameters, self._entry, strict=True):
            # A graph reads the gradients of the capture, whatever Python has set meanwhile.
            parameter.grad = gradient
        result = self._run(_cut_nothing)
        for old, new in zip(*map(tree_leaves, (self._result, result)), strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        for parameter, old_gradient in zip(parameters, self._exit, strict=True):
            gradient = parameter.grad
            if gradient is not None and old_gradient is not None and gradient is not old_gradient:
                old_gradient.copy_(gradient)
            # A replay does not run Python: the caller has to set the gradients.
            parameter.grad = None


def _cut_nothing(work: Callable[[], None]) -> None:
    """Ignore work between two graphs: it ran once, in the capture."""
    del work
