"""AdamW over many tensors in one launch: a table says where they are, each program takes a piece.

A row of the table is one tensor: the addresses of parameter, gradient, both moments and the copy
that products read (0 where there is none), the number of elements, and which row of the settings is
its own. A piece is a tensor and a block of it. `update_one` takes one tensor without a table.
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
"""Four elements for each thread of a program: few registers, so five programs share a processor and
one's loads hide behind another's stores."""
_BLOCK = tl.constexpr(BLOCK)
_ALIGNMENT = 16
_COLUMNS = tl.constexpr(7)
_SETTINGS = tl.constexpr(7)
_FORMATS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Settings(NamedTuple):
    """What the update rule takes beside tensors, worked out on the host in double precision."""

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
    parameter: int
    gradient: int
    mean: int
    square: int
    copy: int
    elements: int
    settings: int


class TensorDtypes(NamedTuple):
    parameter: torch.dtype
    gradient: torch.dtype
    moments: torch.dtype
    copy: torch.dtype | None = None
    """Of the copy that products read; None where there is none."""


@triton.jit
def _address(table, row, COLUMN: tl.constexpr, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    where = tl.load(table + row * _COLUMNS + COLUMN).to(tl.pointer_type(FORMAT))
    if ALIGNED:
        # Without it the compiler loads one element at a time.
        where = tl.multiple_of(where, 16)
    return where


@triton.jit
def _widened(bits):
    """bfloat16, read as its bits, in float32."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_by_chance(x, noise):
    """To the neighbour above or below in bfloat16, the nearer one more often: the mean is x."""
    bits = x.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    return (bits >> 16).to(tl.uint16)


@triton.jit
def _update(
    parameter, gradient, mean, square, copy, settings, at, inside, seed,
    MASKED: tl.constexpr, CHANCE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """The rule of `optim.adamw`, in its order, for the elements `at`."""
    decay, mean_share = tl.load(settings), tl.load(settings + 1)
    square_kept, square_share = tl.load(settings + 2), tl.load(settings + 3)
    eps, step_size, root_bias = tl.load(settings + 4), tl.load(settings + 5), tl.load(settings + 6)
    if MASKED:
        p = tl.load(parameter + at, mask=inside)
        g = tl.load(gradient + at, mask=inside)
        m = tl.load(mean + at, mask=inside)
        s = tl.load(square + at, mask=inside)
    else:
        p, g = tl.load(parameter + at), tl.load(gradient + at)
        m, s = tl.load(mean + at), tl.load(square + at)
    p, g = p.to(tl.float32), g.to(tl.float32)
    if CHANCE:
        m, s = _widened(m), _widened(s)
    else:
        m, s = m.to(tl.float32), s.to(tl.float32)
    p = p * decay
    # As torch's lerp: from the nearer end.
    near, far = m + mean_share * (g - m), g - (g - m) * (1.0 - mean_share)
    m = tl.where(mean_share < 0.5, near, far)
    s = s * square_kept + square_share * g * g
    root = tl.math.div_rn(tl.math.sqrt_rn(s), tl.zeros_like(s) + root_bias) + eps
    p = p - step_size * tl.math.div_rn(m, root)
    if CHANCE:
        piece = tl.program_id(0).to(tl.uint32) * _BLOCK
        noise = tl.randint(seed, piece + tl.arange(0, _BLOCK)).to(tl.uint32, bitcast=True)
        m, s = _rounded_by_chance(m, noise), _rounded_by_chance(s, noise >> 16)
    else:
        m, s = m.to(mean.dtype.element_ty), s.to(square.dtype.element_ty)
    p = p.to(parameter.dtype.element_ty)
    if MASKED:
        tl.store(parameter + at, p, mask=inside)
        tl.store(mean + at, m, mask=inside)
        tl.store(square + at, s, mask=inside)
    else:
        tl.store(parameter + at, p)
        tl.store(mean + at, m)
        tl.store(square + at, s)
    if COPIED:
        narrow = p.to(copy.dtype.element_ty)
        if MASKED:
            tl.store(copy + at, narrow, mask=inside)
        else:
            tl.store(copy + at, narrow)


@triton.jit(do_not_specialize=["seed"])
def adamw_table_kernel(
    table, pieces, settings, seed,
    PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, MOMENTS: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, CHANCE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(pieces + 2 * number)
    start = tl.load(pieces + 2 * number + 1).to(tl.int64) * _BLOCK
    parameter = _address(table, row, 0, PARAMETER, ALIGNED)
    gradient = _address(table, row, 1, GRADIENT, ALIGNED)
    mean = _address(table, row, 2, MOMENTS, ALIGNED)
    square = _address(table, row, 3, MOMENTS, ALIGNED)
    copy = _address(table, row, 4, COPY, ALIGNED)
    elements = tl.load(table + row * _COLUMNS + 5)
    own = settings + tl.load(table + row * _COLUMNS + 6) * _SETTINGS
    _piece(parameter, gradient, mean, square, copy, own, start, elements, seed, CHANCE, COPIED)


@triton.jit
def _piece(
    parameter, gradient, mean, square, copy, settings, start, elements, seed,
    CHANCE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, _BLOCK)
    # Whole blocks need no mask, and only without one do loads take 16 bytes at once.
    if start + _BLOCK <= elements:
        _update(
            parameter, gradient, mean, square, copy, settings, at, at, seed, False, CHANCE, COPIED
        )
    else:
        inside = at < elements
        _update(
            parameter, gradient, mean, square, copy, settings, at, inside, seed,
            True, CHANCE, COPIED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["row"])
def adamw_one_kernel(
    parameter, gradient, mean, square, copy, settings, elements, row, COPIED: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * _BLOCK
    own = settings + row * _SETTINGS
    _piece(parameter, gradient, mean, square, copy, own, start, elements, 0, False, COPIED)


class Table:
    """Tensors of the same formats on one device, ready for a launch."""

    def __init__(
        self, rows: tuple[Row, ...], device: torch.device, like: Table | None = None
    ) -> None:
        """`like` has the pieces already where its tensors have the same sizes."""
        self.rows = rows
        addresses = 0
        for row in rows:
            addresses |= row.parameter | row.gradient | row.mean | row.square | row.copy
        self._aligned = addresses % _ALIGNMENT == 0
        same = like is not None and _sizes(like.rows) == _sizes(rows)
        self._pieces: Tensor = like._pieces if same and like else _cut(rows, device)
        self._table = sent(torch.tensor(rows, dtype=torch.int64), device)

    def update(
        self, settings: Tensor, formats: TensorDtypes, *, by_chance: bool, seed: int
    ) -> None:
        moments = tl.uint16 if by_chance else _FORMATS[formats.moments]
        adamw_table_kernel[(len(self._pieces),)](
            self._table, self._pieces, settings, seed,
            PARAMETER=_FORMATS[formats.parameter], GRADIENT=_FORMATS[formats.gradient],
            MOMENTS=moments, COPY=_FORMATS[formats.copy or formats.parameter],
            ALIGNED=self._aligned, CHANCE=by_chance, COPIED=formats.copy is not None, num_warps=8,
        )  # fmt: skip


def _sizes(rows: tuple[Row, ...]) -> list[int]:
    return [row.elements for row in rows]


def _cut(rows: tuple[Row, ...], device: torch.device) -> Tensor:
    blocks = torch.tensor([-(-row.elements // BLOCK) for row in rows])
    owners = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    firsts = (blocks.cumsum(0) - blocks)[owners]
    pieces = torch.stack((owners, torch.arange(len(owners)) - firsts), dim=1)
    return sent(pieces.to(torch.int32), device)


@on_its_device
def update_one(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, copy: Tensor | None,
    settings: Tensor, row: int,
) -> None:  # fmt: skip
    """One tensor, with the settings of that row."""
    elements = parameter.numel()
    adamw_one_kernel[(triton.cdiv(elements, BLOCK),)](
        parameter, gradient, mean, square, copy, settings, elements, row,
        COPIED=copy is not None, num_warps=8,
    )  # fmt: skip


def sent(host: Tensor, device: torch.device) -> Tensor:
    """On the device without waiting for it."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
