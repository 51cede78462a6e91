"""Interface between an optimizer-in-backward and the operations of that backward pass.

The optimizer provides a side stream for the gradients of parameters that it updates there, and may
consume the gradient of a weight in the matmul dtype, without autograd. Without such an optimizer
the work runs on the current stream and gradients go to autograd.

    with offered(optimizer):
        loss.backward()  # its operations call compute_gradients(…) and gradient_consumer(…)

A gradient that the side stream may still be writing is an `AsyncTensor` on its way through
autograd. The update, which follows on the same stream, takes its value without a wait. Any other
reader waits: the sum of two gradients of a parameter that is used twice, hooks, anomaly detection.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stepscope.torch_tools.casts import cast_each

MAX_PENDING_BYTES = 1 << 30
"""Bytes that pending work on the side stream may read before the main stream waits for it."""


class SideStream:
    """A stream whose work overlaps with the current stream and keeps the tensors it uses alive.

    Memory that the side stream still reads or writes must not be freed for reuse by the main
    stream, also where nothing uses the result. The main stream waits for the oldest work before its
    tensors are released, so the allocator does not need `record_stream`, also in a capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pending: deque[tuple[Callable[[], None], Tensor, torch.cuda.Event]] = deque()
        self._bytes = 0
        self.joins = 0
        """Number of times that all work was waited for or forgotten."""

    def run(self, work: Callable[[], None], reads: Tensor | None) -> Any:
        """Run work after what is on the current stream; keep `reads` and what else the work refers
        to alive until it is done. Return its event."""
        main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        if reads is not None:
            self._pending.append((work, reads, done))
            self._bytes += reads.nbytes
            while self._bytes > MAX_PENDING_BYTES and len(self._pending) > 1:
                self._release_oldest(main)
        return done

    def compute(
        self, work: Callable[[], None], reads: Tensor, results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run work that writes `results`; return them as tensors that can be read at once."""
        done = self.run(work, reads)
        return tuple(AsyncTensor(result, self, done) for result in results)

    def wait(self, done: Any) -> None:
        """Make the current stream wait for an event of `run`."""
        torch.cuda.current_stream(self._stream.device).wait_event(done)

    def join(self) -> None:
        """Make the current stream wait for all work."""
        main = torch.cuda.current_stream(self._stream.device)
        main.wait_stream(self._stream)
        self.abandon()

    def abandon(self) -> None:
        """Forget all work: it was waited for, or was part of a capture that failed."""
        self._pending.clear()
        self._bytes = 0
        self.joins += 1

    def _release_oldest(self, main: torch.cuda.Stream) -> None:
        _, reads, done = self._pending.popleft()
        main.wait_event(done)
        self._bytes -= reads.nbytes


class AsyncTensor(Tensor):
    """A tensor that a side stream may still be writing: every operator that reads it makes the
    current stream wait first, as torch's `AsyncCollectiveTensor` does for collectives. Its values
    may have a narrower dtype than it has: readers get a cast.

    It has no storage, so nothing reads the memory unnoticed. The wait is a dependency on the
    device, which a CUDA graph records.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _value: Tensor
    _stream: SideStream
    _done: Any
    _joins: int

    @staticmethod
    def __new__(
        cls,
        value: Tensor,
        stream: SideStream,
        done: Any,
        joins: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> AsyncTensor:
        made: AsyncTensor = Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=dtype or value.dtype,
            device=value.device,
        )
        made._value, made._stream, made._done = value, stream, done
        made._joins = stream.joins if joins is None else joins
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            # Autograd does so with the gradient that it stores in a parameter: nothing is read.
            source: AsyncTensor = args[0]
            value = source._value.detach()
            return AsyncTensor(value, source._stream, source._done, source._joins, source.dtype)
        args, kwargs = tree_map_only(AsyncTensor, AsyncTensor.wait, (args, kwargs or {}))
        return func(*args, **kwargs)

    def wait(self) -> Tensor:
        """Make the current stream wait until the tensor is written; return it as a plain tensor."""
        if self._done is not None and self._joins == self._stream.joins:
            self._stream.wait(self._done)
        return self._value.to(self.dtype)

    def read_on(self, stream: SideStream | None) -> Tensor:
        """Return its values, maybe in a narrower dtype, for work that will run on that side stream:
        on the one that writes them there is nothing to wait for."""
        return self._value if stream is self._stream else self.wait()

    # What reads the memory and is no operator.

    def data_ptr(self) -> int:
        return self.wait().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.wait().untyped_storage()

    def tolist(self) -> Any:
        return self.wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.wait().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.wait().__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = copy.deepcopy(self.wait(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wait().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.wait())


class BackwardOptimizer(Protocol):
    """An optimizer that updates parameters during the backward pass."""

    def gradient_stream(self, parameters: Sequence[Tensor]) -> SideStream | None:
        """Return the side stream on which to compute the gradients of these parameters; None if
        another reader than their updates is expected."""

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        """Return whether it consumes the gradient of this weight in that dtype."""

    def take(self, weight: Tensor, gradient: Tensor) -> None:
        """Consume the gradient; the weight may change from here on."""


_active: BackwardOptimizer | None = None


@contextmanager
def offered(optimizer: BackwardOptimizer) -> Iterator[None]:
    """Let backward passes within the context use this optimizer, which must join its side
    stream."""
    global _active
    before, _active = _active, optimizer
    try:
        yield
    finally:
        _active = before


def compute_gradients(
    parameters: Sequence[Tensor | None],
    work: Callable[[], None],
    reads: Tensor,
    results: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Run work that writes `results`, the gradients of parameters, and return them: on the side
    stream of the active optimizer if it updates all of these there, else on the current stream. A
    parameter that no longer exists is None."""
    stream = _stream_of(parameters)
    if stream is None:
        work()
        return tuple(results)
    return stream.compute(work, reads, results)


def widened(
    parameters: Sequence[Tensor | None], gradients: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return gradients on the current stream in the dtype of their parameters. Where the active
    optimizer updates all of these on its side stream, they are cast for other readers only: the
    update reads them in their own dtype, in half the bytes."""
    stream = _stream_of(parameters)
    if stream is None:
        return tuple(gradient.to(dtype) for gradient in gradients)
    return tuple(AsyncTensor(one, stream, None, dtype=dtype) for one in gradients)


def widened_each(
    pairs: Sequence[tuple[Tensor | None, Tensor]], dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return gradients of several parameters as `widened` does for each, in one launch if no
    optimizer is active. Each pair is a parameter and its gradient."""
    if _active is None:
        return cast_each([gradient for _, gradient in pairs], dtype)
    return [widened([one], (gradient,), dtype)[0] for one, gradient in pairs]


def _stream_of(parameters: Sequence[Tensor | None]) -> SideStream | None:
    """Return the side stream on which the active optimizer updates all of these."""
    alive = [one for one in parameters if one is not None]
    if _active is None or not alive or len(alive) != len(parameters):
        return None
    return _active.gradient_stream(alive)


def gradient_consumer(
    weights: Sequence[Tensor | None], dtype: torch.dtype
) -> BackwardOptimizer | None:
    """Return the optimizer that consumes the gradients of all these weights in that dtype; None if
    they go to autograd."""
    optimizer = _active
    if optimizer is None or not all(w is not None and optimizer.takes(w, dtype) for w in weights):
        return None
    return optimizer
