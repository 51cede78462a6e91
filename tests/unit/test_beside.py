"""Work that nothing in a backward waits for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepscope.beside import Beside, offered, run_beside

CPU = torch.device("cpu")


class Kept(Beside):
    """As a stream would, later."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.reads: list[Tensor | None] = []

    def run(self, work: Callable[[], None], reads: Tensor | None) -> None:
        self.works.append(work)
        self.reads.append(reads)


def test_work_goes_where_it_is_offered_a_place() -> None:
    done: list[str] = []
    reads, place = torch.zeros(3), Kept()
    run_beside(CPU, lambda: done.append("here"), reads)
    with offered(lambda device: place if device == CPU else None):
        run_beside(CPU, lambda: done.append("beside"), reads)
        run_beside(torch.device("meta"), lambda: done.append("no place"), reads)
        with offered(lambda _: None):
            run_beside(CPU, lambda: done.append("nested"), reads)
        run_beside(CPU, lambda: done.append("again"), reads)
    run_beside(CPU, lambda: done.append("after"), reads)
    assert done == ["here", "no place", "nested", "after"]
    assert place.reads == [reads, reads]
    for work in place.works:
        work()
    assert done[-2:] == ["beside", "again"]
