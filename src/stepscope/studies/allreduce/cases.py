"""Flags and cases of the study of collectives."""

from __future__ import annotations

import msgspec

from stepscope.analysis.links import COLLECTIVES
from stepscope.training.flag_checks import check_at_least, check_each, check_known
from stepscope.training.ranks.cases import RankedCase, default_ranks

BACKENDS = ("auto", "gloo", "nccl")


class AllReduceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the study; every combination of the values except sizes is a case."""

    collective: tuple[str, ...] = ("all-reduce",)
    """Collectives: all-reduce, all-gather, reduce-scatter, broadcast."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, one process each on this machine; under torchrun, as many as it started."""
    backend: tuple[str, ...] = ("auto",)
    """Backend: nccl, gloo, or auto, which is nccl if every rank has its own GPU."""
    sizes: tuple[int, ...] = tuple(2**power for power in range(10, 27, 2))
    """Message sizes in bytes of float32 data."""
    rounds: int = 10
    """Samples of each size."""

    def __post_init__(self) -> None:
        check_known("collective", self.collective, COLLECTIVES)
        check_known("backend", self.backend, BACKENDS)
        check_each("ranks", self.ranks, lambda ranks: ranks >= 1, "give numbers from 1 on")
        least = 4 * max(self.ranks)
        check_each("sizes", self.sizes, lambda size: size >= least, "every rank needs 4 bytes")
        check_at_least(1, rounds=self.rounds)


class AllReduceCase(RankedCase, frozen=True, kw_only=True):
    """One collective on a number of ranks, at several sizes."""

    collective: str
    sizes: tuple[int, ...]
    rounds: int

    @property
    def key(self) -> str:
        sizes = f"{min(self.sizes)}-{max(self.sizes)}B"
        return f"{self.collective}_r{self.ranks}_{self.backend}_{sizes}"
