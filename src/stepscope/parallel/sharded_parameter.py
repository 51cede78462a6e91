"""One parameter of which this rank keeps some rows, whole only while it is used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stepscope.parallel.collective_order import Order, Verb
from stepscope.parallel.collectives import all_gather, reduce_scatter
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT


class ShardedParameter:
    """Rows are cut as torch.chunk cuts them: the last ranks may have fewer, or none."""

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
        # A copy: a view would keep the whole.
        parameter.data = self.rows_of(parameter.data).clone()
        self.before: ShardedParameter | None = None
        self.after: ShardedParameter | None = None
        """Neighbours in the order of the last forward: what will be needed next."""
        self._whole: Tensor | None = None
        self._coming: tuple[Tensor, dist.Work] | None = None
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
        if self._whole is None and self._coming is None:
            self._order.use(verb, self.name)
            # Of now: the module may have been converted since it was wrapped.
            self._coming = self._start_gather(self._compute_dtype or self.parameter.dtype)

    def whole(self, verb: Verb) -> Tensor:
        """All rows in the compute dtype, gathered now unless they are on their way."""
        if self._whole is None:
            self.prefetch(verb)
            assert self._coming is not None
            (padded, work), self._coming = self._coming, None
            self._order.wait(work)
            self._whole = padded[: self.shape[0]]
        return self._whole

    def release(self) -> None:
        self._whole = None

    def forget(self) -> None:
        """Also what was fetched ahead of a use that did not come."""
        self.release()
        if self._coming is not None:
            self._order.wait(self._coming[1])
            self._coming = None

    def gather_master(self) -> Tensor:
        """All rows in the format in which they are kept."""
        padded, work = self._start_gather(self.parameter.dtype)
        with HEARTBEAT.waiting():
            work.wait()
        return padded[: self.shape[0]]

    def _start_gather(self, dtype: torch.dtype) -> tuple[Tensor, dist.Work]:
        own = self._padded(self.parameter.detach().to(dtype), self._chunk)
        padded = own.new_empty((self._size * self._chunk, *self.shape[1:]))
        work = all_gather(padded, own, group=self._group, async_op=True)
        return padded, work

    def reduce(self, gradient: Tensor) -> None:
        """Start to average a gradient of the whole; each rank receives that of its rows."""
        if gradient.layout != torch.strided:
            raise ParallelError(
                f"the gradient of {self.name} is sparse, and sparse gradients are not averaged"
                " between ranks",
                "make dense gradients",
            )
        self._order.use("reduce", self.name)
        gradient = gradient.to(self._reduce_dtype or self.parameter.dtype)
        scaled = self._padded(gradient, self._size * self._chunk) / self._size
        own = scaled.new_empty((self._chunk, *self.shape[1:]))
        work = reduce_scatter(own, scaled, group=self._group, async_op=True)
        self._reducing.append((own, work))

    def finish(self) -> None:
        """Add what was reduced to the gradient."""
        for own, work in self._reducing:
            with HEARTBEAT.waiting():
                work.wait()
            gradient = own[: self.rows].to(self.parameter.dtype)
            if self.parameter.grad is None:
                self.parameter.grad = gradient
            else:
                self.parameter.grad += gradient
        self._reducing = []
        self.forget()

    @staticmethod
    def _padded(rows: Tensor, count: int) -> Tensor:
        if rows.shape[0] == count:
            return rows.contiguous()
        padded = rows.new_zeros((count, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        return padded

    def divided(self, tensor: Tensor) -> DTensor:
        """Rows of this rank (of the parameter or of its optimizer state) as part of a whole."""
        group = self._group or dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, tensor.device.type)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            tensor, mesh, [Shard(0)], run_check=False, shape=self.shape, stride=stride
        )


class Gather(torch.autograd.Function):
    """Rows of this rank in, the whole out; backward, gradients of the whole are scattered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, held: ShardedParameter) -> Tensor:  # noqa: ARG004
        ctx.held = held
        return held.whole("gather").view(held.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        held: ShardedParameter = ctx.held
        held.release()
        held.reduce(gradients[0])
        return None, None
