"""Tensors in, tensors out: the Triton kernels with their grids, tiles and descriptors.

Everything here takes (B, H, M, D) queries and (B, H/G, N, D) keys and values whose last dimension
is contiguous; `ops.py` brings inputs into that form.

The first call with some arguments goes through Triton's own front door, which looks at each of
them; later calls with the same arguments go straight to the compiled kernel. At short lengths that
is the larger part of the time. "The same" is `Problem`: the settings, and shape, strides, dtype and
alignment of every tensor that the caller gives. What is allocated here (outputs, planes) follows
from those and is no part of the key: allocate nothing here whose layout depends on more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.attention.tiles import IN_PLANES, Pass, Tile, columns, tiles
from stepscope.attention.triton.backward import key_value_kernel, query_kernel
from stepscope.attention.triton.forward import forward_kernel
from stepscope.attention.triton.memory import split_kernel
from stepscope.attention.triton.replay import Launch, Prepared, starter
from stepscope.torch_tools.triton_available import is_interpreted, on_its_device, tf32_is_enabled

INTERPRETED = is_interpreted()
_INTERPRETER_TILE = Tile(32, 32, 4, 1)
ALIGNMENT = 16
PLANES = 3
# 3 × 8 bits are all of float32; the interpreter, which cannot do bfloat16, has 3 × 11 of them.
_PLANE_FORMAT = torch.float16 if INTERPRETED else torch.bfloat16
# Of a row's largest power of two: as fine as one plane can hold.
_PLANE_STEP = torch.finfo(_PLANE_FORMAT).eps
_PLANE_ALIGNMENT = 8
_SPLIT_ROWS = 32
_MOST_PREPARED = 4096


class Given(NamedTuple):
    """A tensor as the caller gives it: all of it that a launch depends on, but its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    """Whether it starts at a multiple of 16 bytes: Triton compiles wide loads for that, tensor by
    tensor, and the GPU's copy engine needs it."""

    @classmethod
    def of(cls, x: Tensor) -> Given:
        return cls(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)


class Problem(NamedTuple):
    """What decides about a launch; the same problem takes the same kernels and arguments."""

    causal: bool
    shift: int
    device: torch.device
    tf32: bool
    """Whether float32 is multiplied as TF32."""
    planes: int
    """As how many tensors of a 16-bit dtype the ones that are read by tiles come."""
    given: tuple[Given, ...]
    """q, k, v; for the backward also the gradient, the output and its log-sum-exp."""

    @classmethod
    def of(
        cls, tensors: tuple[Tensor, ...], read: tuple[Tensor, ...], causal: bool, shift: int
    ) -> Problem:
        """`read` are the tensors that are read by tiles, or the planes of these."""
        q = tensors[0]
        return cls(
            bool(causal), shift, q.device, q.dtype == torch.float32 and tf32_is_enabled(),
            1 if read[0] is q else PLANES,
            tuple(
                [Given(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)
                 for x in tensors]
            ),
        )  # fmt: skip

    @property
    def q(self) -> Given:
        return self.given[0]

    @property
    def k(self) -> Given:
        return self.given[1]


Launches = dict[tuple[Pass, Tile | None], Prepared]
_PREPARED: dict[Problem, Launches] = {}
_SPLITTERS: dict[tuple[torch.device, Given], Callable[..., None]] = {}
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


@on_its_device
def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, shift: int
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output like q, and the log-sum-exp of each row's scores in float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    if q.numel():
        read = readable(q, k, v)
        problem = Problem.of((q, k, v), read, causal, shift)
        run_pass("forward", problem, _launches(problem), read, (out, lse), (out,), scale)
    return out, lse


@on_its_device
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, causal: bool, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v; the rows of `out` and all of `lse` are contiguous."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    # Only float32 has these two; the other dtypes never touch them.
    factor, lean = delta, delta
    if q.dtype == torch.float32:
        factor, lean = torch.empty_like(lse), torch.empty_like(lse)
    read = readable(q, k, v, grad)
    problem = Problem.of((q, k, v, grad, out, lse), read, causal, shift)
    launches = _launches(problem)
    rest = (out, lse, delta, factor, lean, dq)
    run_pass("query", problem, launches, read, rest, (out, dq), scale)
    rest = (lse, delta, factor, lean, dk, dv)
    run_pass("key_value", problem, launches, read, rest, (dk, dv), scale)
    return dq, dk, dv


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As the kernels read them by tiles: 16-bit formats as they are, float32 as planes where tensor
    cores can multiply those."""
    x = tensors[0]
    if x.dtype != torch.float32 or tf32_is_enabled():
        return tensors
    if _forced:
        chosen = next(iter(_forced.values()))
    elif INTERPRETED:
        chosen = _INTERPRETER_TILE
    else:
        chosen = tiles("forward", x.shape[-1], x.element_size(), _capability(x.device))[0]
    return tuple([_planes(x) for x in tensors]) if chosen.precision == IN_PLANES else tensors


@on_its_device
def _planes(x: Tensor) -> Tensor:
    """(3 B, H, M, D) of a 16-bit format for (B, H, M, D) of float32, D filled up with zeros so that
    rows are aligned."""
    batch, heads, rows, head = x.shape
    wide = triton.cdiv(head, _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT
    made = torch.empty((PLANES * batch, heads, rows, wide), device=x.device, dtype=_PLANE_FORMAT)
    count = batch * heads * rows
    if not count:
        return made
    programs = triton.cdiv(count, _SPLIT_ROWS)
    arguments = (
        x, made, *x.stride()[:3], heads, rows, head, count, wide,
        _PLANE_STEP, _SPLIT_ROWS, triton.next_power_of_2(wide),
    )  # fmt: skip
    key = (x.device, Given.of(x))
    start = _SPLITTERS.get(key)
    if start is None:
        compiled = split_kernel[(programs,)](*arguments)
        if not INTERPRETED:
            if len(_SPLITTERS) >= _MOST_PREPARED:
                _SPLITTERS.clear()
            _SPLITTERS[key] = starter(compiled)
    else:
        start(programs, torch._C._cuda_getCurrentRawStream(x.device.index), *arguments)
    return made


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


def _launches(problem: Problem) -> Launches:
    """The launches that are prepared for it. Asked once for both passes of a backward: the hash of
    a problem takes about as long as a launch."""
    found = _PREPARED.get(problem)
    if found is None:
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()
        found = _PREPARED[problem] = {}
    return found


def run_pass(
    kind: Pass, problem: Problem, launches: Launches, read: tuple[Tensor, ...],
    rest: tuple[Tensor, ...], strided: tuple[Tensor, ...], scale: float,
) -> None:  # fmt: skip
    """One kernel: `read` are fetched by tiles, `rest` are its other tensors, `strided` those of
    them whose strides it takes."""
    # An int would be compiled into the kernel, which the next scale would then have to share.
    scale = float(scale)
    key = (kind, _forced.get(kind) if _forced else None)
    prepared = launches.get(key)
    if prepared is None or INTERPRETED:
        prepared = _fitting_launch(kind, problem, key[1], read, rest, strided, scale)
        launches[key] = prepared
    else:
        prepared.run(read, rest, scale)
    if _record is not None:
        _record.append(prepared.launch)


def _fitting_launch(
    kind: Pass, problem: Problem, forced: Tile | None, read: tuple[Tensor, ...],
    rest: tuple[Tensor, ...], strided: tuple[Tensor, ...], scale: float,
) -> Prepared:  # fmt: skip
    """Launch with the best tile that this GPU can hold."""
    if forced:
        choices = [forced]
    elif INTERPRETED:
        choices = [_INTERPRETER_TILE]
    else:
        head, width = problem.q.shape[-1], problem.q.dtype.itemsize
        choices = tiles(kind, head, width, _capability(problem.device))
    for tile in choices[:-1]:
        try:
            return _first_launch(kind, problem, read, rest, strided, scale, tile)
        except OutOfResources:
            continue
    return _first_launch(kind, problem, read, rest, strided, scale, choices[-1])


def _first_launch(
    kind: Pass, problem: Problem, read: tuple[Tensor, ...], rest: tuple[Tensor, ...],
    strided: tuple[Tensor, ...], scale: float, tile: Tile,
) -> Prepared:  # fmt: skip
    kernel = _KERNELS[kind]
    batch, heads, rows, head = problem.q.shape
    key_heads, keys = problem.k.shape[1:3]
    is_float32 = problem.q.dtype == torch.float32
    tma = _tma_ready(problem.device, read)
    tile = tile._replace(hold=tile.hold and not is_float32 and not INTERPRETED)
    if kernel.by_keys:
        n_tiles, programs = triton.cdiv(keys, tile.n), batch * key_heads
    else:
        n_tiles, programs = triton.cdiv(rows, tile.m), batch * heads
    visible = min(keys, rows + problem.shift) if problem.causal else keys
    whole = () if kind == "forward" else (visible <= tile.n,)
    first, second = columns(head, in_one_part=problem.planes > 1)
    fixed = (
        *[stride for x in (*read, *strided) for stride in x.stride()[:3]],
        batch, heads, heads // max(1, key_heads), rows, keys, head, problem.shift, n_tiles,
        tile.m, tile.n, first, second, problem.planes, problem.causal,
        _group(tile, programs), tma, tile.hold, *whole, _precision(problem, tile), is_float32,
    )  # fmt: skip
    programs *= n_tiles
    layout = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        layout["maxnreg"] = tile.registers
    # Held tensors are given as bits. Only the compiler looks at the type, so only here.
    bits = [
        x.view(torch.int16) if tile.hold and i in kernel.held else x for i, x in enumerate(read)
    ]
    if tma:
        sizes = [tile.m if by_queries else tile.n for by_queries in _BY_QUERIES[: len(bits)]]
        sources = [
            TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, size, wide])
            if wide
            else None
            for wide in (first, second)
            for x, size in zip(bits, sizes, strict=True)
        ]
    else:
        sources = [*bits, *(bits if second else [None] * len(bits))]
    compiled = kernel.function[(programs,)](*sources, *rest, scale, *fixed, **layout)
    return Prepared(Launch(kind, tile, compiled), programs, fixed, tma, bool(second))


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _precision(problem: Problem, tile: Tile) -> str:
    """How the compiler makes products of float32; it makes none of 16-bit formats or planes."""
    if problem.q.dtype != torch.float32 or problem.planes > 1 or problem.tf32:
        return "tf32"
    return tile.precision


def _group(tile: Tile, programs: int) -> int:
    """A group of heads must divide them all."""
    group = tile.group
    while programs % group:
        group //= 2
    return group


def _tma_ready(device: torch.device, read: tuple[Tensor, ...]) -> bool:
    """Whether the GPU's copy engine can fetch tiles of all these: Hopper on, rows aligned."""
    if INTERPRETED or _capability(device)[0] < 9:
        return False
    return all(x.numel() and Given.of(x).aligned and _rows_aligned(x) for x in read)


def _rows_aligned(x: Tensor) -> bool:
    steps = x.stride()[:3]
    return 0 not in steps and all(step * x.element_size() % ALIGNMENT == 0 for step in steps)
