"""A compiled kernel started again without Triton's front door.

Triton looks at every argument at every call and describes every tensor to the GPU's copy engine
anew; both depend on nothing but shapes, strides and addresses. Here the first is left out and the
second kept by address: an allocator gives the same addresses again and again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.attention.tiles import Pass, Tile

_MOST_DESCRIBED = 4096


class Launch(NamedTuple):
    """One kernel that ran."""

    kind: Pass
    tile: Tile
    kernel: Any
    """Triton's compiled kernel (`n_regs`, `n_spills`, `metadata.shared`); None when interpreted."""


class Prepared:
    """A compiled kernel with the arguments that the problem fixes."""

    def __init__(
        self, launch: Launch, programs: int, fixed: tuple[Any, ...], tma: bool, two_parts: bool
    ) -> None:
        self.launch = launch
        self._programs = programs
        self._fixed = fixed
        self._two_parts = two_parts
        self._described: dict[tuple[int, int], list[Any]] = {}
        self._describe = _describer(launch.kernel) if tma else None
        if launch.kernel is not None:
            self._start = starter(launch.kernel, bare=self._describe is not None)
            self._tma = tma

    def run(self, read: tuple[Tensor, ...], rest: tuple[Tensor, ...], scale: float) -> None:
        """`read` are fetched by tiles, `rest` are the kernel's other tensors."""
        parts = 2 if self._two_parts else 1
        sources: list[Any] = []
        for part in range(parts):
            for place, x in enumerate(read):
                if self._describe is not None:
                    sources += self._description(part * len(read) + place, x)
                else:
                    sources.append(_descriptor(x) if self._tma else x)
        if parts == 1:
            sources += _NOTHING[: len(read)]
        device = read[0].device.index
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._start(self._programs, stream, *sources, *rest, scale, *self._fixed)

    def _description(self, place: int, x: Tensor) -> list[Any]:
        # Shape, strides, dtype and device of x are those of the problem this was prepared for.
        key = (place, x.data_ptr())
        held = self._described.get(key)
        if held is None:
            assert self._describe is not None
            if len(self._described) >= _MOST_DESCRIBED:
                self._described.clear()
            held = self._described[key] = self._describe(place, x)
        return held


_NOTHING = [None] * 4


def starter(compiled: Any, *, bare: bool = False) -> Callable[..., None]:
    """(programs, stream, arguments) into Triton's launcher of that kernel; a bare one takes tensors
    as `_describer` gives them."""
    run = compiled.run
    if bare:
        run = copy.copy(run)
        run.launch = _below_descriptors(compiled)

    def start(programs: int, stream: int, *arguments: Any) -> None:
        run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments,
        )  # fmt: skip

    return start


def _below_descriptors(compiled: Any) -> Callable[..., None] | None:
    """Triton's launcher below the layer that describes tensors, if it is built as we know it."""
    launch = getattr(compiled.run, "launch", None)
    if not inspect.isfunction(launch):
        return None
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def _describer(compiled: Any) -> Callable[[int, Tensor], list[Any]] | None:
    """Triton's own description of the tensor in a place, or None where Triton is built otherwise;
    then every launch describes its tensors, which is slower and no less right."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError:
        return None
    layouts = getattr(compiled.metadata, "tensordesc_meta", None)
    if not layouts or _below_descriptors(compiled) is None:
        return None

    def describe(place: int, tensor: Tensor) -> list[Any]:
        made: list[Any] = make_tensordesc_arg(_descriptor(tensor), layouts[place])
        return made

    return describe


def _descriptor(tensor: Tensor) -> TensorDescriptor:
    """Past the constructor, whose checks were made when the kernel was compiled, and without the
    sizes of tiles, which the kernel knows."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = {
        "base": tensor, "shape": tensor.shape, "strides": tensor.stride(), "padding": "zero",
    }  # fmt: skip
    return made
