"""Tensors in, tensors out: the Triton kernels with their grids, tiles and descriptors.

Everything here takes (B, H, M, D) queries and (B, H/G, N, D) keys and values whose last dimension
is contiguous; `ops.py` brings inputs into that form.

A first call with some shape goes through Triton's own launcher, which looks at every argument; the
next ones with the same shape, strides and alignment go straight to the compiled kernel. At short
lengths that is the larger part of the time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.attention.tiles import Pass, Tile, columns, tiles
from stepscope.attention.triton_backward import key_value_kernel, query_kernel
from stepscope.attention.triton_forward import forward_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETER_TILE = Tile(32, 32, 4, 1)
_TMA_ALIGNMENT = 16
_MOST_PREPARED = 4096


class Launch(NamedTuple):
    """One kernel that ran."""

    kind: Pass
    tile: Tile
    kernel: Any
    """Triton's compiled kernel (`n_regs`, `n_spills`, `metadata.shared`); None when interpreted."""


class _Prepared(NamedTuple):
    """A compiled kernel with the arguments that the shapes fix."""

    launch: Launch
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    tma: bool


_PREPARED: dict[tuple[Any, ...], _Prepared] = {}
_forced: dict[Pass, Tile] = {}
_record: list[Launch] | None = None


@contextmanager
def forced_tiles(chosen: Mapping[Pass, Tile]) -> Iterator[None]:
    """Within it the named passes use exactly these tiles; what does not fit is an error."""
    global _forced
    before, _forced = _forced, dict(chosen)
    try:
        yield
    finally:
        _forced = before


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within it every kernel that runs is added to the list."""
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, shift: int
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output like q, and the log-sum-exp of each row's scores in float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    if q.numel():
        problem = Problem(causal, shift, q.shape[1] // max(1, k.shape[1]))
        run_pass("forward", problem, (q, k, v), (out, lse), (out,), scale)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, causal: bool, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    problem = Problem(causal, shift, q.shape[1] // k.shape[1])
    read = (q, k, v, grad)
    run_pass("query", problem, read, (out, lse, delta, dq), (out, dq), scale)
    run_pass("key_value", problem, read, (lse, delta, dk, dv), (dk, dv), scale)
    return dq, dk, dv


class Problem(NamedTuple):
    causal: bool
    shift: int
    queries_per_key: int


class _Kernel(NamedTuple):
    function: Any
    held: tuple[int, ...]
    """Which of the tensors read by tiles stay in registers where a tile says so."""
    by_keys: bool
    """A program works on a tile of keys, and not of queries."""


_KERNELS: dict[Pass, _Kernel] = {
    "forward": _Kernel(forward_kernel, (0,), by_keys=False),
    "query": _Kernel(query_kernel, (0, 3), by_keys=False),
    "key_value": _Kernel(key_value_kernel, (1, 2), by_keys=True),
}
_BY_QUERIES = (True, False, False, True)
"""Whether q, k, v, grad are cut into tiles of queries."""


def run_pass(
    kind: Pass, problem: Problem, read: tuple[Tensor, ...], rest: tuple[Tensor, ...],
    strided: tuple[Tensor, ...], scale: float,
) -> None:  # fmt: skip
    """`read` are fetched by tiles, `rest` are the kernel's other tensors, `strided` those of them
    whose strides it takes."""
    if INTERPRETED:
        _first_launch(kind, problem, read, rest, strided, scale, _INTERPRETER_TILE)
        return
    if read[0].device.index != torch.cuda.current_device():
        with torch.cuda.device(read[0].device):
            run_pass(kind, problem, read, rest, strided, scale)
        return
    key = (
        kind, problem, read[0].dtype, read[0].device.index, read[0].shape, read[1].shape[2],
        _float32_precision(), *[x.stride() for x in read], *[x.stride() for x in strided],
        *[x.data_ptr() % _TMA_ALIGNMENT == 0 for x in read],
        *[x.data_ptr() % _TMA_ALIGNMENT == 0 for x in rest], _forced.get(kind),
    )  # fmt: skip
    prepared = _PREPARED.get(key)
    if prepared is None:
        prepared = _fitting_launch(kind, problem, read, rest, strided, scale)
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[key] = prepared
    else:
        tile = prepared.launch.tile
        sources = _sources(kind, tile, read, prepared.tma)
        prepared.launch.kernel[prepared.grid](*sources, *rest, scale, *prepared.fixed)
    if _record is not None:
        _record.append(prepared.launch)


def _fitting_launch(
    kind: Pass, problem: Problem, read: tuple[Tensor, ...], rest: tuple[Tensor, ...],
    strided: tuple[Tensor, ...], scale: float,
) -> _Prepared:  # fmt: skip
    """Launch with the best tile that this GPU can hold."""
    q = read[0]
    if kind in _forced:
        choices = [_forced[kind]]
    else:
        choices = tiles(kind, q.shape[-1], q.element_size(), _capability(q.device))
    for tile in choices[:-1]:
        try:
            return _first_launch(kind, problem, read, rest, strided, scale, tile)
        except OutOfResources:
            continue
    return _first_launch(kind, problem, read, rest, strided, scale, choices[-1])


def _first_launch(
    kind: Pass, problem: Problem, read: tuple[Tensor, ...], rest: tuple[Tensor, ...],
    strided: tuple[Tensor, ...], scale: float, tile: Tile,
) -> _Prepared:  # fmt: skip
    q, k = read[:2]
    kernel = _KERNELS[kind]
    batch, heads, rows, head = q.shape
    is_float32 = q.dtype == torch.float32
    tma = _tma_ready(read)
    tile = tile._replace(hold=tile.hold and not is_float32 and not INTERPRETED)
    if kernel.by_keys:
        n_tiles, programs = triton.cdiv(k.shape[2], tile.n), batch * k.shape[1]
    else:
        n_tiles, programs = triton.cdiv(rows, tile.m), batch * heads
    precision = (_float32_precision() or tile.precision) if is_float32 else "tf32"
    fixed = (
        *[stride for x in (*read, *strided) for stride in x.stride()[:3]],
        heads, problem.queries_per_key, rows, k.shape[2], head, problem.shift, n_tiles,
        tile.m, tile.n, *columns(head), problem.causal, _group(tile, programs), tma, tile.hold,
        precision, is_float32,
    )  # fmt: skip
    grid = (n_tiles * programs, 1, 1)
    layout = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        layout["maxnreg"] = tile.registers
    compiled = kernel.function[grid](
        *_sources(kind, tile, read, tma), *rest, scale, *fixed, **layout
    )
    return _Prepared(Launch(kind, tile, compiled), grid, fixed, tma)


def _sources(kind: Pass, tile: Tile, read: tuple[Tensor, ...], tma: bool) -> list[Any]:
    """What a kernel reads its tiles from: for each tensor the first part of its columns, then for
    each the second, or None."""
    first, second = columns(read[0].shape[-1])
    if tile.hold:
        held = _KERNELS[kind].held
        read = tuple([x.view(torch.int16) if i in held else x for i, x in enumerate(read)])
    if not tma:
        return [*read, *(read if second else [None] * len(read))]
    rows = [tile.m if by_queries else tile.n for by_queries in _BY_QUERIES]
    sources = [_descriptor(x, rows[i], first) for i, x in enumerate(read)]
    if second:
        sources += [_descriptor(x, rows[i], second) for i, x in enumerate(read)]
    else:
        sources += [None] * len(read)
    return sources


def _descriptor(tensor: Tensor, rows: int, wide: int) -> TensorDescriptor:
    made = object.__new__(TensorDescriptor)
    # Past its constructor: what that checks, `_tma_ready` has, and it takes as long as a launch.
    made.__dict__ = {
        "base": tensor, "shape": tensor.shape, "strides": tensor.stride(),
        "block_shape": [1, 1, rows, wide], "padding": "zero",
    }  # fmt: skip
    return made


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _float32_precision() -> str | None:
    """TF32 where torch was asked for it (`torch.set_float32_matmul_precision`), else the table's
    way, which keeps float32 accuracy."""
    return None if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _group(tile: Tile, programs: int) -> int:
    """A group of heads must divide them all."""
    group = tile.group
    while programs % group:
        group //= 2
    return group


def _tma_ready(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the GPU's copy engine can fetch tiles of all these: Hopper on, rows aligned."""
    if INTERPRETED or _capability(tensors[0].device)[0] < 9:
        return False
    return all(
        t.numel() > 0
        and t.data_ptr() % _TMA_ALIGNMENT == 0
        and all(s * t.element_size() % _TMA_ALIGNMENT == 0 for s in t.stride()[:3])
        and 0 not in t.stride()[:3]
        for t in tensors
    )
