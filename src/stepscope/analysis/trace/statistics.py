"""Kernels grouped by name, phase and part of the model, with the statistics of each group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.kernels.names import CLASSES, Description, linear_role
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.nesting import NOBODY
from stepscope.analysis.trace.steps import Step, step_of
from stepscope.analysis.trace.summary import KernelRow, Use
from stepscope.analysis.trace.work import DeviceWork

Floats: TypeAlias = NDArray[np.float64]
_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_MOST_NUMBERS = 1 << 62
_GROUP = re.compile(r"group \d+(/|$)")


@dataclass(frozen=True)
class Instances:
    """Every kernel, or every call of an operator with its own time, that began within a step."""

    work: DeviceWork
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


def instances(work: DeviceWork, steps: tuple[Step, ...]) -> Instances:
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


@dataclass(frozen=True)
class Groups:
    """Entries with the same keys, with statistics of all groups at once: there may be as many
    groups as entries."""

    order: Ints
    """The entries, group by group."""
    first: Ints
    """Where each group begins in `order`."""

    @property
    def member(self) -> Ints:
        """One entry of each group."""
        return self.order[self.first]

    @cached_property
    def count(self) -> Ints:
        return np.diff(np.append(self.first, len(self.order)))

    @cached_property
    def of_entry(self) -> Ints:
        """The group of each entry."""
        of = np.empty(len(self.order), np.int64)
        of[self.order] = np.repeat(np.arange(len(self.first)), self.count)
        return of

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.add.reduceat(values[self.order], self.first)

    def extremes(self, values: Ints) -> tuple[Ints, Ints]:
        ordered = values[self.order]
        return np.minimum.reduceat(ordered, self.first), np.maximum.reduceat(ordered, self.first)

    def median(self, values: NDArray[Any]) -> Floats:
        ordered = values[np.lexsort((values, self.of_entry))]
        upper = self.first + self.count // 2
        lower = self.first + (self.count - 1) // 2
        middle: Floats = (ordered[lower] + ordered[upper]) / 2
        return middle

    def deviation(self, values: NDArray[Any]) -> Floats:
        """The sample standard deviation; 0 for a single entry."""
        away = values - (self.sum(values) / self.count)[self.of_entry]
        return np.sqrt(self.sum(away * away) / np.maximum(1, self.count - 1))

    def distinct(self, key: Ints) -> Ints:
        """How many values of the key occur in each group."""
        pairs = group(self.of_entry, key)
        return np.bincount(self.of_entry[pairs.member], minlength=len(self.first))


def group(*keys: Ints) -> Groups:
    """Every combination of the keys that occurs."""
    if not len(keys[0]):
        return Groups(keys[0], keys[0])
    joint = _joint(*keys)
    order = np.argsort(joint, kind="stable")
    return Groups(order, np.flatnonzero(np.append(True, np.diff(joint[order]) != 0)))


def occurrence(*keys: Ints) -> Ints:
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
            known, joint = np.unique(joint, return_inverse=True)
            most = len(known)
        joint, most = joint * values + key + 1, most * values
    return joint


def _without_numbers(path: str) -> str:
    """Blocks are alike and told together; the parameter groups of an optimizer are not."""
    return path if _GROUP.match(path) else _NUMBER.sub("*", path)


def kernel_rows(held: Instances) -> tuple[KernelRow, ...]:
    """The most time first."""
    if not len(held.index):
        return ()
    steps = max(1, len(held.steps))
    of = group(held.kernel, held.phase, held.kind)
    total, (least, most) = of.sum(held.length), of.extremes(held.length)
    columns = (
        held.kernel[of.member], held.phase[of.member], held.kind[of.member],
        np.round(total / 1e6 / steps, 6), np.round(of.count / steps, 4),
        np.round(total / of.count / 1e3, 3), np.round(of.median(held.length) / 1e3, 3),
        least / 1e3, most / 1e3, np.round(of.deviation(held.length) / 1e3, 3),
    )  # fmt: skip
    rows = []
    for name, phase, kind, ms, count, average, median, shortest, longest, deviation in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        about = held.describe(name)
        rows.append(
            KernelRow(
                kernel=about.short, library=about.library, kind=CLASSES[kind], unit=about.unit,
                phase=PHASES[phase], ms=ms, count=count, average_us=average, median_us=median,
                least_us=shortest, most_us=longest, deviation_us=deviation,
            )
        )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.phase)))


def uses(held: Instances) -> tuple[Use, ...]:
    """The most time first."""
    if not len(held.index):
        return ()
    steps = max(1, len(held.steps))
    work, texts = held.work, held.modules[0]
    operator, path = work.operator[held.index], work.path[held.index]
    keys = (held.kernel, held.phase, held.module, operator, held.kind)
    of = group(*keys)
    columns = (*(key[of.member] for key in keys), of.sum(held.length), of.count, of.distinct(path))
    found: dict[tuple[str, str, str, str, str], tuple[int, int, int]] = {}
    for name, phase, module, called, kind, length, times, paths in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        about = held.describe(name)
        by = "" if called == NOBODY else work.trace.names[called]
        role = linear_role(about, PHASES[phase], by)
        key = (about.short, CLASSES[kind], PHASES[phase], texts[module], role)
        ns, count, places = found.get(key, (0, 0, 0))
        found[key] = (ns + length, count + times, max(places, paths))
    rows = [
        Use(kernel=kernel, kind=kind, phase=phase, module=module, role=role,
            ms=round(ns / 1e6 / steps, 6), count=round(count / steps, 4), places=places)
        for (kernel, kind, phase, module, role), (ns, count, places) in found.items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.module, row.phase)))
