"""Launch of the Triton attention kernels: grids, tiles, tensor descriptors and a launch cache.

All functions take (B, H, M, D) queries and (B, H/G, N, D) keys and values whose last dimension is
contiguous; `ops.py` brings inputs into that layout.

The first call with some arguments goes through Triton's JIT dispatch, which inspects each of them;
later calls with the same arguments launch the compiled kernel directly. For short sequences
dispatch is the larger part of the time. The cache key is `Problem`: the settings, and shape,
strides, dtype and alignment of every tensor that the caller passes. Tensors allocated here
(outputs, planes) follow from those and are not in the key: allocate nothing here whose layout
depends on more.
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
from stepscope.attention.triton.specialized import PreparedForward, first_launch, refuses
from stepscope.torch_tools.kernel_compilation import NotLaunchedError, compiles_only
from stepscope.torch_tools.triton_available import (
    is_interpreted,
    nvidia_capability,
    on_its_device,
    tf32_is_enabled,
)

INTERPRETED = is_interpreted()
_INTERPRETER_TILE = Tile(32, 32, 4, 1)
ALIGNMENT = 16
PLANES = 3
# 3 × 8 bits are the full significand of float32; the interpreter, which does not support bfloat16,
# uses float16 with 3 × 11 bits.
_PLANE_DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
# Grid step relative to the largest power of two of a row: the finest that one plane can represent.
_PLANE_STEP = torch.finfo(_PLANE_DTYPE).eps
_PLANE_ALIGNMENT = 8
_SPLIT_ROWS = 32
_MAX_CACHED = 4096


class Given(NamedTuple):
    """The properties of an input tensor that a launch depends on, except its address."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool
    """Its address is a multiple of 16 bytes: Triton then compiles wide loads for this tensor, and
    TMA requires it."""

    @classmethod
    def of(cls, x: Tensor) -> Given:
        return cls(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)


class Rules(NamedTuple):
    """Rules as the kernels take them; None where there is none. Tensors are contiguous."""

    key_intervals: Tensor | None = None
    """First visible key of each query and the one after the last, int32 (1 or B, 2, M)."""
    query_intervals: Tensor | None = None
    """First query that sees each key and the one after the last, int32 (1 or B, 2, N); read by the
    backward pass only."""
    slopes: Tensor | None = None
    """ALiBi slope of each head, float32 (H,)."""
    sinks: Tensor | None = None
    """Sink of each head, float32 (H,)."""
    seeds: Tensor | None = None
    """Seed and offset of the dropout, int64 (2,)."""
    softcap: float | None = None
    dropout: float | None = None

    @property
    def by_query(self) -> tuple[Tensor | None, ...]:
        """The tensors of kernels whose programs work on queries."""
        return self.key_intervals, self.slopes, self.sinks, self.seeds

    @property
    def by_key(self) -> tuple[Tensor | None, ...]:
        return self.query_intervals, self.slopes, self.seeds

    @property
    def numbers(self) -> tuple[float | None, float | None]:
        return self.softcap, self.dropout


_NO_RULES = Rules()


class Problem(NamedTuple):
    """Key of the launch cache: equal problems use the same kernels and fixed arguments."""

    causal: bool
    shift: int
    device: torch.device
    tf32: bool
    """float32 matmuls use TF32."""
    planes: int
    """Number of 16-bit planes into which the tensors that are read by tiles are split."""
    given: tuple[Given, ...]
    """q, k, v; for the backward pass also the gradient, the output and its log-sum-exp."""
    rules: tuple[object, ...] = ()
    """`Given` of each tensor of the rules or None, and their numbers; empty without rules."""

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, ...],
        read: tuple[Tensor, ...],
        causal: bool,
        shift: int,
        rules: Rules = _NO_RULES,
    ) -> Problem:
        """Create the key; `read` are the tensors that are read by tiles, or their planes."""
        q = tensors[0]
        return cls(
            bool(causal),
            shift,
            q.device,
            q.dtype == torch.float32 and tf32_is_enabled(),
            1 if read[0] is q else PLANES,
            # Not by the constructor of the named tuple, which is a Python function.
            tuple(
                [
                    tuple.__new__(
                        Given, (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)
                    )
                    for x in tensors
                ]
            ),
            ()
            if rules is _NO_RULES
            else (*[None if x is None else Given.of(x) for x in rules[:-2]], *rules.numbers),
        )

    @property
    def q(self) -> Given:
        return self.given[0]

    @property
    def k(self) -> Given:
        return self.given[1]


Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From q, k and v to the output and the log-sum-exp of each row."""
Launches = dict[tuple[Pass, Tile | None], Prepared | PreparedForward]
_PREPARED: dict[Problem, Launches] = {}
_SPLITTERS: dict[tuple[torch.device, Given], Callable[..., None]] = {}
_forced: dict[Pass, Tile] = {}
_record: list[Launch] | None = None


@contextmanager
def forced_tiles(chosen: Mapping[Pass, Tile]) -> Iterator[None]:
    """Use exactly these tiles for the named passes; a tile that does not fit raises."""
    global _forced
    before, _forced = _forced, dict(chosen)
    try:
        yield
    finally:
        _forced = before


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record every kernel that is launched within the context in the returned list."""
    global _record
    before, _record = _record, []
    try:
        yield _record
    finally:
        _record = before


@on_its_device
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    shift: int,
    rules: Rules = _NO_RULES,
) -> tuple[Tensor, Tensor]:
    """Return the output, shaped like q, and the log-sum-exp of each row in float32."""
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], device=q.device, dtype=torch.float32)
    if q.numel():
        read = readable(q, k, v)
        problem = Problem.of((q, k, v), read, causal, shift, rules)
        rest = (out, lse, *rules.by_query)
        run_pass("forward", problem, _launches(problem), read, rest, (out,), scale, rules)
    return out, lse


def bound_forward(
    q: Tensor, general: Forward, *, scale: float, causal: bool, shift: int
) -> Forward:
    """Return `forward` for inputs that have the shapes, dtypes and device of one call with these
    queries: strides alone are the key of its cache. `general` computes inputs with strides that are
    new, with addresses that are not aligned, while another device is current, and in contexts of
    this module."""
    if INTERPRETED or q.dtype == torch.float32 or not q.numel():
        return general
    known: dict[tuple[tuple[int, ...], ...], Prepared | PreparedForward] = {}
    scale, rows, device, index = float(scale), tuple(q.shape[:-1]), q.device, q.device.index
    on_gpu, absent = q.is_cuda, _NO_RULES.by_query

    def first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outputs = general(q, k, v)
        launches = _PREPARED.get(Problem.of((q, k, v), (q, k, v), causal, shift), {})
        prepared = launches.get(("forward", None))
        if prepared is not None and all(x.data_ptr() % ALIGNMENT == 0 for x in (q, k, v)):
            if len(known) >= _MAX_CACHED:
                known.clear()
            known[q.stride(), k.stride(), v.stride()] = prepared
        return outputs

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        prepared = known.get((q.stride(), k.stride(), v.stride()))
        if prepared is None:
            return first(q, k, v)
        if (
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
            or _forced
            or _record is not None
            or (on_gpu and torch._C._cuda_getDevice() != index)
        ):
            return general(q, k, v)
        out = torch.empty_like(q)
        lse = torch.empty(rows, device=device, dtype=torch.float32)
        prepared.run((q, k, v), (out, lse, *absent), scale)
        return out, lse

    return run


@on_its_device
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    shift: int,
    rules: Rules = _NO_RULES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and delta, rowsum(dO∘O). The rows of `out` and all of
    `lse` must be contiguous."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(lse)
    read = readable(q, k, v, grad)
    problem = Problem.of((q, k, v, grad, out, lse), read, causal, shift, rules)
    launches = _launches(problem)
    delta = torch.empty_like(lse)
    # Only the float32 kernels use these two.
    factor, ds_sum = delta, delta
    if q.dtype == torch.float32:
        factor, ds_sum = torch.empty_like(lse), torch.empty_like(lse)
    of_query = (out, lse, delta, factor, ds_sum, dq, *rules.by_query)
    run_pass("query", problem, launches, read, of_query, (out, dq), scale, rules)
    of_keys = (lse, delta, factor, ds_sum, dk, dv, *rules.by_key)
    run_pass("key_value", problem, launches, read, of_keys, (dk, dv), scale, rules)
    return dq, dk, dv, delta


def readable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as the kernels read them by tiles: 16-bit dtypes unchanged, float32 split
    into planes where the tile calls for it."""
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
    """Split (B, H, M, D) of float32 into (3 B, H, M, D) of a 16-bit dtype, D padded with zeros so
    that rows are aligned."""
    batch, heads, rows, head = x.shape
    wide = triton.cdiv(head, _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT
    planes = torch.empty((PLANES * batch, heads, rows, wide), device=x.device, dtype=_PLANE_DTYPE)
    count = batch * heads * rows
    if not count:
        return planes
    programs = triton.cdiv(count, _SPLIT_ROWS)
    arguments = (
        x,
        planes,
        *x.stride()[:3],
        heads,
        rows,
        head,
        count,
        wide,
        _PLANE_STEP,
        _SPLIT_ROWS,
        triton.next_power_of_2(wide),
    )
    key = (x.device, Given.of(x))
    start = _SPLITTERS.get(key)
    if start is None:
        compiled = split_kernel[(programs,)](*arguments)
        if not INTERPRETED and not compiles_only():
            if len(_SPLITTERS) >= _MAX_CACHED:
                _SPLITTERS.clear()
            _SPLITTERS[key] = starter(compiled)
    else:
        start(programs, torch._C._cuda_getCurrentRawStream(x.device.index), *arguments)
    return planes


class _Kernel(NamedTuple):
    function: Any
    in_registers: tuple[int, ...]
    """Indices of the tensors read by tiles that stay in registers if `Tile.hold` is set."""
    by_keys: bool
    """A program works on a tile of keys, not of queries."""


_KERNELS: dict[Pass, _Kernel] = {
    "forward": _Kernel(forward_kernel, (0,), by_keys=False),
    "query": _Kernel(query_kernel, (0, 3), by_keys=False),
    "key_value": _Kernel(key_value_kernel, (1, 2), by_keys=True),
}
_BY_QUERIES = (True, False, False, True)
"""For each of q, k, v, grad: whether its tiles are tiles of query rows."""


def _launches(problem: Problem) -> Launches:
    """Return the prepared launches of a problem. Looked up once for both kernels of a backward
    pass: the hash of a problem takes about as long as a launch."""
    launches = _PREPARED.get(problem)
    if launches is None:
        if len(_PREPARED) >= _MAX_CACHED:
            _PREPARED.clear()
        launches = _PREPARED[problem] = {}
    return launches


def run_pass(
    kind: Pass,
    problem: Problem,
    launches: Launches,
    read: tuple[Tensor, ...],
    rest: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    scale: float,
    rules: Rules = _NO_RULES,
) -> None:
    """Launch one kernel. `read` are its tensors that are read by tiles, `rest` the others,
    `strided` those of `rest` whose strides it takes."""
    # Triton would specialize the kernel on an int, and cached launches serve every scale.
    scale = float(scale)
    key = (kind, _forced.get(kind) if _forced else None)
    prepared = launches.get(key)
    if prepared is None or INTERPRETED:
        try:
            prepared = _fitting_launch(kind, problem, key[1], read, rest, strided, scale, rules)
        except NotLaunchedError:
            return
        launches[key] = prepared
    else:
        prepared.run(read, rest, scale)
    if _record is not None:
        _record.append(prepared.launch)


def _fitting_launch(
    kind: Pass,
    problem: Problem,
    forced: Tile | None,
    read: tuple[Tensor, ...],
    rest: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    scale: float,
    rules: Rules,
) -> Prepared | PreparedForward:
    """Launch with the best tile that fits into this GPU's shared memory and registers, or the
    forward kernel for Hopper."""
    if (
        kind == "forward"
        and not forced
        and problem.planes == 1
        and why_plain_forward(
            *read, causal=problem.causal, shift=problem.shift, rules=rules is not _NO_RULES
        )
        is None
    ):
        out, lse = rest[:2]
        assert out is not None
        assert lse is not None
        specialized = first_launch(
            read, out, lse, scale=scale, causal=problem.causal, shift=problem.shift
        )
        if specialized is not None:
            return specialized
    if forced:
        choices = [forced]
    elif INTERPRETED:
        choices = [_INTERPRETER_TILE]
    else:
        head, width = problem.q.shape[-1], problem.q.dtype.itemsize
        capability = _capability(problem.device)
        choices = tiles(kind, head, width, capability, causal=problem.causal)
    for tile in choices[:-1]:
        try:
            return _first_launch(kind, problem, read, rest, strided, scale, rules, tile)
        except OutOfResources:
            continue
    return _first_launch(kind, problem, read, rest, strided, scale, rules, choices[-1])


def why_plain_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, shift: int, rules: bool
) -> str | None:
    """Return why the plain forward kernel runs and not the one for Hopper, or None."""
    if INTERPRETED or q.device.type != "cuda":
        return "it runs on GPUs only"
    aligned = _tma_ready(q.device, (q, k, v))
    return refuses(q, k, causal=causal, shift=shift, aligned=aligned, rules=rules)


def _first_launch(
    kind: Pass,
    problem: Problem,
    read: tuple[Tensor, ...],
    rest: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    scale: float,
    rules: Rules,
    tile: Tile,
) -> Prepared:
    """Launch through Triton's JIT dispatch, which compiles the kernel if needed."""
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
    intervals = rules.query_intervals if kernel.by_keys else rules.key_intervals
    causal_only = problem.causal and intervals is None
    visible = min(keys, rows + problem.shift) if causal_only else keys
    # With a sink, the probabilities of the keys do not sum to one.
    in_one_tile = () if kind == "forward" else (visible <= tile.n and rules.sinks is None,)
    first, second = columns(head, in_one_part=problem.planes > 1)
    fixed = (
        *[stride for x in (*read, *strided) for stride in x.stride()[:3]],
        batch,
        heads,
        heads // max(1, key_heads),
        rows,
        keys,
        head,
        problem.shift,
        n_tiles,
        None if intervals is None else _batch_stride(intervals),
        *rules.numbers,
        tile.m,
        tile.n,
        first,
        second,
        problem.planes,
        problem.causal,
        _group(tile, programs),
        tma,
        tile.hold,
        *in_one_tile,
        _precision(problem, tile),
        is_float32,
    )
    programs *= n_tiles
    layout = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        layout["maxnreg"] = tile.registers
    # Tensors that stay in registers are passed as int16 bits. Only the compiler looks at the dtype,
    # so only the first launch needs it.
    bits = [
        x.view(torch.int16) if tile.hold and i in kernel.in_registers else x
        for i, x in enumerate(read)
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
    if compiles_only():
        raise NotLaunchedError
    parts, absent = (2, 0) if second else (1, len(read))
    launch = Launch(kind, tile, compiled)
    return Prepared(launch, programs, fixed, tma, parts=parts, absent=absent)


_capability = lru_cache(nvidia_capability)


def _batch_stride(intervals: Tensor) -> int:
    """Return the stride of the batch; 0 if all batches share the intervals."""
    return 0 if intervals.shape[0] == 1 else intervals.stride(0)


def _precision(problem: Problem, tile: Tile) -> str:
    """Return the `input_precision` of float32 matmuls; 16-bit dtypes and planes do not use it."""
    if problem.q.dtype != torch.float32 or problem.planes > 1 or problem.tf32:
        return "tf32"
    return tile.precision


def _group(tile: Tile, programs: int) -> int:
    """Return the largest power-of-two fraction of the tile's group that divides the heads."""
    group = tile.group
    while programs % group:
        group //= 2
    return group


def _tma_ready(device: torch.device, read: tuple[Tensor, ...]) -> bool:
    """Return whether TMA can load tiles of all these tensors: Hopper or later, rows aligned."""
    if INTERPRETED or _capability(device)[0] < 9:
        return False
    return all(x.numel() and Given.of(x).aligned and _rows_aligned(x) for x in read)


def _rows_aligned(x: Tensor) -> bool:
    steps = x.stride()[:3]
    return 0 not in steps and all(step * x.element_size() % ALIGNMENT == 0 for step in steps)
