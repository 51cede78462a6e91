"""Launch of the warp-specialized forward kernel: whether it can run, its first launch, its tile
order in memory."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from stepscope.attention.specialized import (
    ROWS,
    Sizes,
    Variant,
    forward_kernel_of,
    refusal,
    tile_order,
)
from stepscope.attention.tiles import Tile
from stepscope.attention.triton.replay import Launch, Prepared
from stepscope.torch_tools.kernel_compilation import NotLaunchedError, compiles_only
from stepscope.torch_tools.triton_available import nvidia_capability

_ORDERS: dict[tuple[torch.device, Sizes, Variant], Tensor] = {}
"""Tile orders on the GPU, a few kilobytes each. Never cleared: a captured graph reads them."""
_failures: list[str] = []
"""Why the kernel could not be compiled, if it could not."""


@lru_cache
def _kernel_module() -> ModuleType | str:
    """Import the kernel, or return why this version of Triton lacks what it needs."""
    try:
        from stepscope.attention.triton import specialized_forward
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} has another Gluon: {error}"
    return specialized_forward


@lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Return major compute capability and multiprocessors."""
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    return nvidia_capability(device)[0], programs


def sizes_of(q: Tensor, k: Tensor, causal: bool, shift: int) -> Sizes:
    batch, heads, rows, head = q.shape
    return Sizes(batch, heads, k.shape[1], rows, k.shape[2], head, causal, shift if causal else 0)


def refuses(
    q: Tensor, k: Tensor, *, causal: bool, shift: int, aligned: bool, rules: bool
) -> str | None:
    """Return why the plain forward kernel runs for inputs (B, H, M, D) on a GPU, or None."""
    capability, programs = _device(q.device)
    reason = refusal(
        sizes_of(q, k, causal, shift),
        element_bytes=q.element_size(),
        capability=capability,
        programs=programs,
        aligned=aligned,
        rules=rules,
    )
    if reason is not None:
        return reason
    module = _kernel_module()
    return module if isinstance(module, str) else next(iter(_failures), None)


class PreparedForward:
    """The compiled kernel with the arguments that follow from the problem, called like the plain
    one."""

    def __init__(self, prepared: Prepared, order: Tensor) -> None:
        self.launch = prepared.launch
        self._prepared = prepared
        self._order = order

    def run(self, read: tuple[Tensor, ...], rest: tuple[Tensor | None, ...], scale: float) -> None:
        out, lse = rest[:2]
        assert out is not None
        self._prepared.run((*read, out), (lse, self._order), scale)


def first_launch(
    read: tuple[Tensor, ...],
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    shift: int,
    variant: Variant | None = None,
    launch: bool = True,
) -> PreparedForward | None:
    """Launch the kernel through Triton's JIT dispatch, which compiles it if needed. Return None if
    the rule has no variant, it cannot be compiled, or a graph is being captured and the order of
    the tiles is not in memory yet. Without `launch` it is compiled only."""
    q, k, v = read
    sizes = sizes_of(q, k, causal, shift)
    if variant is None:
        kernel = forward_kernel_of(sizes)
        variant = None if kernel is None else kernel.variant
    order = None if variant is None else _order_of(q.device, sizes, variant)
    if variant is None or order is None:
        return None
    module: Any = _kernel_module()
    programs = _programs(q.device, sizes, variant)
    fixed = (
        sizes.heads,
        sizes.heads // sizes.key_heads,
        sizes.rows,
        sizes.keys,
        sizes.shift,
        sizes.tiles(variant),
        *module.constants(variant, causal=causal, masked=sizes.keys % variant.n != 0).values(),
    )
    sources = [
        module.describe(x, rows)
        for x, rows in ((q, ROWS), (k, variant.n), (v, variant.n), (out, ROWS))
    ]
    function = module.specialized_forward_kernel
    arguments = (*sources, lse, order, float(scale), *fixed)
    try:
        if launch:
            compiled = function[(programs,)](*arguments, num_warps=4)
        else:
            compiled = function.warmup(*arguments, num_warps=4, grid=(programs,))
    except (CompilationError, OutOfResources) as error:
        _failures.append(f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}")
        return None
    if compiles_only():
        raise NotLaunchedError
    tile = Tile(variant.rows, variant.n, 4 * variant.groups + 1, variant.stages)
    return PreparedForward(
        Prepared(Launch("forward", tile, compiled), programs, fixed, tma=True), order
    )


def _programs(device: torch.device, sizes: Sizes, variant: Variant) -> int:
    total = sizes.batch * sizes.heads * sizes.tiles(variant)
    return min(total, _device(device)[1]) if variant.persistent else total


def _order_of(device: torch.device, sizes: Sizes, variant: Variant) -> Tensor | None:
    key = (device, sizes, variant)
    order = _ORDERS.get(key)
    if order is None and not torch.cuda.is_current_stream_capturing():
        numbers = tile_order(sizes, variant, _programs(device, sizes, variant))
        # One tensor for all threads: it is never freed.
        order = _ORDERS.setdefault(key, torch.tensor(numbers, device=device, dtype=torch.int32))
    return order
