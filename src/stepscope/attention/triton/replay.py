"""Launch of a compiled kernel without Triton's JIT dispatch.

At every call Triton inspects every argument and creates every TMA descriptor, although both depend
only on shapes, strides and addresses. Here the inspection is skipped and descriptors are cached by
address: the caching allocator returns the same addresses again and again.
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

_MAX_DESCRIPTORS = 4096


class Launch(NamedTuple):
    """One kernel launch."""

    kind: Pass
    tile: Tile
    kernel: Any
    """Triton's compiled kernel (`n_regs`, `n_spills`, `metadata.shared`); None when interpreted."""


class Prepared:
    """A compiled kernel with the arguments that follow from the problem."""

    def __init__(
        self,
        launch: Launch,
        programs: int,
        fixed: tuple[Any, ...],
        tma: bool,
        *,
        parts: int = 1,
        absent: int = 0,
    ) -> None:
        """`parts` are the column parts in which the kernel reads each tensor; `absent` is the
        number of its arguments for a second part that it does not read."""
        self.launch = launch
        self._programs = programs
        self._fixed = fixed
        self._parts = parts
        self._absent = (None,) * absent
        self._sources: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._descriptors: dict[tuple[int, int], list[Any]] = {}
        self._describe = _describer(launch.kernel) if tma else None
        if launch.kernel is not None:
            self._start = starter(launch.kernel, bare=self._describe is not None)
            self._tma = tma

    def run(self, read: tuple[Tensor, ...], rest: tuple[Tensor | None, ...], scale: float) -> None:
        """Launch the kernel. `read` are its tensors that are read by tiles, `rest` the others."""
        sources: tuple[Any, ...] | None
        if self._describe is None:
            described = [_descriptor(x) for x in read] if self._tma else read
            sources = (*[x for _ in range(self._parts) for x in described], *self._absent)
        else:
            pointers = tuple([x.data_ptr() for x in read])
            sources = self._sources.get(pointers)
            if sources is None:
                sources = self._described(read, pointers, self._describe)
        stream = torch._C._cuda_getCurrentRawStream(read[0].get_device())
        self._start(self._programs, stream, *sources, *rest, scale, *self._fixed)

    def _described(
        self,
        read: tuple[Tensor, ...],
        pointers: tuple[int, ...],
        describe: Callable[[int, Tensor], list[Any]],
    ) -> tuple[Any, ...]:
        """Return the arguments for tensors at these addresses. Their shapes, strides, dtype and
        device are those of the problem this was prepared for."""
        arguments: list[Any] = []
        for index, (x, pointer) in enumerate([*zip(read, pointers, strict=True)] * self._parts):
            descriptor = self._descriptors.get((index, pointer))
            if descriptor is None:
                if len(self._descriptors) >= _MAX_DESCRIPTORS:
                    self._descriptors.clear()
                descriptor = self._descriptors[index, pointer] = describe(index, x)
            arguments += descriptor
        if len(self._sources) >= _MAX_DESCRIPTORS:
            self._sources.clear()
        sources = self._sources[pointers] = (*arguments, *self._absent)
        return sources


def starter(compiled: Any, *, bare: bool = False) -> Callable[..., None]:
    """Return a function of (programs, stream, arguments) that calls Triton's launcher of that
    kernel. A `bare` one takes descriptors as `_describer` creates them."""
    run = compiled.run
    if bare:
        run = copy.copy(run)
        run.launch = _below_descriptors(compiled)
    # After `run`, which loads the kernel.
    function, metadata = compiled.function, compiled.packed_metadata

    def start(programs: int, stream: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return start


def _below_descriptors(compiled: Any) -> Callable[..., None] | None:
    """Return Triton's launcher below the layer that creates descriptors, or None if this version of
    Triton is structured differently."""
    launch = getattr(compiled.run, "launch", None)
    if not inspect.isfunction(launch):
        return None
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def _describer(compiled: Any) -> Callable[[int, Tensor], list[Any]] | None:
    """Return Triton's function that creates the descriptor of the tensor at an index, or None if
    this version of Triton is structured differently; every launch then creates its descriptors,
    which is slower but equally correct."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg
    except ImportError:
        return None
    layouts = getattr(compiled.metadata, "tensordesc_meta", None)
    if not layouts or _below_descriptors(compiled) is None:
        return None

    def describe(index: int, tensor: Tensor) -> list[Any]:
        arguments: list[Any] = make_tensordesc_arg(_descriptor(tensor), layouts[index])
        return arguments

    return describe


def _descriptor(tensor: Tensor) -> TensorDescriptor:
    """Create a descriptor without the constructor, whose checks ran when the kernel was compiled,
    and without tile sizes, which are compiled into the kernel."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__ = {
        "base": tensor,
        "shape": tensor.shape,
        "strides": tensor.stride(),
        "padding": "zero",
    }
    return descriptor
