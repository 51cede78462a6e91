"""Named ranges: parts of a program that a profiler shows by name.

    with named("attention"):
        ...

A range is a `record_function` while torch.profiler runs, and an NVTX range while Nsight Systems
runs. NVTX ranges use start and end, not push and pop, so that they also cover the thread of the
autograd engine. Without a profiler, and under torch.compile, a range does nothing: no graph break,
no guard, well below a microsecond.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

_NO_RANGE: AbstractContextManager[None] = nullcontext()
# Nsight Systems sets this for every process that it profiles.
_nvtx_on = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


def mark_for_nsight(on: bool) -> None:
    """Turn NVTX ranges on or off; by default they are on under Nsight Systems."""
    global _nvtx_on
    _nvtx_on = on and torch.version.cuda is not None


def named(name: str) -> AbstractContextManager[None]:
    """Open a range of that name for the active profiler."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if not (profiler._is_profiler_enabled or _nvtx_on):
        return _NO_RANGE
    return _Range(name)


def name_groups(optimizer: torch.optim.Optimizer) -> None:
    """Put a range around the optimizer's work for each of its parameter groups.

    The range has the group's name (`{"name": "embeddings", "params": …}`) or its number.
    """
    optimizer.param_groups = _NamedGroups(optimizer.param_groups)


class _NamedGroups(list[dict[str, Any]]):
    """Opens a range per iteration: every optimizer loops over this list."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, group in enumerate(super().__iter__()):
            with named(str(group.get("name", f"group {index}"))):
                yield group


class _Range(AbstractContextManager[None]):
    __slots__ = ("_handle", "_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: Any = None
        self._handle: Any = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._record = profiler.record_function(self._name)
            self._record.__enter__()
        if _nvtx_on:
            self._handle = torch.cuda.nvtx.range_start(self._name)

    def __exit__(self, *raised: Any) -> None:
        if self._handle is not None:
            torch.cuda.nvtx.range_end(self._handle)
        if self._record is not None:
            self._record.__exit__(*raised)
