"""Reader of Chrome traces as torch.profiler writes them; decodes only the fields it needs.

Times are fractional microseconds and become integer nanoseconds. Counters, drawing instructions of
the viewer and Python frames are skipped, except for long frames and the module calls that
`with_stack=True` records. A truncated file is read up to the break.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stepscope.analysis.trace.chunks import open_end, possible_cuts, without_tail
from stepscope.analysis.trace.model import (
    NO_FLOWS,
    NO_NUMBER,
    Calls,
    Flows,
    Frames,
    Ints,
    Message,
    Messages,
    Names,
    Process,
    Trace,
    ints,
    ordered_kernels,
    ordered_spans,
)
from stepscope.errors import StepscopeError

MAX_OBJECTS = 12_000_000
"""Limit of JSON objects: an event is one, its arguments are another."""
_MAX_US = 9.0e15
"""Limit of times: beyond it nanoseconds do not fit into 64 bits."""

Identity = int | str | None


class _Arguments(msgspec.Struct, gc=False):
    correlation: int = NO_NUMBER
    device: Identity = 0
    stream: Identity = 0
    sequence: int = msgspec.field(default=NO_NUMBER, name="Sequence number")
    forward_thread: int = msgspec.field(default=0, name="Fwd thread id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default="", name="Process Group Name")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")
    dtype: Any = None
    elements_in: Any = msgspec.field(default=0, name="In msg nelems")
    elements_out: Any = msgspec.field(default=0, name="Out msg nelems")

    def message(self) -> Message:
        elements = [n for n in (self.elements_in, self.elements_out) if isinstance(n, int)]
        size = _DTYPE_BYTES.get(str(self.dtype), 0)
        group = f"{self.group} {self.ranks}".strip()
        return Message(str(self.collective), group, max([0, *elements]) * size)


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
    distributedInfo: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815

    def header(self) -> _Header:
        job = self.distributedInfo if isinstance(self.distributedInfo, dict) else {}
        numbers = (job.get("rank"), job.get("world_size"), self.baseTimeNanoseconds)
        rank, world_size, origin = (_count(number) for number in numbers)
        device = next(iter(self.deviceProperties), _Device())
        return _Header(device, Process(rank, world_size, origin or 0))


class _Header(NamedTuple):
    device: _Device = _Device()
    process: Process = Process()


def _count(number: Any) -> int | None:
    return number if isinstance(number, int) and 0 <= number < 1 << 62 else None


_Fields = tuple[tuple[str, ...], tuple[str, ...]]
_SPAN: _Fields = (("tid",), ("sequence", "forward_thread"))
_FIELDS: dict[str, _Fields] = {
    "kernel": ((), ("correlation", "device", "stream")),
    "call": (("tid",), ("correlation",)),
    "operator": _SPAN,
    "range": _SPAN,
    "frame": (("tid",), ()),
}
"""Columns of each kind besides times and name: fields of the event, and of its arguments."""
_End = tuple[str, Identity | float, Identity, float]
_KINDS = {
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
    "Kernel": "kernel",
    "Memcpy": "kernel",
    "Memset": "kernel",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "xpu_runtime": "call",
    "xpu_driver": "call",
    "privateuse1_runtime": "call",
    "privateuse1_driver": "call",
    "Runtime": "call",
    "cpu_op": "operator",
    "Operator": "operator",
    "user_annotation": "range",
}
_OTHER_DEVICES = {
    "mtia_ccp_events": "an MTIA accelerator",
    "hpu_op": "a Gaudi accelerator",
    "glow_runtime": "a Glow device",
}
"""Devices whose events have no launches, so that their time cannot be attributed."""
_DTYPE_BYTES = {
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}
_DESCRIBED = b'"Collective name"'
_FLOW = "fwdbwd"
_PYTHON = "python_function"
_MODULE = "nn.Module: "
_LONG_FRAME_US = 500.0
"""Minimum length of Python frames: shorter ones cannot fill half of a long gap."""
_MODULE_NUMBER = re.compile(r"_(\d+)$")
_MARK = re.compile(r"ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)")
"""Ranges of the profiler itself, which older versions write as operators."""
_FILE = msgspec.json.Decoder(_File)
_LIST = msgspec.json.Decoder(list[_Event])


def read_chrome(data: bytes | bytearray, where: str) -> Trace:
    """Decode the trace in these bytes; `where` names them in an error."""
    if _objects(data) > MAX_OBJECTS:
        raise StepscopeError(
            f"{where} has more than {MAX_OBJECTS // 2:,} events", "trace fewer steps"
        )
    with _no_collection():
        try:
            events, header = _in_chunks(data) or _at_once(data, where)
            if events.other_device and not events.count("kernel"):
                raise StepscopeError(
                    f"{where} is a trace of {events.other_device}, whose events name no launch:"
                    " no time can be attributed to operators"
                )
            if not events.count("kernel") and not events.count("operator"):
                raise StepscopeError(
                    f"{where} has no kernels and no operators",
                    "was the profiler set up to record CPU or CUDA activities?",
                )
            return events.trace(header)
        except (ValueError, OverflowError, TypeError) as error:
            raise StepscopeError(f"{where} has an invalid time or number: {error}") from error


def _objects(data: bytes | bytearray) -> int:
    """Upper bound of the number of objects in these bytes: braces inside names count too."""
    everything = np.frombuffer(data, np.uint8)
    step = 1 << 20
    parts = (everything[at : at + step] for at in range(0, len(everything), step))
    return sum(int(np.count_nonzero(part == ord("{"))) for part in parts)


_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _in_chunks(data: bytes | bytearray) -> tuple[_Events, _Header] | None:
    """Decode chunk by chunk; None if the layout does not allow it, or a chunk is invalid."""
    for cut in possible_cuts(data):
        try:
            inside, header = _decoded(cut.around())
        except _FAULTS:
            continue
        if inside:
            return None
        events = _Events()
        try:
            for chunk in cut.chunks():
                events.add(_LIST.decode(chunk), described=_DESCRIBED in chunk)
        except _FAULTS:
            return None
        return events, header
    return None


def _up_to_break(data: bytes | bytearray) -> tuple[_Events, _Header] | None:
    """Decode the events of a truncated file; None if it is damaged before its end."""
    cut = open_end(data)
    if cut is None:
        return None
    events = _Events(truncated=True)
    try:
        _, header = _decoded(cut.around() + (b"]" if cut.bare else b"]}"))
        for chunk, is_last in cut.chunks_and_last():
            if not is_last:
                events.add(_LIST.decode(chunk))
                continue
            for shorter in without_tail(chunk):
                try:
                    events.add(_LIST.decode(shorter))
                except _FAULTS:
                    continue
                break
    except _FAULTS:
        return None
    return (events, header) if events.count("kernel") + events.count("operator") else None


def _at_once(data: bytes | bytearray, where: str) -> tuple[_Events, _Header]:
    try:
        decoded, header = _decoded(data)
    except RecursionError:
        raise StepscopeError(f"{where} is nested too deeply to be a trace") from None
    except msgspec.ValidationError as error:
        raise StepscopeError(f"{where} is not a trace of torch.profiler: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        decoded_part = _up_to_break(data)
        if decoded_part is not None:
            return decoded_part
        raise StepscopeError(
            f"{where} is not complete JSON: {error}", "was the trace written completely?"
        ) from error
    events = _Events()
    events.add(decoded)
    return events, header


def _decoded(data: bytes | bytearray) -> tuple[list[_Event], _Header]:
    if bytes(data[:256]).lstrip()[:1] == b"[":
        return _LIST.decode(data), _Header()
    file = _FILE.decode(data)
    return file.traceEvents, file.header()


class _Events:
    """Columns of the needed fields, by kind of event."""

    def __init__(self, *, truncated: bool = False) -> None:
        self._truncated = truncated
        self._names = Names()
        self._identity = _Identities()
        self._parts: dict[str, list[list[Ints]]] = {kind: [] for kind in _FIELDS}
        self._ends: list[_End] = []
        self._messages = Messages({}, {})
        self.other_device = ""

    def count(self, kind: str) -> int:
        return sum(len(part[0]) for part in self._parts[kind])

    def add(self, events: list[_Event], *, described: bool = True) -> None:
        """Add events; `described` is False if none of them describes a collective."""
        by_kind: dict[str, list[_Event]] = {kind: [] for kind in self._parts}
        appender = {category: by_kind[kind].append for category, kind in _KINDS.items()}.get
        for event in events:
            append = appender(event.cat)
            if append is not None:
                if event.ph == "X":
                    append(event)
            elif event.cat == _FLOW:
                self._ends.append((event.ph, event.id, event.tid, event.ts))
            elif event.cat == _PYTHON and event.ph == "X":
                if event.name.startswith(_MODULE):
                    # `nn.Module: Linear_3` is the Linear module with the number 3.
                    event.name = _MODULE_NUMBER.sub(r" \1", event.name.removeprefix(_MODULE))
                    by_kind["range"].append(event)
                elif event.dur >= _LONG_FRAME_US:
                    by_kind["frame"].append(event)
            elif event.cat in _OTHER_DEVICES:
                self.other_device = _OTHER_DEVICES[event.cat]
        for kind, members in by_kind.items():
            if members:
                columns = self._columns(members, *_FIELDS[kind])
                self._parts[kind].append(columns)
                if described and kind in ("kernel", "operator"):
                    self._describe(kind, members, columns)

    def _columns(
        self, events: list[_Event], fields: Sequence[str], arguments: Sequence[str]
    ) -> list[Ints]:
        no_arguments = _Arguments()
        event_args = [event.args or no_arguments for event in events]
        start = _moments([event.ts for event in events])
        return [
            start,
            start + np.maximum(_moments([event.dur for event in events]), 0),
            self._names.numbers([event.name for event in events]),
            *(self._identity.numbers(list(map(attrgetter(name), events))) for name in fields),
            *(
                self._identity.numbers(list(map(attrgetter(name), event_args)))
                for name in arguments
            ),
        ]

    def _describe(self, kind: str, events: list[_Event], columns: list[Ints]) -> None:
        """Keep the descriptions of collectives."""
        start, key = columns[0], columns[3]
        of = self._messages.of_kernel if kind == "kernel" else self._messages.of_span
        for index, event in enumerate(events):
            if event.args is not None and event.args.collective:
                of[int(key[index]), int(start[index])] = event.args.message()

    def _concatenated(self, *kinds: str) -> tuple[Ints, ...]:
        parts = [part for kind in kinds for part in self._parts[kind]]
        if not parts:
            return (ints(),) * (3 + sum(map(len, _FIELDS[kinds[0]])))
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def trace(self, header: _Header) -> Trace:
        start, end, name, correlation, device, stream = self._concatenated("kernel")
        kernels = ordered_kernels(
            name=name, start=start, end=end, device=device, stream=stream, correlation=correlation
        )
        start, end, name, thread, correlation = self._concatenated("call")
        calls = Calls(name, start, end, thread, correlation)
        start, end, name, thread, sequence, back = self._concatenated("operator", "range")
        frames = Frames(*self._concatenated("frame"))
        is_range = np.arange(len(start)) >= self.count("operator")
        names = self._names.all()
        marks = [n for n in np.unique(name[~is_range]).tolist() if _MARK.match(names[n])]
        spans = ordered_spans(
            name=name,
            start=start,
            end=end,
            thread=thread,
            is_range=is_range | np.isin(name, marks),
            sequence=sequence,
            in_backward=back > 0,
        )
        return Trace(
            "torch.profiler",
            names,
            kernels,
            calls,
            spans,
            header.device.name,
            self._flows(),
            capability=header.device.capability(),
            truncated=self._truncated,
            frames=frames,
            messages=self._messages,
            process=header.process,
        )

    def _flows(self) -> Flows:
        tails = {flow: (thread, ts) for ph, flow, thread, ts in self._ends if ph == "s"}
        pairs = [
            (*tails[flow], thread, ts)
            for ph, flow, thread, ts in self._ends
            if ph == "f" and flow in tails
        ]
        if not pairs:
            return NO_FLOWS
        tail_thread, tail, thread, start = zip(*pairs, strict=True)
        numbers = self._identity.numbers
        return Flows(_moments(tail), numbers(tail_thread), _moments(start), numbers(thread))


def _moments(microseconds: Sequence[float]) -> Ints:
    values = np.fromiter(microseconds, np.float64, len(microseconds))
    if not np.abs(values).max() < _MAX_US:
        raise ValueError("a time is out of range")
    return np.rint(values * 1e3).astype(np.int64)


class _Identities:
    """Maps identifiers to numbers: integers unchanged, strings (`stream 7`) by their last number or
    a new one."""

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
    """Disable garbage collection: all of the million objects of a large trace stay alive."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
