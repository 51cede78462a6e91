"""Launch of the warp-specialized backward kernel for Hopper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.attention.specialized import BackwardVariant
from stepscope.attention.tiles import Tile
from stepscope.attention.triton import specialized_backward as module
from stepscope.attention.triton.replay import Launch, Prepared, starter
from stepscope.attention.triton.row_statistics import row_statistics_kernel
from stepscope.attention.triton.specialized_forward import describe

_TILE = module.GROUPS * module.KEYS


class PreparedBackward:
    """The compiled kernels with the arguments that follow from the problem. The first call compiles
    them through Triton's JIT dispatch, later ones launch them directly."""

    def __init__(
        self, q: Tensor, k: Tensor, *, causal: bool, shift: int, variant: BackwardVariant
    ) -> None:
        batch, heads, rows, head = q.shape
        key_heads, keys = k.shape[1:3]
        self._n_blocks = -(-rows // module.QUERIES)
        n_tiles = -(-keys // _TILE)
        self._programs = batch * key_heads * n_tiles
        constants = module.constants(variant, causal=causal, masked=keys % _TILE != 0)
        self._sizes = (
            heads,
            heads // key_heads,
            keys,
            shift if causal else 0,
            self._n_blocks,
            n_tiles,
            math.gcd(variant.heads, batch * key_heads),
            *constants.values(),
        )
        self._row_sizes = (heads, rows, self._n_blocks, module.QUERIES, head)
        self._stages = variant.stages
        self._statistics: Callable[..., None] | None = None
        self._kernel: Prepared | None = None

    @property
    def launch(self) -> Launch:
        assert self._kernel is not None
        return self._kernel.launch

    def compile(self, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...], scale: float) -> Any:
        """Compile without a launch; return the kernel."""
        buffers = self._buffers(tensors[1])
        arguments = self._arguments(tensors, buffers, grads, scale)
        kernel = module.specialized_backward_kernel
        return kernel.warmup(*arguments, num_warps=4, grid=(self._programs,))

    def run(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Write the gradients of q, k and v; return delta. TMA can read all but `out`."""
        buffers = lse_base_2, delta, turns, sums = self._buffers(q)
        stream = torch._C._cuda_getCurrentRawStream(q.device.index)
        programs = turns.numel()
        statistics = (out, grad, lse, lse_base_2, delta, *out.stride()[:3], *grad.stride()[:3])
        if self._statistics is None:
            compiled = row_statistics_kernel[(programs,)](*statistics, *self._row_sizes)
            self._statistics = starter(compiled)
        else:
            self._statistics(programs, stream, *statistics, *self._row_sizes)
        dq, dk, dv = grads
        tensors = (grad, q, k, v)
        if self._kernel is None:
            arguments = self._arguments(tensors, buffers, grads, scale)
            kernel = module.specialized_backward_kernel
            compiled = kernel[(self._programs,)](*arguments, num_warps=4)
            tile = Tile(module.QUERIES, _TILE, 4 * module.GROUPS + 2, self._stages)
            launch = Launch("key_value", tile, compiled)
            self._kernel = Prepared(launch, self._programs, self._fixed(grads), tma=True)
        else:
            rest = (lse_base_2, delta, turns, dk, dv)
            self._kernel.run((q, k, v, grad, sums), rest, float(scale))
        batch, heads, rows, head = q.shape
        torch.mul(sums.view(batch, heads, -1, head)[:, :, :rows], scale, out=dq)
        return delta.view(batch, heads, -1)[:, :, :rows].contiguous()

    def _buffers(self, q: Tensor) -> tuple[Tensor, ...]:
        """Allocate the log-sum-exp in base 2, delta, the turns and dQ in float32."""
        batch, heads, _, head = q.shape
        rows = batch * heads * self._n_blocks * module.QUERIES
        lse_base_2, delta = torch.empty((2, rows), device=q.device, dtype=torch.float32)
        turns = torch.zeros(batch * heads * self._n_blocks, device=q.device, dtype=torch.int32)
        sums = torch.empty((rows, head), device=q.device, dtype=torch.float32)
        return lse_base_2, delta, turns, sums

    def _fixed(self, grads: tuple[Tensor, ...]) -> tuple[Any, ...]:
        _, dk, dv = grads
        return (*dk.stride()[:3], *dv.stride()[:3], *self._sizes)

    def _arguments(
        self,
        tensors: tuple[Tensor, ...],
        buffers: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        scale: float,
    ) -> tuple[Any, ...]:
        grad, q, k, v = tensors
        *rest, sums = buffers
        return (
            describe(q, module.QUERIES),
            describe(k, module.KEYS),
            describe(v, module.KEYS),
            describe(grad, module.QUERIES),
            module.describe_sums(sums),
            *rest,
            *grads[1:],
            float(scale),
            *self._fixed(grads),
        )
