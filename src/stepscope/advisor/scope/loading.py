"""Observe the batches that a program takes from DataLoaders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import dataloader


@contextmanager
def batches_taken(within: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run each `next` of a DataLoader on this thread inside `within()`. Prefetching threads are not
    affected: the loop does not wait for them."""
    iterator_class: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if iterator_class is None:
        yield
        return
    plain, here = iterator_class.__next__, threading.get_ident()

    def next_batch(loader: Any) -> Any:
        if threading.get_ident() != here:
            return plain(loader)
        with within():
            return plain(loader)

    iterator_class.__next__ = next_batch
    try:
        yield
    finally:
        iterator_class.__next__ = plain
