"""What an optimizer that updates within a backward offers to the operations of that backward.

A stream of its own, for work that nothing else in the backward waits for; and to take the gradient
of a weight as a product makes it, in the product's format. Where nobody offers it, work is done
where it stands, and gradients go the way of autograd.

    with offered(optimizer):
        loss.backward()  # in it: run_beside(device, work, what it reads), taker_of(weights, dtype)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

MOST_WAITING = 1 << 30
"""Bytes that work beside may still have to read before the first stream waits for it."""


class SideStream:
    """Work beside the current stream, in its order, on tensors that it keeps alive.

    Memory that another stream still reads must not be given back to the first one. Here the first
    waits for the oldest work before what it reads is let go of, so the allocator has to know
    nothing of the second stream, in a capture as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._bytes = 0

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        first = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(first)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        if reads is not None:
            self._waiting.append((reads, done))
            self._bytes += reads.nbytes
            while self._bytes > MOST_WAITING and len(self._waiting) > 1:
                self._let_go(first)

    def join(self) -> None:
        """The current stream waits for all of it."""
        first = torch.cuda.current_stream(self._stream.device)
        first.wait_stream(self._stream)
        self._waiting.clear()
        self._bytes = 0

    def _let_go(self, first: torch.cuda.Stream) -> None:
        reads, done = self._waiting.popleft()
        first.wait_event(done)
        self._bytes -= reads.nbytes


class Offer(Protocol):
    def beside(self, device: torch.device) -> SideStream | None: ...

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Whether it wants the gradient of this weight in that format, without autograd."""

    def take(self, weight: Tensor, gradient: Tensor) -> None:
        """From here on the weight may change."""


_offer: Offer | None = None


@contextmanager
def offered(offer: Offer) -> Iterator[None]:
    """Within this, in backwards too, work may go beside. Who offers it joins it."""
    global _offer
    before, _offer = _offer, offer
    try:
        yield
    finally:
        _offer = before


def run_overlapped(device: torch.device, work: Callable[[], None], reads: Tensor) -> None:
    """Beside the current stream where that is offered, else here and now."""
    beside = None if _offer is None else _offer.beside(device)
    if beside is None:
        work()
    else:
        beside.run(work, reads)


def taker_of(weights: Sequence[Tensor | None], dtype: torch.dtype) -> Offer | None:
    """Who takes the gradients of all of these in that format; None where they go to autograd."""
    offer = _offer
    if offer is None or not all(w is not None and offer.takes(w, dtype) for w in weights):
        return None
    return offer
