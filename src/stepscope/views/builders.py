"""Builders of findings, curves and columns that the views of several studies share. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from stepscope.analysis.conclusions import NOTHING, Conclusion
from stepscope.analysis.effects import Effect
from stepscope.analysis.limits import host_bound, mfu, step_ms, tokens_per_second
from stepscope.errors import some
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, Summary
from stepscope.report.blocks import Curve, Finding, Interval, Tone, Value
from stepscope.report.format import number
from stepscope.report.tables import col, interval

T = TypeVar("T")
K = TypeVar("K")
X = TypeVar("X", str, float)

_FAILED = {"oom": "ran out of memory", "skipped": "were skipped", "timeout": "timed out"}


class HasRecord(Protocol):
    """A row about one record."""

    @property
    def record(self) -> Record: ...


Source = Record | HasRecord


def ids(rows: Source | Iterable[Source]) -> tuple[str, ...]:
    """Ids of the records of one or several rows, without duplicates."""
    if isinstance(rows, Record):
        return (rows.id,)
    # A row may be a named tuple: it counts as one row although it can be iterated.
    if (record := getattr(rows, "record", None)) is not None:
        return (record.id,)
    assert isinstance(rows, Iterable)
    return tuple(dict.fromkeys(one for row in rows for one in ids(row)))


def finding(
    code: str,
    text: str,
    rows: Source | Iterable[Source],
    values: Mapping[str, Value],
    *,
    conclusion: Conclusion = NOTHING,
    tone: Tone = "info",
    timed: bool = True,
) -> Finding:
    """A finding that rests on the records of `rows`."""
    return Finding(
        code=code,
        text=text,
        records=ids(rows),
        values=values,
        conclusion=conclusion,
        tone=tone,
        timed=timed,
    )


def rated(effect: Effect, *, higher_is_better: bool = False) -> Tone:
    """The tone of a comparison: neither good nor bad unless the effect is shown."""
    if not effect.shown:
        return "info"
    return "good" if effect.above is higher_is_better else "warn"


def bracketed(effect: Effect) -> str:
    """The estimate with its interval: 1.04× [0.98, 1.33]."""
    if not math.isfinite(effect.low + effect.high):
        return f"{number(effect.value, 3)}×, from too few samples for an interval"
    low, high = (number(end, 3) for end in (effect.low, effect.high))
    return f"{number(effect.value, 3)}× [{low}, {high}]"


def failure_findings(code: str, named: Sequence[tuple[str, Record]]) -> Iterator[Finding]:
    """One finding for each status of failed records, which are given with their names."""
    failed = [(name, record) for name, record in named if record.status != "ok"]
    for status, members in grouped(failed, lambda pair: pair[1].status).items():
        names, records = zip(*members, strict=True)
        reason = records[0].reason
        yield finding(
            code,
            f"{len(names)} of {len(named)} cases {_FAILED.get(status, 'failed')}:"
            f" {some(names)}. First reason: {reason}",
            records,
            {"status": status, "cases": len(names), "of": len(named), "reason": reason},
            tone="info" if status == "skipped" else "warn",
            timed=False,
        )


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows by key, both in the order of their first occurrence."""
    groups: dict[K, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def suffix(index: int) -> str:
    """Suffix of the name of one of several tables or figures; empty for the first."""
    return f"-{index + 1}" if index else ""


def curve(label: str, points: Iterable[tuple[X, float]], style: int | None = None) -> Curve:
    """A curve through points (x, y)."""
    listed = list(points)
    return Curve(
        label=label, x=tuple(x for x, _ in listed), y=tuple(y for _, y in listed), style=style
    )


def sampled_curve(label: str, points: Iterable[tuple[X, Summary]]) -> Curve:
    """A curve through medians, with interquartile ranges as error bars."""
    listed = list(points)
    return Curve(
        label=label,
        x=tuple(x for x, _ in listed),
        y=tuple(summary.median for _, summary in listed),
        low=tuple(summary.q1 for _, summary in listed),
        high=tuple(summary.q3 for _, summary in listed),
    )


def ratio_cell(ratio: Ratio) -> Interval:
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high)


# Columns of tables whose rows have a record of a training step.
HOST_BOUND = "share of the step in phases that end with an empty launch queue"
STEP_MS = col(
    "step", lambda r: interval(step_ms(r.record)), unit="ms", hint="median with its 95 % interval"
)
TOKENS = col("tokens/s", lambda r: _rounded(tokens_per_second(r.record)), "count")
MFU = (
    col(
        "MFU, measured",
        lambda r: mfu(r.record),
        "percent",
        hint="model FLOPs per second over the matmul rate measured on this machine, in the dtype of"
        " the step",
    ),
    col(
        "MFU, data sheet",
        lambda r: mfu(r.record, measured=False),
        "percent",
        hint="of the manufacturer's dense peak",
    ),
)
HOST_SHARE = col("CPU-bound", lambda r: _host_share(r.record), "percent", hint=HOST_BOUND)


def _host_share(record: Record) -> float | None:
    share = host_bound(record)
    return share.fraction if share else None


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
