"""A parameter of which this rank stores some rows; full only while it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stepscope.parallel.collective_order import Order, Verb
from stepscope.parallel.collectives import start_all_gather, start_reduce_scatter
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.memory_order import in_logical_order, in_order_of
from stepscope.parallel.peers import finish


class ShardedParameter:
    """A parameter sharded by rows as by torch.chunk: the last ranks may have fewer rows or none."""

    def __init__(
        self,
        parameter: nn.Parameter,
        name: str,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        group: dist.ProcessGroup | None,
        order: Order,
    ) -> None:
        self.parameter = parameter
        self._order = order
        self.name = name
        self.shape = parameter.shape
        self._compute_dtype = compute_dtype
        self._reduce_dtype = reduce_dtype
        self._group = group
        self._size = dist.get_world_size(group)
        self._chunk = -(-self.shape[0] // self._size)
        self._begin = min(dist.get_rank(group) * self._chunk, self.shape[0])
        self.rows = min(self._begin + self._chunk, self.shape[0]) - self._begin
        # A copy: a view would keep the full tensor alive.
        parameter.data = self.rows_of(parameter.data).clone()
        self.before: ShardedParameter | None = None
        self.after: ShardedParameter | None = None
        """Neighbors in the order of the last forward pass, for prefetching."""
        self.observer: Callable[[Verb, str, dist.Work | None], None] | None = None
        """Called with the work of each gather as it is issued, and without when it is needed."""
        self._full: Tensor | None = None
        self._pending: tuple[Tensor, dist.Work] | None = None
        self._reducing: list[tuple[Tensor, dist.Work]] = []

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size((self.rows, *self.shape[1:]))

    def rows_of(self, full: Tensor) -> Tensor:
        """This rank's rows of a tensor of the full shape."""
        if isinstance(full, DTensor):
            return full.to_local()
        return full[self._begin : self._begin + self.rows]

    @property
    def reducing(self) -> bool:
        return bool(self._reducing)

    def prefetch(self, verb: Verb) -> None:
        if self._full is None and self._pending is None:
            self._order.use(verb, self.name)
            # The current dtype: the module may have been converted since it was wrapped.
            self._pending = self._start_gather(self._dtype_or(self._compute_dtype))
            if self.observer is not None:
                self.observer(verb, self.name, self._pending[1])

    def full(self, verb: Verb) -> Tensor:
        """All rows in the compute dtype; waits for the prefetch or gathers them now."""
        if self._full is None:
            if self.observer is not None:
                self.observer(verb, self.name, None)
            self.prefetch(verb)
            assert self._pending is not None
            (padded, work), self._pending = self._pending, None
            self._order.wait(work)
            self._full = padded[: self.shape[0]]
        return self._full

    def release(self) -> None:
        self._full = None

    def forget(self) -> None:
        """Release the full parameter and discard a prefetch that was not used."""
        self.release()
        if self._pending is not None:
            self._order.wait(self._pending[1])
            self._pending = None

    def gather_master(self) -> Tensor:
        """All rows in the dtype in which they are stored."""
        padded, work = self._start_gather(self.parameter.dtype)
        finish(work, self._group)
        return padded[: self.shape[0]]

    def _dtype_or(self, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype, if it is given and the parameter is of real numbers: a cast would discard the
        imaginary part of a complex one."""
        own = self.parameter.dtype
        return dtype if dtype is not None and own.is_floating_point else own

    def _start_gather(self, dtype: torch.dtype) -> tuple[Tensor, dist.Work]:
        own = self._padded(self.parameter.detach().to(dtype), self._chunk)
        padded = own.new_empty((self._size * self._chunk, *self.shape[1:]))
        work = start_all_gather(padded, own, self._group)
        return padded, work

    def reduce(self, gradient: Tensor) -> None:
        """Start averaging a gradient of the full shape; each rank receives its rows."""
        if gradient.layout != torch.strided:
            raise ParallelError(
                f"the gradient of {self.name} is sparse, and sparse gradients are not averaged"
                " between ranks",
                "use dense gradients",
            )
        self._order.use("reduce", self.name)
        gradient = gradient.to(self._dtype_or(self._reduce_dtype))
        scaled = self._padded(gradient, self._size * self._chunk) / self._size
        own = scaled.new_empty((self._chunk, *self.shape[1:]))
        work = start_reduce_scatter(own, scaled, self._group)
        self._reducing.append((own, work))

    def finish(self) -> None:
        """Add the reduced gradients to the parameter's gradient."""
        for own, work in self._reducing:
            finish(work, self._group)
            gradient = in_order_of(self.parameter, own[: self.rows].to(self.parameter.dtype))
            if self.parameter.grad is None:
                self.parameter.grad = gradient
            else:
                self.parameter.grad += gradient
        self._reducing = []
        self.forget()

    @staticmethod
    def _padded(rows: Tensor, count: int) -> Tensor:
        if rows.shape[0] == count:
            return in_logical_order(rows)
        padded = rows.new_zeros((count, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        return padded

    def divided(self, tensor: Tensor) -> DTensor:
        """Wrap this rank's rows (of the parameter or its optimizer state) as a DTensor."""
        group = self._group or dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, tensor.device.type)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            tensor, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=stride
        )


class Gather(torch.autograd.Function):
    """Gather the full parameter from the rows; the backward pass reduce-scatters its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shard: ShardedParameter) -> Tensor:  # noqa: ARG004
        ctx.shard = shard
        return shard.full("gather").view(shard.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        shard: ShardedParameter = ctx.shard
        shard.release()
        shard.reduce(gradients[0])
        return None, None
