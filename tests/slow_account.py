"""Time ledger of one step from the raw events of a trace, independent of Stepscope's trace reader.

Deliberately slow and simple: it shares with Stepscope only the names of phases and classes, and the
rules stated in `docs/architecture.md`.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepscope.analysis.kernels.names import describe, describe_operator
from stepscope.analysis.kernels.operators import named_class

PHASES = ("forward", "loss", "backward", "optimizer")
MACHINERY = ("## ", "Torch-Compiled Region", "TorchDynamo", "AOTDispatcher", "Pregraph")


class Span(NamedTuple):
    start: int
    end: int
    name: str
    thread: Any
    is_range: bool
    sequence: int | None
    in_backward: bool


class Piece(NamedTuple):
    """A kernel with its launch, or a span in which an operator itself ran."""

    start: int
    end: int
    name: str
    launch: tuple[int, int] | None
    by_graph: bool
    around: tuple[Span, ...]
    """Enclosing spans, from the outermost to the innermost."""


class Account:
    """Time ledger of the single step in a trace."""

    def __init__(self, path: Path) -> None:
        raw = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        events = [e for e in raw if e["ph"] == "X"]
        self.spans = [_span(e) for e in events if e["cat"] in ("cpu_op", "user_annotation")]
        self.spans.sort(key=lambda s: (s.start, -s.end))
        self.threads = {thread: self._of(thread) for thread in {s.thread for s in self.spans}}
        self.numbered: dict[int | None, list[Span]] = {}
        for span in self.spans:
            self.numbered.setdefault(span.sequence, []).append(span)
        self.calls = {
            e["args"]["correlation"]: e
            for e in events
            if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        device = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        self.on_device = bool(device)
        pieces = [self._kernel(e) for e in device] if device else self._operator_spans()
        self.pieces = sorted(pieces, key=lambda piece: piece.start)
        (mark,) = (s for s in self.spans if s.name.startswith("ProfilerStep#"))
        self.start = mark.start
        self.end = max([mark.end, *(p.end for p in self.pieces)])

    def _of(self, thread: Any) -> tuple[list[Span], np.ndarray, np.ndarray]:
        own = [s for s in self.spans if s.thread == thread]
        return own, np.array([s.start for s in own]), np.array([s.end for s in own])

    def _around(self, thread: Any, moment: int) -> tuple[Span, ...]:
        if thread not in self.threads:
            return ()
        own, start, end = self.threads[thread]
        return tuple(own[i] for i in np.flatnonzero((start <= moment) & (end > moment)))

    def _kernel(self, event: dict[str, Any]) -> Piece:
        start, end = _times(event)
        call = self.calls.get(event["args"].get("correlation"))
        launch = None if call is None else _times(call)
        around = () if call is None else self._around(call["tid"], launch[0])  # type: ignore[index]
        by_graph = call is not None and call["name"].startswith("cudaGraphLaunch")
        return Piece(start, end, event["name"], launch, by_graph, around)

    def _operator_spans(self) -> list[Piece]:
        pieces: list[Piece] = []
        for thread, (own, *_) in self.threads.items():
            edges = sorted({t for s in own if not s.is_range for t in (s.start, s.end)})
            for first, last in pairwise(edges):
                around = self._around(thread, first)
                operators = [s for s in around if not s.is_range]
                if not operators:
                    continue
                inner = operators[-1]
                around = around[: around.index(inner) + 1]
                before = pieces[-1] if pieces else None
                if before and before.end == first and before.around[-1] is inner:
                    pieces[-1] = before._replace(end=last)
                else:
                    pieces.append(Piece(first, last, inner.name, None, False, around))
        return pieces

    def phase_of(self, piece: Piece) -> str:
        phase = self.phase(piece.around)
        if phase or piece.by_graph:
            return phase or "graph"
        # If no forward is marked, unmarked work counts as forward.
        unmarked = not any(s.is_range and s.name == "forward" for s in self.spans)
        return "forward" if unmarked and piece.around else ""

    def phase(self, around: tuple[Span, ...]) -> str:
        phase = ""
        for span in around:
            named = _phase_of(span)
            if named and not (phase == "backward" and named in ("forward", "loss")):
                phase = named
        return phase

    def maker(self, around: tuple[Span, ...]) -> Span | None:
        """Return the forward operator whose backward node runs here."""
        for span in reversed(around):
            if span.sequence is None or self.phase((span,)) != "backward":
                continue
            same = [
                s
                for s in self.numbered[span.sequence]
                if s.start <= span.start
                and self.phase(self._around(s.thread, s.start)) != "backward"
            ]
            if same:
                return max(same, key=lambda s: (s.start, -s.end))
        return None

    def module(self, around: tuple[Span, ...]) -> str:
        if self.phase(around) == "backward" and (maker := self.maker(around)) is not None:
            around = self._around(maker.thread, maker.start)
        return "/".join(s.name for s in around if s.is_range and _is_module(s.name))

    def kind(self, piece: Piece) -> str:
        if not self.on_device:
            return describe_operator(piece.name).kind
        kind = describe(piece.name).kind
        if kind == "other":
            maker = self.maker(piece.around)
            outer = self._around(maker.thread, maker.start) if maker else ()
            for span in (*reversed(piece.around), *reversed(outer)):
                named = None if span.is_range else named_class(span.name)
                if named is not None:
                    return named
        return kind

    def lines(self) -> Counter[tuple[str, str]]:
        """Nanoseconds by phase and class, and idle nanoseconds by cause."""
        times: Counter[tuple[str, str]] = Counter()
        launches = {p.launch for p in self.pieces}
        threads = {e["tid"] for e in self.calls.values() if _times(e) in launches}
        waits = [
            _times(e)
            for e in self.calls.values()
            if "Synchronize" in e["name"] and e["tid"] in threads
        ]
        edges = {t for p in self.pieces for t in (p.start, p.end)}
        edges |= {t for wait in waits for t in wait} | {self.start, self.end}
        inside = sorted(t for t in edges if self.start <= t <= self.end)
        keys = [(self.phase_of(p), self.kind(p)) for p in self.pieces]
        start, end = (np.array([p[index] for p in self.pieces]) for index in (0, 1))
        for first, last in pairwise(inside):
            running = [
                ({"optimizer": 1, "communication": 2}.get(keys[index][1], 0), index)
                for index in np.flatnonzero((start <= first) & (end > first)).tolist()
            ]
            if running:
                times[keys[min(running)[1]]] += last - first
            else:
                cause = self._cause(first)
                if cause != "queue" and any(s <= first < e for s, e in waits):
                    cause = "wait"
                times["idle", cause] += last - first
        return times

    def _cause(self, moment: int) -> str:
        if not self.on_device:
            return "between"
        began = max([self.start, *(p.end for p in self.pieces if p.end <= moment)])
        later = next((p for p in self.pieces if p.start > moment), None)
        if later is None:
            return "CPU"
        if later.launch is None:
            return "no launch"
        return "CPU" if later.launch[1] > began else "queue"


def _times(event: dict[str, Any]) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _span(event: dict[str, Any]) -> Span:
    given = event.get("args", {})
    return Span(
        *_times(event),
        event["name"],
        event["tid"],
        event["cat"] == "user_annotation",
        given.get("Sequence number"),
        given.get("Fwd thread id", 0) > 0,
    )


def _phase_of(span: Span) -> str:
    if span.in_backward or span.name.startswith("autograd::engine::evaluate_function: "):
        return "backward"
    if span.name.startswith("Optimizer."):
        return "optimizer"
    return span.name if span.name in PHASES else ""


def _is_module(name: str) -> bool:
    marks = ("ProfilerStep#", "Optimizer.", *MACHINERY)
    return not name.startswith(marks) and name not in ("forward", "backward", "optimizer")
