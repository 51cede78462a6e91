"""Work that an optimizer-in-backward overlaps with the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepscope.torch_tools.side_stream import SideStream, gradient_consumer, offered, run_overlapped

CPU = torch.device("cpu")


class DelayedStream(SideStream):
    """A side stream that stores its work, to be run later."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.reads: list[Tensor | None] = []

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        self.works.append(work)
        self.reads.append(reads)


class FakeOptimizer:
    """Side streams by device, and weights whose gradients it consumes."""

    def __init__(
        self, streams: dict[torch.device, SideStream], weights: Sequence[Tensor] = ()
    ) -> None:
        self._streams, self._weights = streams, weights

    def side_stream(self, device: torch.device) -> SideStream | None:
        return self._streams.get(device)

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and any(weight is known for known in self._weights)

    def take(self, weight: Tensor, gradient: Tensor) -> None: ...


def test_work_runs_on_the_offered_side_stream() -> None:
    done: list[str] = []
    reads, stream = torch.zeros(3), DelayedStream()
    run_overlapped(CPU, lambda: done.append("here"), reads)
    with offered(FakeOptimizer({CPU: stream})):
        run_overlapped(CPU, lambda: done.append("overlapped"), reads)
        run_overlapped(torch.device("meta"), lambda: done.append("no stream"), reads)
        with offered(FakeOptimizer({})):
            run_overlapped(CPU, lambda: done.append("nested"), reads)
        run_overlapped(CPU, lambda: done.append("again"), reads)
    run_overlapped(CPU, lambda: done.append("after"), reads)
    assert done == ["here", "no stream", "nested", "after"]
    assert stream.reads == [reads, reads]
    for work in stream.works:
        work()
    assert done[-2:] == ["overlapped", "again"]


def test_gradients_go_to_the_optimizer_that_consumes_all_of_them() -> None:
    first, second, other = (torch.zeros(2) for _ in range(3))
    optimizer = FakeOptimizer({}, (first, second))
    assert gradient_consumer([first], torch.bfloat16) is None
    with offered(optimizer):
        assert gradient_consumer([first, second], torch.bfloat16) is optimizer
        assert gradient_consumer([first, second], torch.float32) is None
        assert gradient_consumer([first, other], torch.bfloat16) is None
        assert gradient_consumer([first, None], torch.bfloat16) is None
    assert gradient_consumer([first], torch.bfloat16) is None
