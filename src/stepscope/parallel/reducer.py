"""Average the gradients of all ranks, with one of four strategies.

Every rank issues the same reductions in the order of the plan, regardless of the order in which
its backward pass produced the gradients. A gradient that is ready early waits for its position; a
missing one is sent as zeros at the end. Gradients therefore cannot mix. `agreement.py` checks that
they belong together. A message has the logical order of the parameter on every rank, whatever the
strides of a gradient are there; the averaged gradient has the strides of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.parallel.buckets import MEGABYTE, Bucket, Item, identity, plan_buckets
from stepscope.parallel.collectives import start_all_reduce
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.memory_order import in_logical_order, in_order_of
from stepscope.parallel.peers import finish

Strategy = Literal["naive", "flat", "overlap", "bucketed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


def items_of(parameters: Sequence[Tensor], names: Sequence[str]) -> list[Item]:
    return [
        Item(name, p.numel(), p.element_size(), f"{p.dtype} {p.device}")
        for name, p in zip(names, parameters, strict=True)
    ]


class Reducer:
    """The bucket plan and the reductions in flight."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        strategy: Strategy,
        bucket_mb: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.items = items_of(parameters, names)
        limit = {"flat": float("inf"), "bucketed": bucket_mb * MEGABYTE}.get(strategy, 0.0)
        self.buckets = plan_buckets(self.items, limit)
        self.identity = identity(self.buckets, self.items)
        self.eager = strategy in ("overlap", "bucketed")
        """True if reductions are issued during the backward pass."""
        self._blocking = strategy == "naive"
        self._group = group
        self.observer: Callable[[int, dist.Work], None] | None = None
        """Called with the bytes and the work of every reduction as it is issued."""
        self._views: dict[int, Tensor] = {}
        self._buffers: dict[int, Tensor] = {}
        if strategy in ("flat", "bucketed"):
            self._allocate()
        self._bucket_of = {p: n for n, bucket in enumerate(self.buckets) for p in bucket.items}
        self.reset()

    def _allocate(self) -> None:
        for bucket_index, bucket in enumerate(self.buckets):
            first = self.parameters[bucket.items[0]]
            buffer = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
            self._buffers[bucket_index] = buffer
            for index, offset in zip(bucket.items, bucket.offsets, strict=True):
                parameter = self.parameters[index]
                flat = buffer[offset : offset + parameter.numel()]
                self._views[index] = flat.view(parameter.shape)

    def reset(self) -> None:
        self.ready: set[int] = set()
        self._missing = [len(bucket.items) for bucket in self.buckets]
        self._next = 0
        self._in_flight: list[dist.Work] = []

    def gradient_is_ready(self, index: int, factor: float) -> None:
        """Record a gradient that the backward pass produced; send complete buckets in order."""
        if index in self.ready:
            raise ParallelError(
                f"a second backward reached {self.names[index]} before"
                " finish_gradient_synchronization",
                "run all but the last backward of a step inside no_sync()",
            )
        self.ready.add(index)
        if not self.eager:
            return
        self._pack(index, factor)
        self._missing[self._bucket_of[index]] -= 1
        while self._next < len(self.buckets) and self._missing[self._next] == 0:
            self._send(self._next)
            self._next += 1

    def send_rest(self, used: Sequence[bool], factor: float) -> None:
        """Send what has not been sent yet; skip buckets that no rank uses."""
        packed = self.ready if self.eager else frozenset()
        for bucket_index in range(self._next, len(self.buckets)):
            bucket = self.buckets[bucket_index]
            if not any(used[index] for index in bucket.items):
                continue
            for index in bucket.items:
                if index not in packed:
                    self._pack(index, factor)
            self._send(bucket_index)
        self._next = len(self.buckets)

    def wait(self, used: Sequence[bool]) -> None:
        for work in self._in_flight:
            finish(work, self._group)
        for index, parameter in enumerate(self.parameters):
            if not used[index]:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = in_order_of(parameter, parameter.grad)

    def _pack(self, index: int, factor: float) -> None:
        """Scale the gradient, in its bucket if it has one."""
        parameter = self.parameters[index]
        gradient, view = parameter.grad, self._views.get(index)
        if gradient is not None and gradient.is_sparse:
            raise ParallelError(
                f"the gradient of {self.names[index]} is sparse, and sparse gradients are not"
                " averaged between ranks",
                "use dense gradients",
            )
        if gradient is None:
            # Not zeros_like, which has the strides of the parameter.
            empty = parameter.new_zeros(parameter.shape) if view is None else view.zero_()
            parameter.grad = empty
        elif view is None:
            parameter.grad = in_logical_order(gradient).mul_(factor)
        elif gradient is view:
            view.mul_(factor)
        else:
            torch.mul(gradient, factor, out=view)
            parameter.grad = view

    def _send(self, bucket_index: int) -> None:
        bucket: Bucket = self.buckets[bucket_index]
        tensor = self._buffers.get(bucket_index)
        if tensor is None:
            tensor = self.parameters[bucket.items[0]].grad
        assert tensor is not None
        work = start_all_reduce(tensor, self._group)
        if self.observer is not None:
            self.observer(tensor.numel() * tensor.element_size(), work)
        if self._blocking:
            finish(work, self._group)
        else:
            self._in_flight.append(work)

    def message_bytes(self) -> list[int]:
        """Bytes of the reductions of a step in which every parameter has a gradient."""
        return [
            sum(self.items[index].elements * self.items[index].element_bytes for index in b.items)
            for b in self.buckets
        ]
