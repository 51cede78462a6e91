"""Named ranges: parts of a program that a profiler shows by name.

    with named("attention"):
        ...

A range is a `record_function` while torch.profiler runs, and an NVTX range while Nsight Systems
does. NVTX ranges are started and ended, not pushed and popped, so that they hold for the thread of
the autograd engine too. While nobody listens, and inside of what torch.compile traces, a range is
nothing: no graph break, no guard, well below a microsecond.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.autograd import profiler

_SILENCE: AbstractContextManager[None] = nullcontext()
# Nsight Systems sets this for every process that it watches.
_nvtx_on = "NSYS_PROFILING_SESSION_ID" in os.environ and torch.version.cuda is not None


def mark_for_nsight(on: bool) -> None:
    """Whether ranges are marked for Nsight Systems; by default where it watches this process."""
    global _nvtx_on
    _nvtx_on = on and torch.version.cuda is not None


def named(name: str) -> AbstractContextManager[None]:
    """A range of that name, for those who listen."""
    if torch.compiler.is_compiling():
        return nullcontext()
    if not (profiler._is_profiler_enabled or _nvtx_on):
        return _SILENCE
    return _Range(name)


def name_groups(optimizer: torch.optim.Optimizer) -> None:
    """Put a range around all that the optimizer does for one of its parameter groups.

    The range has the group's own name (`{"name": "embeddings", "params": …}`) or its number.
    """
    optimizer.param_groups = _NamedGroups(optimizer.param_groups)


class _NamedGroups(list[dict[str, Any]]):
    """Every optimizer works in a loop over this list: a range holds from one turn to the next."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(super().__iter__()):
            with named(str(group.get("name", f"group {number}"))):
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            torch.cuda.nvtx.range_end(self._handle)
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
