"""Chooses the form in which a training step runs, by the times of the first real steps.

Each candidate runs some consecutive steps. The fastest is kept; the simpler one if their times
overlap. The choice is stored under a key, so that a later run starts with it. In a process group
the ranks follow the first one, without waiting for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from stepscope.acceleration.torch_internals import group_store
from stepscope.files import replace_file

AS_IT_IS, PLAIN, PASSES = "as it is", "compiled", "compiled with passes"
TO_BE_CHOSEN = "the first steps are timed to choose the form of the step"
SAMPLES = 8
"""Timed steps of each candidate."""
_WARM_UP, _CAPTURE = 2, 5
"""Steps of a candidate before the timed ones: compilation, or warm-up and capture of a graph."""
_MARGIN = 0.99
"""A candidate above this share of a simpler one's time is not faster."""
_GAIN_OF_PASSES = 0.97
"""Above this share of the time as it is, the model is also compiled without passes."""
_PATIENCE = 200
"""Steps after which a rank decides by its own times: the first one trains another model."""


class Form(NamedTuple):
    """A form of a step. They sort from the simplest."""

    rank: int
    kind: str
    graph: bool = False

    def __str__(self) -> str:
        return self.kind + (", CUDA graph" if self.graph else "")


def form(kind: str, graph: bool = False) -> Form:
    return Form((AS_IT_IS, PLAIN, PASSES).index(kind), kind, graph)


class Clock(Protocol):
    """Source of times; tests have a scripted one."""

    def mark(self) -> None:
        """Note the present moment of the device."""

    def milliseconds(self) -> list[float]:
        """Return the times between the marks, and forget all but the last mark."""


class _HostClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        self._marks = self._marks[-1:]
        return [1e3 * (after - before) for before, after in pairs]


class _DeviceClock:
    """Events on the device: consecutive steps are timed without waiting for each."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        if self._marks:
            self._marks[-1].synchronize()
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        self._marks = self._marks[-1:]
        return [before.elapsed_time(after) for before, after in pairs]


def clock_of(device: torch.device) -> Clock:
    return _DeviceClock() if device.type == "cuda" else _HostClock()


class Choice:
    """The choice between forms of one step; `begin` is called when a step begins."""

    def __init__(self, graphs: Iterable[bool], clock: Clock, key: Callable[[], str]) -> None:
        self.graphs, self._clock, self._key = tuple(graphs), clock, key
        self._queue = [form(kind, graph) for kind in (PASSES, AS_IT_IS) for graph in self.graphs]
        self._present: Form | None = None
        self._sizes: list[int] = []
        self._waited = 0
        self._began = 0.0
        self._digest = ""
        self._is_left = False
        self.times: dict[Form, float] = {}
        """Median step of each candidate in ms."""
        self._relative: dict[Form, list[float]] = {}
        """Times per element of the batch: lengths may change."""
        self.chosen: Form | None = None
        self.is_stored = False
        self.seconds = 0.0
        """Duration of the trial, with compilation."""

    def begin(self, size: int = 1) -> Form:
        """Return the form of the step that begins, which has a batch of so many elements."""
        if self.chosen is None:
            self._follow()
        if self.chosen is not None:
            return self.chosen
        self._clock.mark()
        self._end_candidate()
        if not self._queue:
            return self._decided()
        self._sizes.append(max(size, 1))
        self._present = self._queue[0]
        return self._present

    def leave_compiled(self) -> None:
        """Drop the compiled forms: the model cannot be compiled, or would differ."""
        self.times, self._relative, self._sizes, self._present = {}, {}, [], None
        self._queue = [form(AS_IT_IS, graph) for graph in self.graphs]
        self._clock.milliseconds()
        self.is_stored = False
        self.chosen = self._queue[0] if len(self._queue) == 1 else None
        self._is_left = True

    def __str__(self) -> str:
        if self.chosen is None:
            return TO_BE_CHOSEN
        if self.is_stored:
            return f"{self.chosen}, as an earlier run chose"
        times = "; ".join(f"{one}: {ms:.4g} ms" for one, ms in sorted(self.times.items()))
        kept = self.chosen.kind == AS_IT_IS and not self._is_left
        found = ": no other is clearly faster" if kept else ""
        why = f" ({times}; the trial took {self.seconds:.1f} s)" if self.times else ""
        return f"{self.chosen}{found}{why}"

    def _end_candidate(self) -> None:
        """Record the times of a candidate that has had all of its steps."""
        here = self._present
        skipped = 0 if here is None else (_CAPTURE if here.graph else _WARM_UP)
        if here is None or len(self._sizes) < skipped + SAMPLES or here not in self._queue:
            return
        times, sizes = self._clock.milliseconds()[-SAMPLES:], self._sizes[-SAMPLES:]
        self._sizes = []
        self._queue.remove(here)
        self.times[here] = statistics.median(times)
        self._relative[here] = [ms / size for ms, size in zip(times, sizes, strict=True)]
        if self._queue or self._is_left or any(one.kind == PLAIN for one in self.times):
            return
        if self._gains_little():
            self._queue = [form(PLAIN, graph) for graph in self.graphs]

    def _gains_little(self) -> bool:
        """Return whether the model is to be compiled without passes, too."""
        return self._best(PASSES) > _GAIN_OF_PASSES * self._best(AS_IT_IS)

    def _best(self, kind: str) -> float:
        return min(statistics.median(x) for one, x in self._relative.items() if one.kind == kind)

    def _follow(self) -> None:
        """Take over the choice of an earlier run, or of the first rank."""
        store, rank = group_store()
        if not self._digest:
            self._began, self._digest = time.perf_counter(), self._key()
            if rank == 0 and (stored := self._load()) is not None:
                self.chosen, self.is_stored = stored, True
                if store is not None:
                    store.set(self._digest, str(stored))
        if rank and not self._is_left and store.check([self._digest]):
            self.chosen = self._named(store.get(self._digest).decode())

    def _decided(self) -> Form:
        own = self._fastest()
        store, rank = group_store()
        self._waited += 1
        if rank and self._waited < _PATIENCE:
            return own
        self.chosen, self.seconds = own, time.perf_counter() - self._began
        if rank == 0:
            if store is not None:
                store.set(self._digest, str(own))
            self._save()
        return own

    def _fastest(self) -> Form:
        """Return the simplest candidate that none is clearly faster than."""
        fastest = min(self._relative, key=lambda one: statistics.median(self._relative[one]))
        return next(
            one
            for one in sorted(self._relative)
            if one == fastest or not _is_faster(self._relative[fastest], self._relative[one])
        )

    def _named(self, name: str) -> Form | None:
        forms = (form(x, graph) for x in (AS_IT_IS, PLAIN, PASSES) for graph in self.graphs)
        return next((one for one in forms if str(one) == name), None)

    def _load(self) -> Form | None:
        try:
            stored: Any = json.loads(_file(self._digest).read_bytes())
            return self._named(stored["form"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _save(self) -> None:
        times = {str(one): ms for one, ms in self.times.items()}
        with suppress(OSError):
            path = _file(self._digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"form": str(self.chosen), "milliseconds": times}
            replace_file(path, [json.dumps(content).encode()])


def _is_faster(times: list[float], others: list[float]) -> bool:
    # Inclusive: one step that waited for data does not move the quartiles of so few.
    upper = statistics.quantiles(times, n=4, method="inclusive")[2]
    lower = statistics.quantiles(others, n=4, method="inclusive")[0]
    return upper < lower and statistics.median(times) < _MARGIN * statistics.median(others)


def _file(digest: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / f"form-{digest}.json"


def digest_of(*parts: object) -> str:
    """Return the name under which a choice is stored."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
