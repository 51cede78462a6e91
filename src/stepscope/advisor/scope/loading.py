"""Batches that a program takes from the loaders of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import dataloader


@contextmanager
def batches_taken(within: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Each batch that this thread takes from a DataLoader it takes within a `within()`. A thread
    that takes them ahead is left alone: it is not what the loop waits for."""
    made: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if made is None:
        yield
        return
    plain, here = made.__next__, threading.get_ident()

    def taken(loader: Any) -> Any:
        if threading.get_ident() != here:
            return plain(loader)
        with within():
            return plain(loader)

    made.__next__ = taken
    try:
        yield
    finally:
        made.__next__ = plain
