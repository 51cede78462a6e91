"""A step as a tree of modules and operators, for a flame graph and for speedscope."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from stepscope.analysis.lines.facts import Lines
    from stepscope.analysis.trace.summary import Summary
    from stepscope.records.memory import SavedTensor

_SPEEDSCOPE_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_STEP = "step"


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the tree: its value includes its children's."""

    name: str
    value: float
    children: tuple[Frame, ...] = ()


class Weighted(msgspec.Struct, frozen=True):
    """A value at the end of a path from the root."""

    path: tuple[str, ...]
    value: float


def time_stacks(summary: Summary) -> Iterator[Weighted]:
    """Milliseconds by phase, module and kernel; idle time by its cause."""
    for use in summary.uses:
        if use.ms > 0:
            modules = _modules(use.module)
            yield Weighted((use.phase or "outside", *modules, use.kernel), use.ms)
    for line in summary.lines:
        if line.phase == "idle" and line.ms > 0:
            yield Weighted(("idle", line.kind), line.ms)


def memory_stacks(saved: Sequence[SavedTensor]) -> Iterator[Weighted]:
    """Bytes saved for backward by module and operator, the largest shape last."""
    for tensor in saved:
        shape = "×".join(map(str, tensor.shape))
        total = float(tensor.bytes * tensor.times)
        if total > 0:
            path = (*_modules(tensor.module), tensor.operator, f"{shape} {tensor.dtype}".strip())
            yield Weighted(path, total)


def line_stacks(lines: Lines, *, device: bool = False) -> Iterator[Weighted]:
    """Milliseconds of the CPU, or of the device, by the calls that lead to a line of code."""
    for site in lines.sites:
        value = site.device_ms if device else site.host_ms
        if value > 0 and site.stack:
            places = (lines.places[index] for index in site.stack)
            yield Weighted(tuple(f"{one.where} {one.code}".strip() for one in places), value)


def _modules(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.replace("/", ".").split(".") if part and part != "*")


def tree(stacks: Iterable[Weighted], name: str = _STEP) -> Frame:
    """The stacks merged by their common beginnings; the largest child first."""
    return _frame(name, [(stack.path, stack.value) for stack in stacks])


def _frame(name: str, stacks: Sequence[tuple[tuple[str, ...], float]]) -> Frame:
    below: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    for path, value in stacks:
        if path:
            below.setdefault(path[0], []).append((path[1:], value))
    children = sorted(
        (_frame(child, several) for child, several in below.items()), key=lambda frame: -frame.value
    )
    return Frame(
        name=name, value=sum(value for _, value in stacks), children=tuple(children)
    )  # fmt: skip


class Profile(msgspec.Struct, frozen=True):
    """Stacks that one unit measures: `milliseconds` or `bytes`."""

    name: str
    unit: str
    stacks: tuple[Weighted, ...]


def speedscope(profiles: Sequence[Profile], name: str) -> dict[str, Any]:
    """Sampled profiles in speedscope's file format."""
    paths = (stack.path for profile in profiles for stack in profile.stacks)
    frames = list(dict.fromkeys(frame for path in paths for frame in path))
    index = {frame: position for position, frame in enumerate(frames)}
    return {
        "$schema": _SPEEDSCOPE_SCHEMA,
        "exporter": "stepscope",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": [
            {
                "type": "sampled",
                "name": profile.name,
                "unit": profile.unit,
                "startValue": 0,
                "endValue": sum(stack.value for stack in profile.stacks),
                "samples": [[index[frame] for frame in stack.path] for stack in profile.stacks],
                "weights": [stack.value for stack in profile.stacks],
            }
            for profile in profiles
        ],
    }
