"""Tensors in, tensors out: the Triton kernels with their grids, tiles and descriptors.

Everything here takes (B, H, M, D) queries and (B, H/G, N, D) keys and values whose last dimension
is contiguous; `ops.py` brings inputs into that form.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from stepscope.attention.tiles import Pass, Tile, block_d, tiles
from stepscope.attention.triton_backward import delta_kernel, key_value_kernel, query_kernel
from stepscope.attention.triton_forward import forward_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETER_TILE = Tile(32, 32, 4, 1)
_TMA_ALIGNMENT = 16
_DELTA_ROWS = 64


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, shift: int
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output like q, and the log-sum-exp of each row's scores in float32."""
    batch, heads, rows, head = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    if not q.numel():
        return out, lse

    def launch(tile: Tile) -> None:
        tma = _tma_ready(q, k, v)
        n_tiles = triton.cdiv(rows, tile.m)
        forward_kernel[(n_tiles * batch * heads,)](
            _source(q, tile.m, tma), _source(k, tile.n, tma), _source(v, tile.n, tma), out, lse,
            scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            heads, heads // k.shape[1], rows, k.shape[2], head, shift, n_tiles,
            tile.m, tile.n, block_d(head), causal, _group(tile, batch * heads), tma,
            _precision(q), q.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    _run("forward", q, launch)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, causal: bool, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, rows, head = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    n_delta = triton.cdiv(rows, _DELTA_ROWS)
    delta_kernel[(n_delta * batch * heads,)](
        out, grad, delta, *out.stride()[:3], *grad.stride()[:3], heads, rows, head, n_delta,
        _DELTA_ROWS, block_d(head),
    )  # fmt: skip
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3])
    sizes = (heads, heads // k.shape[1], rows, k.shape[2], head, shift)
    tma = _tma_ready(q, k, v, grad)

    def launch_key_value(tile: Tile) -> None:
        n_tiles = triton.cdiv(k.shape[2], tile.n)
        programs = batch * k.shape[1]
        key_value_kernel[(n_tiles * programs,)](
            _source(q, tile.m, tma), _source(k, tile.n, tma), _source(v, tile.n, tma),
            _source(grad, tile.m, tma), lse, delta, dk, dv, scale, *strides,
            *dk.stride()[:3], *dv.stride()[:3], *sizes, n_tiles,
            tile.m, tile.n, block_d(head), causal, _group(tile, programs), tma,
            _precision(q), q.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def launch_query(tile: Tile) -> None:
        n_tiles = triton.cdiv(rows, tile.m)
        query_kernel[(n_tiles * batch * heads,)](
            _source(q, tile.m, tma), _source(k, tile.n, tma), _source(v, tile.n, tma),
            _source(grad, tile.m, tma), lse, delta, dq, scale, *strides,
            *dq.stride()[:3], *sizes, n_tiles,
            tile.m, tile.n, block_d(head), causal, _group(tile, batch * heads), tma,
            _precision(q), q.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    _run("key_value", q, launch_key_value)
    _run("query", q, launch_query)
    return dq, dk, dv


_FITTING: dict[tuple[Any, ...], int] = {}
"""How many tiles of a list were found too large, so that each is tried once."""


def _run(kind: Pass, q: Tensor, launch: Callable[[Tile], None]) -> None:
    """Launch with the best tile that this GPU can hold."""
    if INTERPRETED:
        launch(_INTERPRETER_TILE)
        return
    key = (kind, q.shape[-1], q.dtype, q.device)
    choices = tiles(kind, q.shape[-1], q.element_size(), _capability(q.device))
    for place in range(_FITTING.get(key, 0), len(choices)):
        try:
            launch(choices[place])
        except OutOfResources:
            if place + 1 == len(choices):
                raise
            _FITTING[key] = place + 1
        else:
            return


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _precision(q: Tensor) -> str:
    """float32 products keep float32 accuracy; for 16-bit formats the choice has no effect."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _group(tile: Tile, programs: int) -> int:
    """A group of heads must divide them all."""
    group = tile.group
    while programs % group:
        group //= 2
    return group


def _tma_ready(*tensors: Tensor) -> bool:
    """Whether the GPU's copy engine can fetch tiles of all these: Hopper on, rows aligned."""
    return all(
        not INTERPRETED
        and _capability(t.device)[0] >= 9
        and t.data_ptr() % _TMA_ALIGNMENT == 0
        and all(s * t.element_size() % _TMA_ALIGNMENT == 0 for s in t.stride()[:3])
        and 0 not in t.stride()[:3]
        for t in tensors
    )


def _source(tensor: Tensor, rows: int, tma: bool) -> Any:
    if not tma:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    block = [1, 1, rows, block_d(tensor.shape[-1])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
