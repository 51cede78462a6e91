"""Observe the batches that a program takes from DataLoaders, and the waits for them."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

_EXPLAINED = 0.5
"""Share of the steps' standard deviation that may remain without the waits of each step."""


@contextmanager
def batches_taken(within: Callable[[Any], AbstractContextManager[object]]) -> Iterator[None]:
    """Run each `next` of a DataLoader on this thread inside `within(iterator)`. Prefetching threads
    are not affected: the loop does not wait for them."""
    iterator_class: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if iterator_class is None:
        yield
        return
    plain, here = iterator_class.__next__, threading.get_ident()

    def next_batch(loader: Any) -> Any:
        if threading.get_ident() != here:
            return plain(loader)
        with within(loader):
            return plain(loader)

    iterator_class.__next__ = next_batch
    try:
        yield
    finally:
        iterator_class.__next__ = plain


@contextmanager
def as_one_range(batches: Any) -> Iterator[None]:
    """Hide the operators that make a batch in this process from traces and modes, except for the
    range of the DataLoader: a `collate_fn` may run more of them than the step. Their lines are
    sampled (`LoaderLines`)."""
    if getattr(batches, "_num_workers", 0):
        yield
        return
    record: Any = torch._C._autograd._enable_record_function
    with record_function(batches._profile_name), _disable_current_modes():
        record(False)
        try:
            yield
        finally:
            record(True)


def with_mean_wait(steps: Sequence[float], waits: Sequence[float]) -> tuple[float, ...] | None:
    """Return the steps, each with the mean wait in place of its own; None if the waits do not
    explain how the steps vary.

    Workers that load as fast as they can deliver batches in bursts, one of each worker: some steps
    wait long and the others not at all. The median of such steps is far from the mean, which is
    what a training takes.
    """
    if len(steps) < 2 or len(steps) != len(waits):
        return None
    mean = statistics.fmean(waits)
    even = tuple(step - wait + mean for step, wait in zip(steps, waits, strict=True))
    explained = statistics.stdev(even) <= _EXPLAINED * statistics.stdev(steps)
    return even if explained and min(even) > 0 else None
