"""Number formats side by side: what each gains over float32 in every phase, and where it does not.

A step that the host limits takes as long in any format: the device waits for launches, and autocast
adds some. The queue measure of the same records tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import HostShare, host_bound
from stepscope.records.stats import Summary
from stepscope.report.blocks import Cell, Column, Finding, Table
from stepscope.report.format import number, percent
from stepscope.studies.benchmark.rows import Row
from stepscope.studies.identity import identity, identity_cells

_BASE = "float32"
_PHASES = ("forward", "backward", "optimizer", "step")
_GAIN = 1.1
"""From here on a format helps: less is within what two runs differ."""
_SEVERAL = 8


class Pair(NamedTuple):
    """The same step in another format and in float32."""

    row: Row
    base: Row

    def gain(self, phase: str) -> float | None:
        mine: Summary | None = getattr(self.row, phase)
        theirs: Summary | None = getattr(self.base, phase)
        return theirs.median / mine.median if mine and theirs and mine.median else None

    @property
    def whole(self) -> float | None:
        """Of the step, or of the longest part of it that was timed."""
        return self.gain("step") or self.gain("both") or self.gain("forward")

    @property
    def host(self) -> HostShare | None:
        for mode in ("train-step", "forward-backward", "forward"):
            record = self.row.by_mode.get(mode)
            if record is not None and record.status == "ok":
                return host_bound(record)
        return None

    @property
    def place(self) -> str:
        work = self.row.workload
        return f"{work.size} at context {work.context}"


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    base = {_without_format(row): row for row in rows if row.workload.dtype == _BASE}
    return [
        Pair(row, base[_without_format(row)])
        for row in rows
        if row.workload.dtype != _BASE and _without_format(row) in base
    ]


def _without_format(row: Row) -> str:
    return msgspec.structs.replace(row.workload, dtype=_BASE, mode="forward").key


def formats_table(rows: Sequence[Row]) -> Iterator[Table]:
    found = [pair for pair in pairs_of(rows) if pair.whole is not None]
    if not found:
        return
    columns, shared = identity([pair.row for pair in found])
    columns = {name: column for name, column in columns.items() if name != "dtype"}
    cells: list[tuple[Cell, ...]] = [
        (
            *identity_cells(pair.row, columns),
            pair.row.workload.dtype,
            *(pair.gain(phase) for phase in _PHASES),
            pair.base.step.median if pair.base.step else None,
            pair.row.step.median if pair.row.step else None,
            pair.host.fraction if pair.host else None,
        )
        for pair in found
    ]
    yield Table(
        name="benchmark-formats",
        title="Number formats against float32",
        columns=(
            *columns.values(),
            Column(title="dtype"),
            *(Column(title=phase, kind="number", unit="× as fast") for phase in _PHASES),
            Column(title="step in float32", kind="number", unit="ms"),
            Column(title="step", kind="number", unit="ms"),
            Column(
                title="host-bound", kind="percent",
                hint="share of the step in phases that end with an empty launch queue",
            ),
        ),
        rows=tuple(cells),
        caption=f"Medians of float32 over those of the format; {shared}.",
    )  # fmt: skip


def formats_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    by_format: dict[str, list[tuple[float, Pair]]] = {}
    for pair in pairs_of(rows):
        if pair.whole is not None:
            by_format.setdefault(pair.row.workload.dtype, []).append((pair.whole, pair))
    for dtype, found in by_format.items():
        low, high = min(found, key=lambda g: g[0]), max(found, key=lambda g: g[0])
        text = f"{dtype} against float32 makes the step {number(high[0], 3)}× as fast on"
        text += f" {high[1].place}{_by_phase(high[1])}"
        if low[1] is not high[1]:
            text += f" and {number(low[0], 3)}× on {low[1].place}{_by_phase(low[1])}"
        useless = [pair for gain, pair in found if gain < _GAIN]
        yield Finding(text=f"{text}.{_why_not(useless)}", tone="warn" if useless else "info")


def _by_phase(pair: Pair) -> str:
    told = [
        f"{phase} {number(gain, 3)}×"
        for phase in _PHASES[:-1]
        if (gain := pair.gain(phase)) is not None
    ]
    return f" ({', '.join(told)})" if len(told) > 1 else ""


def _why_not(useless: Sequence[Pair]) -> str:
    """For which sizes it does not help, told apart by what limits them."""
    waiting = [pair for pair in useless if pair.host is not None and pair.host.bound]
    others = [pair for pair in useless if pair not in waiting]
    text = ""
    if waiting:
        shares = [pair.host.fraction for pair in waiting if pair.host is not None]
        text += (
            f" It does not help {_some(waiting)}: the host limits these steps (at least"
            f" {percent(min(shares))} of each ends with an empty launch queue), so faster kernels"
            " only make the device wait longer, and autocast's casts are launches more."
        )
    if others:
        on_cpu = any(p.row.records[0].environment.device_kind == "cpu" for p in others)
        text += (
            f" It does not help {_some(others)}"
            + (
                ": this CPU has no faster unit for the format, or none at all."
                if on_cpu
                else ", which the host does not limit: what the products gain is lost in casts and"
                " in operators that move as many bytes as before."
            )
        )  # fmt: skip
    return text


def _some(pairs: Sequence[Pair]) -> str:
    names = list(dict.fromkeys(pair.place for pair in pairs))
    more = len(names) - _SEVERAL
    return ", ".join(names[:_SEVERAL]) + (f" and {more} more" if more > 0 else "")
