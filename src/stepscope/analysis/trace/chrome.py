"""Chrome traces as torch.profiler writes them, decoded by the fields that are needed.

Times are microseconds with a fraction; they become whole nanoseconds. Counters, the drawing
instructions of the viewer and Python frames are skipped, except for long frames and the calls of
modules that `with_stack=True` records. A file that breaks off is read up to the break.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from stepscope.analysis.trace.model import (
    NO_ARROWS,
    NO_NUMBER,
    Arrows,
    Calls,
    Frames,
    Ints,
    Names,
    Trace,
    ints,
    ordered_kernels,
    ordered_spans,
)
from stepscope.analysis.trace.pieces import open_end, possible_cuts, without_tail
from stepscope.errors import StepscopeError

MOST_OBJECTS = 12_000_000
"""An event is one, and its arguments are another."""
_LATEST_US = 9.0e15
"""Beyond this a time in nanoseconds does not fit into 64 bits."""

Identity = int | str | None


class _Arguments(msgspec.Struct, gc=False):
    correlation: int = NO_NUMBER
    device: Identity = 0
    stream: Identity = 0
    sequence: int = msgspec.field(default=NO_NUMBER, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")


class _Event(msgspec.Struct, gc=False):
    ph: str
    cat: str = ""
    name: str = ""
    id: Identity | float = 0
    tid: Identity = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments | None = None


class _Device(msgspec.Struct):
    name: str = ""
    computeMajor: Identity | float = None  # noqa: N815
    computeMinor: Identity | float = None  # noqa: N815

    def capability(self) -> str:
        numbers = (self.computeMajor, self.computeMinor)
        known = all(isinstance(number, int) and 0 <= number < 100 for number in numbers)
        return "{}.{}".format(*numbers) if known else ""


class _File(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815


_Fields = tuple[tuple[str, ...], tuple[str, ...]]
_SPAN: _Fields = (("tid",), ("sequence", "forward_thread"))
_FIELDS: dict[str, _Fields] = {
    "kernel": ((), ("correlation", "device", "stream")),
    "call": (("tid",), ("correlation",)),
    "operator": _SPAN,
    "range": _SPAN,
    "frame": (("tid",), ()),
}
"""What is kept of each kind beside its times and name: of the event, and of its arguments."""
_End = tuple[str, Identity | float, Identity, float]
_KINDS = {
    "kernel": "kernel", "gpu_memcpy": "kernel", "gpu_memset": "kernel",
    "Kernel": "kernel", "Memcpy": "kernel", "Memset": "kernel",
    "cuda_runtime": "call", "cuda_driver": "call", "Runtime": "call",
    "cpu_op": "operator", "Operator": "operator",
    "user_annotation": "range",
}  # fmt: skip
_ARROW = "fwdbwd"
_PYTHON = "python_function"
_MODULE = "nn.Module: "
_LONG_FRAME_US = 500.0
"""Shorter Python frames cannot fill half of a long gap."""
_MODULE_NUMBER = re.compile(r"_(\d+)$")
_MARK = re.compile(r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)")
"""Ranges of the profiler itself, which older versions write as operators."""
_FILE = msgspec.json.Decoder(_File)
_LIST = msgspec.json.Decoder(list[_Event])


def read_chrome(data: bytes | bytearray, where: str) -> Trace:
    """The trace in these bytes; `where` names them in an error."""
    if _objects(data) > MOST_OBJECTS:
        raise StepscopeError(
            f"{where} has more than {MOST_OBJECTS // 2:,} events", "trace fewer steps"
        )
    with _no_collection():
        try:
            events, device = _in_pieces(data) or _at_once(data, where)
            if not events.count("kernel") and not events.count("operator"):
                raise StepscopeError(
                    f"{where} has no kernels and no operators",
                    "was the profiler told to record CPU or CUDA activities?",
                )
            return events.trace(device)
        except (ValueError, OverflowError, TypeError) as error:
            raise StepscopeError(f"{where} has a time or number that is none: {error}") from error


def _objects(data: bytes | bytearray) -> int:
    """How many objects begin in these bytes, at most: braces inside of names count too."""
    whole = np.frombuffer(data, np.uint8)
    step = 1 << 20
    parts = (whole[at : at + step] for at in range(0, len(whole), step))
    return sum(int(np.count_nonzero(part == ord("{"))) for part in parts)


_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _in_pieces(data: bytes | bytearray) -> tuple[_Events, _Device] | None:
    """None where the file is not laid out for it, or has a fault that the whole will show."""
    for cut in possible_cuts(data):
        try:
            inside, device = _decoded(cut.around())
        except _FAULTS:
            continue
        if inside:
            return None
        events = _Events()
        try:
            for piece in cut.pieces():
                events.add(_LIST.decode(piece))
        except _FAULTS:
            return None
        return events, device
    return None


def _up_to_the_break(data: bytes | bytearray) -> tuple[_Events, _Device] | None:
    """The events of a file that breaks off; None where it is broken before its end."""
    cut = open_end(data)
    if cut is None:
        return None
    events = _Events(truncated=True)
    try:
        _, device = _decoded(cut.around() + (b"]" if cut.bare else b"]}"))
        for piece, is_last in cut.pieces_and_last():
            if not is_last:
                events.add(_LIST.decode(piece))
                continue
            for shorter in without_tail(piece):
                try:
                    events.add(_LIST.decode(shorter))
                except _FAULTS:
                    continue
                break
    except _FAULTS:
        return None
    return (events, device) if events.count("kernel") + events.count("operator") else None


def _at_once(data: bytes | bytearray, where: str) -> tuple[_Events, _Device]:
    try:
        decoded, device = _decoded(data)
    except RecursionError:
        raise StepscopeError(f"{where} is nested too deeply to be a trace") from None
    except msgspec.ValidationError as error:
        raise StepscopeError(f"{where} is not a trace of torch.profiler: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found = _up_to_the_break(data)
        if found is not None:
            return found
        raise StepscopeError(
            f"{where} is not JSON to its end: {error}", "was the trace written to its end?"
        ) from error
    events = _Events()
    events.add(decoded)
    return events, device


def _decoded(data: bytes | bytearray) -> tuple[list[_Event], _Device]:
    if bytes(data[:256]).lstrip()[:1] == b"[":
        return _LIST.decode(data), _Device()
    file = _FILE.decode(data)
    return file.traceEvents, next(iter(file.deviceProperties), _Device())


class _Events:
    """Columns of what is needed of each kind of event."""

    def __init__(self, *, truncated: bool = False) -> None:
        self._truncated = truncated
        self._names = Names()
        self._identity = _Identities()
        self._parts: dict[str, list[list[Ints]]] = {kind: [] for kind in _FIELDS}
        self._ends: list[_End] = []

    def count(self, kind: str) -> int:
        return sum(len(part[0]) for part in self._parts[kind])

    def add(self, events: list[_Event]) -> None:
        held: dict[str, list[_Event]] = {kind: [] for kind in self._parts}
        keep = {category: held[kind].append for category, kind in _KINDS.items()}.get
        for event in events:
            add = keep(event.cat)
            if add is not None:
                if event.ph == "X":
                    add(event)
            elif event.cat == _ARROW:
                self._ends.append((event.ph, event.id, event.tid, event.ts))
            elif event.cat == _PYTHON and event.ph == "X":
                if event.name.startswith(_MODULE):
                    # `nn.Module: Linear_3` is the module that is numbered 3 among the Linear.
                    event.name = _MODULE_NUMBER.sub(r" \1", event.name.removeprefix(_MODULE))
                    held["range"].append(event)
                elif event.dur >= _LONG_FRAME_US:
                    held["frame"].append(event)
        for kind, members in held.items():
            if members:
                self._parts[kind].append(self._columns(members, *_FIELDS[kind]))

    def _columns(
        self, events: list[_Event], own: Sequence[str], arguments: Sequence[str]
    ) -> list[Ints]:
        nothing = _Arguments()
        given = [event.args or nothing for event in events]
        start = _moments([event.ts for event in events])
        return [
            start,
            start + np.maximum(_moments([event.dur for event in events]), 0),
            self._names.numbers([event.name for event in events]),
            *(self._identity.numbers(list(map(attrgetter(name), events))) for name in own),
            *(self._identity.numbers(list(map(attrgetter(name), given))) for name in arguments),
        ]

    def _joined(self, *kinds: str) -> tuple[Ints, ...]:
        parts = [part for kind in kinds for part in self._parts[kind]]
        if not parts:
            return (ints(),) * (3 + sum(map(len, _FIELDS[kinds[0]])))
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def trace(self, gpu: _Device) -> Trace:
        start, end, name, correlation, device, stream = self._joined("kernel")
        kernels = ordered_kernels(
            name=name, start=start, end=end, device=device, stream=stream, correlation=correlation
        )
        start, end, name, thread, correlation = self._joined("call")
        calls = Calls(name, start, end, thread, correlation)
        start, end, name, thread, sequence, back = self._joined("operator", "range")
        frames = Frames(*self._joined("frame"))
        is_range = np.arange(len(start)) >= self.count("operator")
        names = self._names.all()
        marks = [n for n in np.unique(name[~is_range]).tolist() if _MARK.match(names[n])]
        spans = ordered_spans(
            name=name, start=start, end=end, thread=thread,
            is_range=is_range | np.isin(name, marks), sequence=sequence, in_backward=back > 0,
        )  # fmt: skip
        return Trace(
            "torch.profiler", names, kernels, calls, spans, gpu.name, self._arrows(),
            capability=gpu.capability(), truncated=self._truncated, frames=frames,
        )  # fmt: skip

    def _arrows(self) -> Arrows:
        tails = {number: (thread, ts) for ph, number, thread, ts in self._ends if ph == "s"}
        whole = [
            (*tails[number], thread, ts)
            for ph, number, thread, ts in self._ends
            if ph == "f" and number in tails
        ]
        if not whole:
            return NO_ARROWS
        tail_thread, tail, thread, start = zip(*whole, strict=True)
        numbers = self._identity.numbers
        return Arrows(_moments(tail), numbers(tail_thread), _moments(start), numbers(thread))


def _moments(microseconds: Sequence[float]) -> Ints:
    values = np.fromiter(microseconds, np.float64, len(microseconds))
    if not np.abs(values).max() < _LATEST_US:
        raise ValueError("a time is out of range")
    return np.rint(values * 1e3).astype(np.int64)


class _Identities:
    """Numbers as they are; words (`stream 7`) by their last number, or one of their own."""

    def __init__(self) -> None:
        self._own: dict[Any, int] = {}

    def numbers(self, values: Sequence[Any]) -> Ints:
        try:
            return np.fromiter(values, np.int64, len(values))
        except (TypeError, ValueError):
            return np.fromiter(map(self._number, values), np.int64, len(values))

    def _number(self, value: Any) -> int:
        if isinstance(value, int):
            return value
        last = str(value).rpartition(" ")[2]
        if last.isascii() and last.isdigit() and len(last) < 18:
            return int(last)
        return self._own.setdefault(value, -2 - len(self._own))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A large trace is a million objects that all live to the end: nothing to collect."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
