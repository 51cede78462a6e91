"""Kernels grouped by name, phase and part of the model, with statistics of each group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.kernels.names import Description, linear_role
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.nesting import NO_SPAN
from stepscope.analysis.trace.steps import Step, step_of
from stepscope.analysis.trace.summary import KernelRow, Use
from stepscope.analysis.trace.work import DeviceWork

Floats: TypeAlias = NDArray[np.float64]
_NUMBER = re.compile(r"(?<!\w)\d+(?!\w)")
_MAX_NUMBERS = 1 << 62
_GROUP = re.compile(r"group \d+(/|$)")


@dataclass(frozen=True)
class Instances:
    """Every kernel (or operator call, with its self time) that began within a step."""

    work: DeviceWork
    steps: tuple[Step, ...]
    index: Ints
    """Index of the instance in the work; for operators, of its first piece."""
    length: Ints
    step: Ints

    @cached_property
    def name(self) -> Ints:
        return self.work.name[self.index]

    @cached_property
    def kernel(self) -> Ints:
        """Return one number for all names that are equal without their template arguments."""
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
        """Index of the path without its numbers."""
        return self.modules[1][self.work.path[self.index]]

    @cached_property
    def modules(self) -> tuple[list[str], Ints]:
        """Paths without their numbers, and the index of each path among them."""
        texts = [_without_numbers("/".join(path)) for path in self.work.host.paths]
        numbers = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        return list(numbers), np.array([numbers[text] for text in texts], np.int64)

    def describe(self, name: int) -> Description:
        return self.work.descriptions[name]


def instances(work: DeviceWork, steps: tuple[Step, ...]) -> Instances:
    """Collect the instances of the work that began within these steps."""
    step = step_of(work, steps)
    length = work.end - work.start
    index = np.flatnonzero(step >= 0)
    if not work.on_device and len(index):
        # An operator that calls others has several intervals of self time.
        spans, first, group = np.unique(work.span[index], return_index=True, return_inverse=True)
        length = np.bincount(group, weights=length[index], minlength=len(spans)).astype(np.int64)
        index = index[first]
        return Instances(work, steps, index, length, step[index])
    return Instances(work, steps, index, length[index], step[index])


@dataclass(frozen=True)
class Groups:
    """Entries grouped by equal keys, with statistics of all groups at once, because there may be
    as many groups as entries."""

    order: Ints
    """Entries, group by group."""
    first: Ints
    """Start of each group in `order`."""

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
        """Sample standard deviation; 0 for a single entry."""
        away = values - (self.sum(values) / self.count)[self.of_entry]
        return np.sqrt(self.sum(away * away) / np.maximum(1, self.count - 1))

    def distinct(self, key: Ints) -> Ints:
        """Number of distinct values of the key in each group."""
        pairs = group(self.of_entry, key)
        return np.bincount(self.of_entry[pairs.member], minlength=len(self.first))


def group(*keys: Ints) -> Groups:
    """Group by every combination of the keys that occurs."""
    if not len(keys[0]):
        return Groups(keys[0], keys[0])
    joint = _joint(*keys)
    order = np.argsort(joint, kind="stable")
    return Groups(order, np.flatnonzero(np.append(True, np.diff(joint[order]) != 0)))


def occurrence(*keys: Ints) -> Ints:
    """Return 0 for the first, 1 for the second, … entry with the same keys."""
    if not len(keys[0]):
        return keys[0]
    joint = _joint(*keys)
    order = np.argsort(joint, kind="stable")
    position = np.arange(len(order))
    begins = np.concatenate(([True], np.diff(joint[order]) != 0))
    ordinal = np.zeros(len(order), np.int64)
    ordinal[order] = position - np.maximum.accumulate(np.where(begins, position, 0))
    return ordinal


def _joint(*keys: Ints) -> Ints:
    """Return one number per combination of the keys."""
    joint, most = np.zeros(len(keys[0]), np.int64), 1
    for key in keys:
        values = int(key.max()) + 2
        if most * values >= _MAX_NUMBERS:
            known, joint = np.unique(joint, return_inverse=True)
            most = len(known)
        joint, most = joint * values + key + 1, most * values
    return joint


def _without_numbers(path: str) -> str:
    """Merge numbered blocks, which are alike, but not the parameter groups of an optimizer."""
    return path if _GROUP.match(path) else _NUMBER.sub("*", path)


def kernel_rows(entries: Instances) -> tuple[KernelRow, ...]:
    """Return one row per kernel, phase and class, longest total time first."""
    if not len(entries.index):
        return ()
    steps = max(1, len(entries.steps))
    of = group(entries.kernel, entries.phase, entries.kind)
    total, (least, most) = of.sum(entries.length), of.extremes(entries.length)
    columns = (
        entries.kernel[of.member],
        entries.phase[of.member],
        entries.kind[of.member],
        np.round(total / 1e6 / steps, 6),
        np.round(of.count / steps, 4),
        np.round(total / of.count / 1e3, 3),
        np.round(of.median(entries.length) / 1e3, 3),
        least / 1e3,
        most / 1e3,
        np.round(of.deviation(entries.length) / 1e3, 3),
    )
    rows = []
    for name, phase, kind, ms, count, average, median, shortest, longest, deviation in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        about = entries.describe(name)
        rows.append(
            KernelRow(
                kernel=about.short,
                library=about.library,
                kind=CLASSES[kind],
                unit=about.unit,
                phase=PHASES[phase],
                ms=ms,
                count=count,
                average_us=average,
                median_us=median,
                least_us=shortest,
                most_us=longest,
                deviation_us=deviation,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.phase)))


def uses(entries: Instances) -> tuple[Use, ...]:
    """Return one row per kernel, phase, module and role, longest total time first."""
    if not len(entries.index):
        return ()
    steps = max(1, len(entries.steps))
    work, texts = entries.work, entries.modules[0]
    operator, path = work.operator[entries.index], work.path[entries.index]
    keys = (entries.kernel, entries.phase, entries.module, operator, entries.kind)
    of = group(*keys)
    sizes = of.sum(entries.length), of.count, of.distinct(path)
    columns = (*(key[of.member] for key in keys), *sizes)
    totals: dict[tuple[str, str, str, str, str], tuple[int, int, int]] = {}
    for name, phase, module, called, kind, length, times, paths in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        about = entries.describe(name)
        by = "" if called == NO_SPAN else work.trace.names[called]
        role = linear_role(about, PHASES[phase], by)
        key = (about.short, CLASSES[kind], PHASES[phase], texts[module], role)
        ns, count, places = totals.get(key, (0, 0, 0))
        totals[key] = (ns + length, count + times, max(places, paths))
    rows = [
        Use(
            kernel=kernel,
            kind=kind,
            phase=phase,
            module=module,
            role=role,
            ms=round(ns / 1e6 / steps, 6),
            count=round(count / steps, 4),
            places=places,
        )
        for (kernel, kind, phase, module, role), (ns, count, places) in totals.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kernel, row.module, row.phase)))
