"""Work that nothing in a backward waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepscope.torch_tools.side_stream import SideStream, offered, run_overlapped, gradient_consumer

CPU = torch.device("cpu")


class Kept(SideStream):
    """As a stream would, later."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.reads: list[Tensor | None] = []

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        self.works.append(work)
        self.reads.append(reads)


class Offered:
    """Places for work by device, and weights whose gradients it takes."""

    def __init__(
        self, places: dict[torch.device, SideStream], weights: Sequence[Tensor] = ()
    ) -> None:
        self._places, self._weights = places, weights

    def side_stream(self, device: torch.device) -> SideStream | None:
        return self._places.get(device)

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and any(weight is held for held in self._weights)

    def take(self, weight: Tensor, gradient: Tensor) -> None: ...


def test_work_goes_where_it_is_offered_a_place() -> None:
    done: list[str] = []
    reads, place = torch.zeros(3), Kept()
    run_overlapped(CPU, lambda: done.append("here"), reads)
    with offered(Offered({CPU: place})):
        run_overlapped(CPU, lambda: done.append("beside"), reads)
        run_overlapped(torch.device("meta"), lambda: done.append("no place"), reads)
        with offered(Offered({})):
            run_overlapped(CPU, lambda: done.append("nested"), reads)
        run_overlapped(CPU, lambda: done.append("again"), reads)
    run_overlapped(CPU, lambda: done.append("after"), reads)
    assert done == ["here", "no place", "nested", "after"]
    assert place.reads == [reads, reads]
    for work in place.works:
        work()
    assert done[-2:] == ["beside", "again"]


def test_gradients_go_to_who_takes_those_of_all_weights() -> None:
    first, second, other = (torch.zeros(2) for _ in range(3))
    offer = Offered({}, (first, second))
    assert gradient_consumer([first], torch.bfloat16) is None
    with offered(offer):
        assert gradient_consumer([first, second], torch.bfloat16) is offer
        assert gradient_consumer([first, second], torch.float32) is None
        assert gradient_consumer([first, other], torch.bfloat16) is None
        assert gradient_consumer([first, None], torch.bfloat16) is None
    assert gradient_consumer([first], torch.bfloat16) is None
