"""Start an observer that needs torch once the script has imported it."""

from __future__ import annotations

import ctypes
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.advisor.inspect.order import Order
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.errors import one_line

if TYPE_CHECKING:
    from stepscope.advisor.judge.observer import EvidenceObserver
    from stepscope.advisor.patch.observer import SiteObserver
    from stepscope.advisor.trial.planner import MemoryPlanner

SEED = 0
FAILED = "failed"
"""File with the reason why the observer failed."""
_SET_DEATH_SIGNAL = 1


class OnceImported:
    """Observer of a script's sites, evidence or memory; the script's random numbers are seeded."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._order, self._folder = order, folder
        self._observer: SiteObserver | EvidenceObserver | MemoryPlanner | None = None

    def start(self) -> None:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        random.seed(SEED)
        when_imported("numpy", seed_numpy)
        when_imported("torch", self._attach)

    def _attach(self) -> None:
        import torch

        torch.manual_seed(SEED)
        order = self._order
        if order.observe == "sites":
            from stepscope.advisor.patch.observer import SiteObserver

            self._observer = SiteObserver(self._folder)
        elif order.observe == "memory":
            from stepscope.advisor.trial.planner import MemoryPlanner

            self._observer = MemoryPlanner(self._folder, order.budget, order.allow)
        else:
            from stepscope.advisor.judge.observer import EvidenceObserver

            self._observer = EvidenceObserver(self._folder, order.timed)
        self._observer.attach()

    def finish(self) -> None:
        """Write what was observed if the script ended before the observer ended it."""
        if self._observer is None:
            return
        try:
            self._observer.write()
        except Exception as error:
            (self._folder / FAILED).write_text(one_line(error))


def seed_numpy() -> None:
    import numpy as np

    np.random.seed(SEED)
