"""Count the bytes sent by the collectives of a step. Imports torch lazily.

The bytes that a rank sends are those of a bandwidth-optimal algorithm: 2(n-1)/n of the message for
an all-reduce, (n-1)/n for a reduce-scatter, an all-gather or a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Traffic:
    """Bytes sent by one rank, from its collective calls."""

    def __init__(self, ranks: int) -> None:
        self._part = (ranks - 1) / ranks
        self.sent = 0.0
        """Bytes that this rank sends."""

    def add(self, name: str, arguments: tuple[Any, ...]) -> None:
        first, second = arguments[0], arguments[1] if len(arguments) > 1 else None
        if name.startswith("allreduce"):
            self.sent += 2 * self._part * _bytes(first)
        elif name.startswith(("broadcast", "_allgather_base", "allgather")):
            self.sent += self._part * _bytes(first)
        elif name.startswith(("_reduce_scatter_base", "reduce_scatter")):
            self.sent += self._part * _bytes(second)


def _bytes(tensors: Any) -> float:
    if isinstance(tensors, list | tuple):
        return sum(_bytes(tensor) for tensor in tensors)
    return float(tensors.numel() * tensors.element_size())


@contextmanager
def counted(ranks: int) -> Iterator[Traffic]:
    """Count every collective of this thread and of its backward pass within the context."""
    from stepscope.measure.dispatch import OperatorMode

    traffic = Traffic(ranks)

    class Count(OperatorMode):  # type: ignore[no-untyped-call]
        def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
            if function.namespace == "c10d":
                traffic.add(function._opname, arguments)
            return function(*arguments, **keywords)

    with Count():
        yield traffic
