"""Reader of the snapshots that `torch.cuda.memory._dump_snapshot` writes, without executing them.

A snapshot is a pickle, and loading one naively runs any code in it. `stepscope.pickles` loads only
what a snapshot consists of: lists, dictionaries, tuples, numbers and strings. Every number and
string is then checked where it is used.

The live blocks are reconstructed backwards from the end, where they are known. A history whose
buffer overflowed therefore gives correct numbers for the interval that it still covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import StepscopeError, no_such_file
from stepscope.files import read_limited
from stepscope.pickles import load_plain

_ALLOC, _FREE = "alloc", "free_completed"
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_ROUND = (1000, 1024)
"""Buffer sizes are round numbers; a complete history is unlikely to end at a multiple of one."""
_UNKNOWN = "allocated before the recording began"
_NOT_OF_THE_PROGRAM = ("/torch/", "/stepscope/measure/", "/stepscope/advisor/")
_NO_STACK = "no Python stack (autograd's thread: the backward)"
_MAX_SIZE = 1 << 50
_MAX_ADDRESS = 1 << 64
_MAX_TOTAL = 1 << 62
"""Limit of 64-bit totals: the sum of many valid sizes may exceed it."""
_MAX_DEVICES = 1 << 16
MAX_BYTES = 2 << 30
"""Size of a snapshot; loaded, it takes up to 20 times as much memory."""
_MAX_TEXT = 200


class CodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks allocated by one line of code that were live at the peak."""

    code: str
    bytes: int
    blocks: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a snapshot for the device with the most reserved memory."""

    device: int
    devices: int
    reserved: int
    active: int
    """Bytes in use when the snapshot was written."""
    events: int
    """Allocations and frees in the history."""
    full: bool
    """The buffer is full (a round number of entries): earlier events were overwritten."""
    peak: int
    """Most bytes in use within the history; without a history, those in use at the end."""
    largest: CodeLine | None
    """Largest single block at the peak."""
    places: tuple[CodeLine, ...]


def read_snapshot(path: Path) -> Snapshot:
    """Read and summarize a snapshot file."""
    if not path.is_file():
        raise no_such_file(path)
    try:
        data = read_limited(path, MAX_BYTES, "record a shorter history")
    except OSError as error:
        raise StepscopeError(f"cannot read {path}: {error.strerror}") from error
    return summarize(load_plain(data, str(path)), path.name)


def summarize(raw: Any, name: str = "the file") -> Snapshot:
    """Summarize a loaded snapshot; `name` is used in errors."""
    segments = raw.get("segments") if isinstance(raw, dict) else None
    if not isinstance(segments, list):
        raise StepscopeError(
            f"{name} has no segments, so it is not a snapshot in a supported format"
        )
    try:
        return _summary(segments, raw.get("device_traces") or [])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # A key may be arbitrarily long.
        raise StepscopeError(
            f"{name} has an unsupported format ({type(error).__name__}: {str(error)[:_MAX_TEXT]})",
            "it may come from a newer version of PyTorch",
        ) from error


def _number(entry: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a size, an address or a device number, checked against its limit."""
    value = entry[key] if default is None else entry.get(key, default)
    limit = _LIMITS[key]
    if type(value) is not int or not 0 <= value < limit:
        shown = f"{value:.3g}" if isinstance(value, float) else "out of range"
        raise ValueError(f"{key} is {shown}, not an integer from 0 to {limit - 1:,}")
    return value


_LIMITS = {
    "device": _MAX_DEVICES,
    "address": _MAX_ADDRESS,
    "addr": _MAX_ADDRESS,
    "size": _MAX_SIZE,
    "total_size": _MAX_SIZE,
}


def _text(value: Any) -> str:
    """Return the end of a name or a path, which is more specific than its beginning."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value[-_MAX_TEXT:]


def _summary(segments: Sequence[dict[str, Any]], traces: Sequence[Any]) -> Snapshot:
    reserved: dict[int, int] = {}
    for segment in segments:
        device = _number(segment, "device", 0)
        reserved[device] = reserved.get(device, 0) + _number(segment, "total_size")
    device = max(reserved, key=lambda index: reserved[index], default=0)
    lines = _Lines()
    live = _live_at_the_end([s for s in segments if s.get("device", 0) == device], lines)
    active = sum(size for size, _ in live.values())
    trace = traces[device] if device < len(traces) else []
    events = [event for event in trace if event["action"] in (_ALLOC, _FREE)]
    peak, live_at_peak = _peak(live, events, lines)
    if max(peak, *reserved.values(), 0) >= _MAX_TOTAL:
        raise ValueError("its blocks add up to more bytes than 64 bits can address")
    places = _by_code_line(live_at_peak.values())
    largest = max(live_at_peak.values(), default=None, key=lambda block: block[0])
    return Snapshot(
        device=device,
        devices=max(1, len(reserved)),
        reserved=reserved.get(device, 0),
        active=active,
        events=len(events),
        full=any(trace and len(trace) % size == 0 for size in _ROUND),
        peak=peak,
        largest=None if largest is None else CodeLine(code=largest[1], bytes=largest[0], blocks=1),
        places=places,
    )


Blocks = dict[int, tuple[int, str]]
"""Bytes and line of code by address."""


def _live_at_the_end(segments: Sequence[dict[str, Any]], lines: _Lines) -> Blocks:
    live: Blocks = {}
    for segment in segments:
        address = _number(segment, "address")
        for block in segment["blocks"]:
            block_address = _number(block, "address", address)
            if block["state"] in _LIVE:
                live[block_address] = (_number(block, "size"), lines.of(block.get("frames")))
            address = block_address + _number(block, "size")
    return live


def _peak(live: Blocks, events: Sequence[dict[str, Any]], lines: _Lines) -> tuple[int, Blocks]:
    """Return the peak and its blocks, by undoing the events backwards from the end."""
    codes, still_open = _allocated_by(events, lines)
    live = {at: (size, still_open.get(at, code)) for at, (size, code) in live.items()}
    now = dict(live)
    total = peak = sum(size for size, _ in now.values())
    at = len(events)
    for index in range(len(events) - 1, -1, -1):
        total += _undo(events[index], now, codes[index])
        if total > peak:
            peak, at = total, index
    highest = dict(live)
    for index in range(len(events) - 1, at - 1, -1):
        _undo(events[index], highest, codes[index])
    return peak, highest


def _allocated_by(
    events: Sequence[dict[str, Any]], lines: _Lines
) -> tuple[list[str], dict[int, str]]:
    """Return the line that allocated the block of each event, because addresses are reused, and
    the lines of the blocks that were not freed."""
    open_blocks: dict[int, str] = {}
    codes = []
    for event in events:
        if event["action"] == _ALLOC:
            code = lines.of(event.get("frames"), _NO_STACK)
            open_blocks[_number(event, "addr")] = code
            codes.append(code)
        else:
            codes.append(open_blocks.pop(_number(event, "addr"), _UNKNOWN))
    return codes, open_blocks


def _undo(event: dict[str, Any], now: Blocks, code: str) -> int:
    address, size = _number(event, "addr"), _number(event, "size")
    if event["action"] == _ALLOC:
        gone = now.pop(address, None)
        return 0 if gone is None else -gone[0]
    now[address] = (size, code)
    return size


class _Lines:
    """Line of code for a stack, cached because many events share one stack."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def of(self, frames: Any, without: str = _UNKNOWN) -> str:
        """Return the innermost line outside of torch and of the instruments of `inspect`, else the
        innermost line; `without` if there is no stack."""
        if not frames:
            return without
        line = self._known.get(id(frames))
        if line is None:
            line = self._known[id(frames)] = _line(frames)
        return line


def _line(frames: Sequence[dict[str, Any]]) -> str:
    for frame in frames:
        file = _text(frame["filename"])
        if file.endswith(".py") and not any(folder in file for folder in _NOT_OF_THE_PROGRAM):
            line_number = frame["line"]
            if type(line_number) is not int or not abs(line_number) < _MAX_SIZE:
                raise ValueError("the line of a frame is not a line number")
            return f"{file.rpartition('/')[2]}:{line_number} {_text(frame['name'])}"
    return _text(frames[0]["name"])


def _by_code_line(blocks: Any) -> tuple[CodeLine, ...]:
    sizes: dict[str, list[int]] = {}
    for size, code in blocks:
        sizes.setdefault(code, []).append(size)
    code_lines = [CodeLine(code=code, bytes=sum(s), blocks=len(s)) for code, s in sizes.items()]
    return tuple(sorted(code_lines, key=lambda line: -line.bytes))
