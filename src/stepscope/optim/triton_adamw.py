"""AdamW over many tensors in one launch: a table has their addresses, each program updates a block.

A row of the table is one tensor: the addresses of parameter, gradient, both moments and the copy
that matmuls read (0 if there is none), the number of elements, its row of the settings, and the
address of the largest magnitudes of its blocks, for a cast to FP8 (0 if there is none). A piece is
a tensor and a block of it. `update_one` updates one tensor without a table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.optim.adamw import Rule
from stepscope.torch_tools.triton_available import on_its_device

BLOCK = 1024
"""Elements per program, four per thread: few registers, so five programs share an SM and the loads
of one overlap with the stores of another."""
_BLOCK = tl.constexpr(BLOCK)
_ALIGNMENT = 16
_COLUMNS = tl.constexpr(8)
_SETTINGS = tl.constexpr(7)
_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Settings(NamedTuple):
    """Scalars of the update rule, computed in float64."""

    decay: float  # 1 - lr · weight_decay
    mean_share: float  # 1 - β₁
    square_kept: float  # β₂
    square_share: float  # 1 - β₂
    eps: float
    step_size: float  # lr / (1 - β₁ᵗ)
    root_bias: float  # √(1 - β₂ᵗ)

    @classmethod
    def of(cls, rule: Rule, step_size: float, root_bias: float) -> Settings:
        beta1, beta2 = rule.beta1, rule.beta2
        decay = 1 - rule.lr * rule.weight_decay
        return cls(decay, 1 - beta1, beta2, 1 - beta2, rule.eps, step_size, root_bias)


class Row(NamedTuple):
    """One tensor of the table: addresses, number of elements, and row of the settings. `amax` is an
    address too."""

    parameter: int
    gradient: int
    mean: int
    square: int
    copy: int
    elements: int
    settings: int
    amax: int = 0


class TensorDtypes(NamedTuple):
    """Dtypes that all tensors of a launch have in common."""

    parameter: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    copy: torch.dtype | None = None
    """Dtype of the copy that matmuls read; None if there is none."""


@triton.jit
def _address(table, row, COLUMN: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load an address of a row of the table as a pointer to elements of dtype FORMAT."""
    ptr = tl.load(table + row * _COLUMNS + COLUMN).to(tl.pointer_type(FORMAT))
    if ALIGNED:
        # Without the hint the compiler loads one element at a time.
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def _widened(bits):
    """Convert bfloat16 bits to float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_stochastically(x, noise):
    """Round stochastically to a neighbor in bfloat16, such that the expected value is x."""
    bits = x.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    return (bits >> 16).to(tl.uint16)


@triton.jit
def _update(
    tensors,
    settings,
    amax,
    has_amax,
    at,
    inside,
    seed,
    MASKED: tl.constexpr,
    CHANCE: tl.constexpr,
    COPIED: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Apply the rule of `optim.adamw`, in its order, to the elements `at`; blocks are (BLOCK,)."""
    parameter, gradient, mean, square, copy = tensors
    decay, mean_share = tl.load(settings), tl.load(settings + 1)
    square_kept, square_share = tl.load(settings + 2), tl.load(settings + 3)
    eps, step_size, root_bias = tl.load(settings + 4), tl.load(settings + 5), tl.load(settings + 6)
    if MASKED:
        b_p = tl.load(parameter + at, mask=inside)
        b_g = tl.load(gradient + at, mask=inside)
        b_m = tl.load(mean + at, mask=inside)
        b_v = tl.load(square + at, mask=inside)
    else:
        b_p, b_g = tl.load(parameter + at), tl.load(gradient + at)
        b_m, b_v = tl.load(mean + at), tl.load(square + at)
    b_p, b_g = b_p.to(tl.float32), b_g.to(tl.float32)
    if CHANCE:
        b_m, b_v = _widened(b_m), _widened(b_v)
    else:
        b_m, b_v = b_m.to(tl.float32), b_v.to(tl.float32)
    b_p = b_p * decay
    # As torch.lerp does: from the nearer end.
    b_near, b_far = b_m + mean_share * (b_g - b_m), b_g - (b_g - b_m) * (1.0 - mean_share)
    b_m = tl.where(mean_share < 0.5, b_near, b_far)
    b_v = b_v * square_kept + square_share * b_g * b_g
    b_root = tl.math.div_rn(tl.math.sqrt_rn(b_v), tl.zeros_like(b_v) + root_bias) + eps
    b_p = b_p - step_size * tl.math.div_rn(b_m, b_root)
    if CHANCE:
        offs_noise = tl.program_id(0).to(tl.uint32) * _BLOCK
        b_noise = tl.randint(seed, offs_noise + tl.arange(0, _BLOCK)).to(tl.uint32, bitcast=True)
        b_m, b_v = (
            _rounded_stochastically(b_m, b_noise),
            _rounded_stochastically(b_v, b_noise >> 16),
        )
    else:
        b_m, b_v = b_m.to(mean.dtype.element_ty), b_v.to(square.dtype.element_ty)
    b_p = b_p.to(parameter.dtype.element_ty)
    if MASKED:
        tl.store(parameter + at, b_p, mask=inside)
        tl.store(mean + at, b_m, mask=inside)
        tl.store(square + at, b_v, mask=inside)
    else:
        tl.store(parameter + at, b_p)
        tl.store(mean + at, b_m)
        tl.store(square + at, b_v)
    if COPIED:
        b_copy = b_p.to(copy.dtype.element_ty)
        if MASKED:
            tl.store(copy + at, b_copy, mask=inside)
        else:
            tl.store(copy + at, b_copy)
    if AMAX:
        b_abs = tl.abs(b_p.to(tl.float32))
        b_abs = tl.where(b_abs < float("inf"), b_abs, 0.0)
        if MASKED:
            b_abs = tl.where(inside, b_abs, 0.0)
        tl.store(amax, tl.max(b_abs, 0), mask=has_amax)


@triton.jit(do_not_specialize=["seed"])
def adamw_table_kernel(
    table,
    pieces,
    settings,
    seed,
    skip,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHANCE: tl.constexpr,
    COPIED: tl.constexpr,
    AMAX: tl.constexpr,
):
    """Update one piece of one tensor of the table; none if there is a `skip` and it is not zero."""
    pid = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * pid)
    start = tl.load(pieces + 2 * pid + 1).to(tl.int64) * _BLOCK
    parameter = _address(table, row, 0, PARAMETER, ALIGNED)
    gradient = _address(table, row, 1, GRADIENT, ALIGNED)
    mean = _address(table, row, 2, MOMENTS, ALIGNED)
    square = _address(table, row, 3, MOMENTS, ALIGNED)
    copy = _address(table, row, 4, COPY, ALIGNED)
    elements = tl.load(table + row * _COLUMNS + 5)
    own_settings = settings + tl.load(table + row * _COLUMNS + 6) * _SETTINGS
    address = tl.load(table + row * _COLUMNS + 7)
    has_amax = address != 0
    if skip is not None:
        # Without elements every load and store is masked.
        updates = tl.load(skip) == 0
        elements = tl.where(updates, elements, 0)
        has_amax = has_amax & updates
    tensors = (parameter, gradient, mean, square, copy)
    amax = address.to(tl.pointer_type(tl.float32))
    _piece(tensors, own_settings, amax, has_amax, start, elements, seed, CHANCE, COPIED, AMAX)


@triton.jit
def _piece(
    tensors,
    settings,
    amax,
    has_amax,
    start,
    elements,
    seed,
    CHANCE: tl.constexpr,
    COPIED: tl.constexpr,
    AMAX: tl.constexpr,
):
    if AMAX:
        amax += start // _BLOCK
    offs = start + tl.arange(0, _BLOCK)
    # Full blocks need no mask, and only loads without a mask are 16 bytes wide.
    if start + _BLOCK <= elements:
        _update(tensors, settings, amax, has_amax, offs, offs, seed, False, CHANCE, COPIED, AMAX)
    else:
        mask = offs < elements
        _update(tensors, settings, amax, has_amax, offs, mask, seed, True, CHANCE, COPIED, AMAX)


@triton.jit(do_not_specialize=["row"])
def adamw_one_kernel(
    parameter,
    gradient,
    mean,
    square,
    copy,
    settings,
    amax,
    elements,
    row,
    COPIED: tl.constexpr,
    AMAX: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    own_settings = settings + row * _SETTINGS
    tensors = (parameter, gradient, mean, square, copy)
    _piece(tensors, own_settings, amax, True, start, elements, 0, False, COPIED, AMAX)


class Table:
    """Tensors of the same dtypes on one device, ready for a launch."""

    def __init__(
        self, rows: tuple[Row, ...], device: torch.device, like: Table | None = None
    ) -> None:
        """Create the table; the pieces of `like` are reused if its tensors have the same sizes."""
        self.rows = rows
        addresses = 0
        for row in rows:
            addresses |= row.parameter | row.gradient | row.mean | row.square | row.copy
        self._aligned = addresses % _ALIGNMENT == 0
        self._writes_amax = any(row.amax for row in rows)
        same = like is not None and _sizes(like.rows) == _sizes(rows)
        self._pieces: Tensor = like._pieces if same and like else _pieces_of(rows, device)
        self._table = sent(torch.tensor(rows, dtype=torch.int64), device)

    def update(
        self,
        settings: Tensor,
        dtypes: TensorDtypes,
        *,
        stochastic: bool = False,
        seed: int = 0,
        skip: Tensor | None = None,
    ) -> None:
        """Update all tensors, unless `skip` is not zero."""
        moments = tl.uint16 if stochastic else _DTYPES[dtypes.moments]
        adamw_table_kernel[(len(self._pieces),)](
            self._table,
            self._pieces,
            settings,
            seed,
            skip,
            PARAMETER=_DTYPES[dtypes.parameter],
            GRADIENT=_DTYPES[dtypes.gradient],
            MOMENTS=moments,
            COPY=_DTYPES[dtypes.copy or dtypes.parameter],
            ALIGNED=self._aligned,
            CHANCE=stochastic,
            COPIED=dtypes.copy is not None,
            AMAX=self._writes_amax,
            num_warps=8,
        )


def _sizes(rows: tuple[Row, ...]) -> list[int]:
    return [row.elements for row in rows]


def _pieces_of(rows: tuple[Row, ...], device: torch.device) -> Tensor:
    blocks = torch.tensor([-(-row.elements // BLOCK) for row in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    firsts = (blocks.cumsum(0) - blocks)[owners]
    pieces = torch.stack((owners, torch.arange(len(owners)) - firsts), dim=1)
    return sent(pieces.to(torch.int32), device)


@on_its_device
def update_one(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None,
    settings: Tensor,
    row: int,
    amax: Tensor | None = None,  # (blocks,)
) -> None:
    """Update one tensor with the settings of that row."""
    elements = parameter.numel()
    adamw_one_kernel[(triton.cdiv(elements, BLOCK),)](
        parameter,
        gradient,
        mean,
        square,
        copy,
        settings,
        amax,
        elements,
        row,
        COPIED=copy is not None,
        AMAX=amax is not None,
        num_warps=8,
    )


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without synchronization."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
