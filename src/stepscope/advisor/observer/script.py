"""Observer of a script that does not know of it (`stepscope observe`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.advisor.scope.torch_import import when_imported

if TYPE_CHECKING:
    from stepscope.advisor.observer.observer import Observer


class ObservedScript:
    """Starts an `Observer` once the script has imported torch."""

    def __init__(self, folder: Path, *, every: int, trace: bool, prometheus: str) -> None:
        self._folder = folder
        self._every, self._trace = every, trace
        self._prometheus = Path(prometheus) if prometheus else None
        self._observer: Observer | None = None

    def start(self) -> None:
        when_imported("torch", self._attach)

    def finish(self) -> None:
        if self._observer is not None:
            self._observer.close()

    def _attach(self) -> None:
        from stepscope.advisor.observer.observer import Observer

        self._observer = Observer(
            self._folder, every=self._every, trace=self._trace, prometheus=self._prometheus
        )
