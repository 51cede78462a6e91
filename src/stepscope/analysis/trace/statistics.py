"""Kernels grouped by name, phase and part of the model, with the statistics of each group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analysis.kernel_names import CLASSES, Description, linear_role
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.nesting import NOBODY
from stepscope.analysis.trace.steps import Step, step_of
from stepscope.analysis.trace.summary import KernelRow, Use
from stepscope.analysis.trace.work import Work

_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_MOST_NUMBERS = 1 << 62
_GROUP = re.compile(r"group \d+(/|$)")


@dataclass(frozen=True)
class Instances:
    """Every kernel, or every call of an operator with its own time, that began within a step."""

    work: Work
    steps: tuple[Step, ...]
    index: Ints
    """Of the work it is, or begins with."""
    length: Ints
    step: Ints

    @cached_property
    def name(self) -> Ints:
        return self.work.name[self.index]

    @cached_property
    def kernel(self) -> Ints:
        """One number for all names that read the same once their template arguments are gone."""
        first: dict[str, int] = {}
        same = np.zeros(len(self.work.trace.names), np.int64)
        for name, about in self.work.descriptions.items():
            same[name] = first.setdefault(about.short, name)
        return same[self.name]

    @cached_property
    def phase(self) -> Ints:
        return self.work.phase[self.index]

    @cached_property
    def kind(self) -> Ints:
        return self.work.kind[self.index]

    @cached_property
    def module(self) -> Ints:
        """The number of the path without its numbers."""
        return self.modules[1][self.work.path[self.index]]

    @cached_property
    def modules(self) -> tuple[list[str], Ints]:
        """Paths without their numbers, and which of them each path is."""
        texts = [_without_numbers("/".join(path)) for path in self.work.host.paths]
        numbers = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return list(numbers), np.array([numbers[text] for text in texts], np.int64)

    def describe(self, name: int) -> Description:
        return self.work.descriptions[name]


def instances(work: Work, steps: tuple[Step, ...]) -> Instances:
    step = step_of(work, steps)
    length = work.end - work.start
    index = np.flatnonzero(step >= 0)
    if not work.on_device and len(index):
        # An operator that calls others has several stretches of its own.
        spans, first, group = np.unique(work.span[index], return_index=True, return_inverse=True)
        length = np.bincount(group, weights=length[index], minlength=len(spans)).astype(np.int64)
        index = index[first]
        return Instances(work, steps, index, length, step[index])
    return Instances(work, steps, index, length[index], step[index])


def groups(*keys: Ints) -> Iterator[tuple[tuple[int, ...], Ints]]:
    """Every combination of the keys that occurs, with where it does."""
    if not len(keys[0]):
        return
    joint = _joint(*keys)
    order = np.argsort(joint, kind="stable")
    edges = np.flatnonzero(np.diff(joint[order])) + 1
    for members in np.split(order, edges):
        yield tuple(int(key[members[0]]) for key in keys), members


def turns(*keys: Ints) -> Ints:
    """Whether each entry is the first (0), second (1), … of those with the same keys."""
    if not len(keys[0]):
        return keys[0]
    joint = _joint(*keys)
    order = np.argsort(joint, kind="stable")
    place = np.arange(len(order))
    begins = np.concatenate(([True], np.diff(joint[order]) != 0))
    turn = np.zeros(len(order), np.int64)
    turn[order] = place - np.maximum.accumulate(np.where(begins, place, 0))
    return turn


def _joint(*keys: Ints) -> Ints:
    """One number for each combination."""
    joint, most = np.zeros(len(keys[0]), np.int64), 1
    for key in keys:
        values = int(key.max()) + 2
        if most * values >= _MOST_NUMBERS:
            held, joint = np.unique(joint, return_inverse=True)
            most = len(held)
        joint, most = joint * values + key + 1, most * values
    return joint


def _without_numbers(path: str) -> str:
    """Blocks are alike and told together; the parameter groups of an optimizer are not."""
    return path if _GROUP.match(path) else _NUMBER.sub("*", path)


def kernel_rows(held: Instances) -> tuple[KernelRow, ...]:
    """The most time first."""
    steps = max(1, len(held.steps))
    rows = []
    for (name, phase, kind), members in groups(held.kernel, held.phase, held.kind):
        us = held.length[members] / 1e3
        about = held.describe(name)
        rows.append(
            KernelRow(
                kernel=about.short,
                library=about.library,
                kind=CLASSES[kind],
                unit=about.unit,
                phase=PHASES[phase],
                ms=round(float(us.sum()) / 1e3 / steps, 6),
                count=round(len(us) / steps, 4),
                average_us=round(float(us.mean()), 3),
                median_us=round(float(np.median(us)), 3),
                least_us=float(us.min()),
                most_us=float(us.max()),
                deviation_us=round(float(us.std(ddof=1)), 3) if len(us) > 1 else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.phase)))


def uses(held: Instances) -> tuple[Use, ...]:
    """The most time first."""
    steps = max(1, len(held.steps))
    work, texts = held.work, held.modules[0]
    operator, path = work.operator[held.index], work.path[held.index]
    found: dict[tuple[str, str, str, str, str], tuple[float, int, int]] = {}
    for (name, phase, module, called, kind), members in groups(
        held.kernel, held.phase, held.module, operator, held.kind
    ):
        about = held.describe(name)
        by = "" if called == NOBODY else work.trace.names[called]
        role = linear_role(about, PHASES[phase], by)
        key = (about.short, CLASSES[kind], PHASES[phase], texts[module], role)
        ms, count, places = found.get(key, (0.0, 0, 0))
        found[key] = (
            ms + float(held.length[members].sum()) / 1e6,
            count + len(members),
            max(places, len(np.unique(path[members]))),
        )
    rows = [
        Use(kernel=kernel, kind=kind, phase=phase, module=module, role=role,
            ms=round(ms / steps, 6), count=round(count / steps, 4), places=places)
        for (kernel, kind, phase, module, role), (ms, count, places) in found.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.module, row.phase)))
