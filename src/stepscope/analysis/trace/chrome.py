"""Chrome traces as torch.profiler writes them, decoded by the fields that are needed.

Times are microseconds with a fraction; they become whole nanoseconds. Python frames, counters and
the drawing instructions of the viewer are passed over while decoding.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from stepscope.analysis.trace.model import (
    NO_ARROWS,
    NO_CALLS,
    NO_KERNELS,
    NO_NUMBER,
    NO_SPANS,
    Arrows,
    Calls,
    Ints,
    Kernels,
    Names,
    Spans,
    Trace,
    ordered_kernels,
    ordered_spans,
)
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


class _File(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815


_Flat = list[Any]
"""The fields of one event after those of the other: no object for an event that is passed on."""
_FIELDS = 9
_End = tuple[str, Identity | float, Identity, float]
_KINDS = {
    "kernel": "kernel", "gpu_memcpy": "kernel", "gpu_memset": "kernel",
    "Kernel": "kernel", "Memcpy": "kernel", "Memset": "kernel",
    "cuda_runtime": "call", "cuda_driver": "call", "Runtime": "call",
    "cpu_op": "operator", "Operator": "operator",
    "user_annotation": "range",
}  # fmt: skip
_ARROW = "fwdbwd"
_FILE = msgspec.json.Decoder(_File)
_LIST = msgspec.json.Decoder(list[_Event])


def read_chrome(data: bytes | bytearray, where: str) -> Trace:
    """The trace in these bytes; `where` names them in an error."""
    if _objects(data) > MOST_OBJECTS:
        raise StepscopeError(
            f"{where} has more than {MOST_OBJECTS // 2:,} events", "trace fewer steps"
        )
    with _no_collection():
        events, device_name = _decoded(data, where)
        held, ends = _split(events)
        del events
        if not held["kernel"] and not held["operator"]:
            raise StepscopeError(
                f"{where} has no kernels and no operators",
                "was the profiler told to record CPU or CUDA activities?",
            )
        names = Names()
        try:
            kernels = _kernels(held.pop("kernel"), names)
            calls = _calls(held.pop("call"), names)
            spans = _spans(held.pop("operator"), held.pop("range"), names)
            arrows = _arrows(ends)
        except (ValueError, OverflowError, TypeError) as error:
            raise StepscopeError(f"{where} has a time or number that is none: {error}") from error
    return Trace("torch.profiler", names.all(), kernels, calls, spans, device_name, arrows)


def _objects(data: bytes | bytearray) -> int:
    """How many objects begin in these bytes, at most: braces inside of names count too."""
    whole = np.frombuffer(data, np.uint8)
    step = 1 << 20
    parts = (whole[at : at + step] for at in range(0, len(whole), step))
    return sum(int(np.count_nonzero(part == ord("{"))) for part in parts)


def _decoded(data: bytes | bytearray, where: str) -> tuple[list[_Event], str]:
    try:
        if bytes(data[:256]).lstrip()[:1] == b"[":
            return _LIST.decode(data), ""
        file = _FILE.decode(data)
    except RecursionError:
        raise StepscopeError(f"{where} is nested too deeply to be a trace") from None
    except msgspec.ValidationError as error:
        raise StepscopeError(f"{where} is not a trace of torch.profiler: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StepscopeError(
            f"{where} is not JSON to its end: {error}", "was the trace written to its end?"
        ) from error
    return file.traceEvents, next((d.name for d in file.deviceProperties), "")


def _split(events: list[_Event]) -> tuple[dict[str, _Flat], list[_End]]:
    """What is needed of each event by its kind, in one pass while the event is at hand."""
    held: dict[str, _Flat] = {kind: [] for kind in _KINDS.values()}
    ends: list[_End] = []
    keep = {category: held[kind].extend for category, kind in _KINDS.items()}.get
    nothing = _Arguments()
    for event in events:
        add = keep(event.cat)
        if add is not None:
            if event.ph == "X":
                own = event.args or nothing
                add(
                    (event.ts, event.dur, event.name, event.tid, own.correlation, own.device,
                     own.stream, own.sequence, own.forward_thread)
                )  # fmt: skip
        elif event.cat == _ARROW:
            ends.append((event.ph, event.id, event.tid, event.ts))
    return held, ends


def _arrows(ends: list[_End]) -> Arrows:
    tails = {number: (thread, ts) for ph, number, thread, ts in ends if ph == "s"}
    whole = [
        (*tails[number], thread, ts)
        for ph, number, thread, ts in ends
        if ph == "f" and number in tails
    ]
    if not whole:
        return NO_ARROWS
    tail_thread, tail, thread, start = zip(*whole, strict=True)
    return Arrows(_moments(tail), _identities(tail_thread), _moments(start), _identities(thread))


def _kernels(rows: _Flat, names: Names) -> Kernels:
    if not rows:
        return NO_KERNELS
    ts, dur, name, _, correlation, device, stream, _, _ = _columns(rows)
    start, end = _times(ts, dur)
    return ordered_kernels(
        name=names.numbers(name),
        start=start,
        end=end,
        device=_identities(device),
        stream=_identities(stream),
        correlation=_column(correlation),
    )


def _calls(rows: _Flat, names: Names) -> Calls:
    if not rows:
        return NO_CALLS
    ts, dur, name, tid, correlation, *_ = _columns(rows)
    start, end = _times(ts, dur)
    return Calls(names.numbers(name), start, end, _identities(tid), _column(correlation))


def _spans(operators: _Flat, ranges: _Flat, names: Names) -> Spans:
    rows = operators + ranges
    if not rows:
        return NO_SPANS
    ts, dur, name, tid, _, _, _, sequence, forward_thread = _columns(rows)
    start, end = _times(ts, dur)
    return ordered_spans(
        name=names.numbers(name),
        start=start,
        end=end,
        thread=_identities(tid),
        is_range=np.arange(len(ts)) >= len(operators) // _FIELDS,
        sequence=_column(sequence),
        in_backward=_column(forward_thread) > 0,
    )


def _columns(rows: _Flat) -> Iterator[_Flat]:
    return (rows[field::_FIELDS] for field in range(_FIELDS))


def _times(ts: Sequence[float], dur: Sequence[float]) -> tuple[Ints, Ints]:
    start = _moments(ts)
    return start, start + np.maximum(_moments(dur), 0)


def _moments(microseconds: Sequence[float]) -> Ints:
    values = np.fromiter(microseconds, np.float64, len(microseconds))
    if not np.abs(values).max() < _LATEST_US:
        raise ValueError("a time is out of range")
    return np.rint(values * 1e3).astype(np.int64)


def _column(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _identities(values: Sequence[Any]) -> Ints:
    """Numbers as they are; words (`stream 7`) by their last number, or one of their own."""
    try:
        return _column(values)
    except (TypeError, ValueError):
        own: dict[Any, int] = {}
        return _column([own.setdefault(v, _last_number(v, -2 - len(own))) for v in values])


def _last_number(word: object, otherwise: int) -> int:
    last = str(word).rpartition(" ")[2]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 18 else otherwise


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
