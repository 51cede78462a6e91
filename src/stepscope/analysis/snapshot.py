"""Reads the snapshots that `torch.cuda.memory._dump_snapshot` writes, without running them.

A snapshot is a pickle, and loading one naively runs whatever its author put in. Here an unpickler
loads it that knows no global at all: plain lists, dictionaries, numbers and strings are what a
snapshot consists of.

What was live is worked out backwards from the end, where it is known for certain. So a history
whose buffer overflowed gives right numbers for the stretch that it still covers, and none before.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import StepscopeError, no_such_file

_ALLOC, _FREE = "alloc", "free_completed"
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_ROUND = (1000, 1024)
"""Buffers are sized by people: that a whole history ends at a multiple by chance is unlikely."""
_UNKNOWN = "allocated before the recording began"
_NOT_OF_THE_PROGRAM = ("/torch/", "/stepscope/measure/", "/stepscope/scope/")
_NO_STACK = "no Python stack (autograd's thread: the backward)"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that one line of code held at the peak."""

    code: str
    bytes: int
    blocks: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot says of the device that holds most."""

    device: int
    devices: int
    reserved: int
    active: int
    """In use when it was written."""
    events: int
    """Allocations and frees that the history covers."""
    full: bool
    """Its buffer has a round number of entries, all used: earlier ones were overwritten."""
    peak: int
    """The most in use within the history; without one, what is in use at the end."""
    largest: Place | None
    """The largest single block at the peak."""
    places: tuple[Place, ...]


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise StepscopeError(
            f"the snapshot wants to load {module_name}.{global_name}, which no snapshot needs",
            "do not open it elsewhere: loading it could run code",
        )

    def persistent_load(self, pid: Any) -> Any:
        raise StepscopeError(f"the snapshot refers to something outside of it ({pid!r:.40})")


def read_snapshot(path: Path) -> Snapshot:
    try:
        with path.open("rb") as file:
            raw = _PlainUnpickler(file).load()
    except StepscopeError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise no_such_file(path) from None
    except OSError as error:
        raise StepscopeError(f"cannot read {path}: {error.strerror}") from error
    # A damaged pickle can fail in any way that its opcodes allow.
    except Exception as error:
        raise StepscopeError(
            f"{path} is damaged or no snapshot: {type(error).__name__}", "write it again"
        ) from error
    return summarize(raw, path.name)


def summarize(raw: Any, name: str = "the file") -> Snapshot:
    segments = raw.get("segments") if isinstance(raw, dict) else None
    if not isinstance(segments, list):
        raise StepscopeError(
            f"{name} has no segments, so it is no snapshot in a format that is known here"
        )
    try:
        return _summary(segments, raw.get("device_traces") or [])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StepscopeError(
            f"{name} has a format that is not known here ({type(error).__name__}: {error})",
            "it may come from a newer torch",
        ) from error


def _summary(segments: Sequence[dict[str, Any]], traces: Sequence[Any]) -> Snapshot:
    reserved: dict[int, int] = {}
    for segment in segments:
        device = int(segment.get("device", 0))
        reserved[device] = reserved.get(device, 0) + int(segment["total_size"])
    device = max(reserved, key=lambda number: reserved[number], default=0)
    live = _live_at_the_end([s for s in segments if int(s.get("device", 0)) == device])
    active = sum(size for size, _ in live.values())
    trace = traces[device] if device < len(traces) else []
    events = [event for event in trace if event["action"] in (_ALLOC, _FREE)]
    peak, held = _peak(live, events)
    places = _by_place(held.values())
    largest = max(held.values(), default=None, key=lambda block: block[0])
    return Snapshot(
        device=device,
        devices=max(1, len(reserved)),
        reserved=reserved.get(device, 0),
        active=active,
        events=len(events),
        full=any(trace and len(trace) % size == 0 for size in _ROUND),
        peak=peak,
        largest=None if largest is None else Place(code=largest[1], bytes=largest[0], blocks=1),
        places=places,
    )


Blocks = dict[int, tuple[int, str]]
"""By address: bytes and the line of code."""


def _live_at_the_end(segments: Sequence[dict[str, Any]]) -> Blocks:
    live: Blocks = {}
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            place = int(block.get("address", address))
            if block["state"] in _LIVE:
                live[place] = (int(block["size"]), _line(block.get("frames") or ()))
            address = place + int(block["size"])
    return live


def _peak(live: Blocks, events: Sequence[dict[str, Any]]) -> tuple[int, Blocks]:
    """Backwards from the end: undoing an allocation frees it, undoing a free brings it back."""
    codes, still_open = _allocated_by(events)
    live = {at: (size, still_open.get(at, code)) for at, (size, code) in live.items()}
    now = dict(live)
    total = peak = sum(size for size, _ in now.values())
    at = len(events)
    for place in range(len(events) - 1, -1, -1):
        total += _undo(events[place], now, codes[place])
        if total > peak:
            peak, at = total, place
    highest = dict(live)
    for place in range(len(events) - 1, at - 1, -1):
        _undo(events[place], highest, codes[place])
    return peak, highest


def _allocated_by(events: Sequence[dict[str, Any]]) -> tuple[list[str], dict[int, str]]:
    """Of each event the line that allocated its block, since addresses are used again and again;
    and those of the blocks that were not freed."""
    open_blocks: dict[int, str] = {}
    codes = []
    for event in events:
        if event["action"] == _ALLOC:
            open_blocks[int(event["addr"])] = _line(event.get("frames") or (), _NO_STACK)
            codes.append(open_blocks[int(event["addr"])])
        else:
            codes.append(open_blocks.pop(int(event["addr"]), _UNKNOWN))
    return codes, open_blocks


def _undo(event: dict[str, Any], now: Blocks, code: str) -> int:
    address, size = int(event["addr"]), int(event["size"])
    if event["action"] == _ALLOC:
        gone = now.pop(address, None)
        return 0 if gone is None else -gone[0]
    now[address] = (size, code)
    return size


def _line(frames: Sequence[dict[str, Any]], without: str = _UNKNOWN) -> str:
    """The innermost line outside of torch and of the instruments that `inspect` runs a step under,
    else the innermost; `without` where there is none."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and not any(folder in file for folder in _NOT_OF_THE_PROGRAM):
            return f"{file.rpartition('/')[2]}:{frame['line']} {frame['name']}"
    if frames:
        return str(frames[0]["name"])
    return without


def _by_place(blocks: Any) -> tuple[Place, ...]:
    found: dict[str, list[int]] = {}
    for size, code in blocks:
        found.setdefault(code, []).append(size)
    places = [Place(code=code, bytes=sum(s), blocks=len(s)) for code, s in found.items()]
    return tuple(sorted(places, key=lambda place: -place.bytes))
