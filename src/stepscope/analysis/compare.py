"""Comparison of two measurements of the same case: is the new one slower, with what confidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec

from stepscope.analysis.limits import matrix_ceiling
from stepscope.analysis.plausibility import computable
from stepscope.analysis.trust import trust_of
from stepscope.display import html_of
from stepscope.errors import StepscopeError
from stepscope.records.schema import Ceiling, Environment, Part, Record, Series
from stepscope.records.stats import Design, Outcome, Ratio, judge, stability, summarize

_TIME_UNITS = ("s", "ms", "us", "ns")
_STEPS = ("step", "consecutive")
"""Series by which variants are compared; the last one that a record has decides."""
_DECIDING_FIELDS = (
    "device_kind",
    "device_name",
    "device_count",
    "threads",
    "torch",
    "cuda",
    "triton",
    "power_limit_w",
    "max_sm_clock_mhz",
)
_DECIDING_ON_CPU = ("cpu", "cpu_cores")
_REPEATED = "repeated"
"""Note of a record that stands for several runs of its case."""


class Comparison(Part, frozen=True):
    """One case in two runs. `ratio` is new over base: above 1 is slower.

    The verdict is "cannot tell" if the trust of either record is not good: on a busy machine two
    runs of the same code differ by more than any confidence interval of their samples. It is also
    "cannot tell" if the samples depend on each other so much that they do not show whether the
    runs differ (`records.stats.judge`).
    """

    study: str
    case: str
    verdict: Outcome | Literal["not compared"]
    unit: str = ""
    base: float | None = None
    new: float | None = None
    ratio: Ratio | None = None
    p: float | None = None
    note: str = ""
    lost: bool = False
    """The base run has samples of this case and the new run has none."""
    of: str = ""
    """Variant, if the case measured several side by side."""

    @property
    def name(self) -> str:
        return f"{self.study} {self.case}{f': {self.of}' if self.of else ''}"

    def _repr_html_(self) -> str:
        return html_of(self)


class _Side(NamedTuple):
    """One record of a case, or several runs as one with the times at which they started."""

    record: Record
    started: tuple[str, ...] = ()


class Comparisons(tuple[Comparison, ...]):
    """The comparisons of two runs; a notebook shows them as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return html_of(self)


def differences(base: Environment, new: Environment) -> tuple[str, ...]:
    """Fields that make times of two machines incomparable, with both values.

    The commit and the driver are not among them: they are often what is compared. A field that
    one side does not know is not a difference.
    """
    on_cpu = "cpu" in (base.device_kind, new.device_kind)
    fields = _DECIDING_FIELDS + (_DECIDING_ON_CPU if on_cpu else ())
    pairs = ((name, getattr(base, name), getattr(new, name)) for name in fields)
    return tuple(f"{name} {a} / {b}" for name, a, b in pairs if a != b and None not in (a, b))


def compare_records(base: Record, new: Record, *, across: bool = False) -> Comparisons:
    """Compare one case, including all variants that it measured side by side.

    With `across`, times on two machines are compared relative to each machine's own ceiling.
    """
    return _compare_sides(_Side(computable(base)), _Side(computable(new)), across=across)


def _compare_sides(base_side: _Side, new_side: _Side, *, across: bool) -> Comparisons:
    base, new = base_side.record, new_side.record
    unlike = differences(base.environment, new.environment)
    if unlike and not across:
        raise StepscopeError(
            f"{base.study} {base.case} was measured in different environments: {'; '.join(unlike)}",
            "with --across, each run is compared relative to its own machine's ceiling",
        )
    design: Design = "processes" if not unlike and _interleaved(base_side, new_side) else "separate"
    before, after = _subjects(base), _subjects(new)
    if not before or not after:
        lost = bool(before)
        return Comparisons((_not_compared(new, _why_without_samples(base, new), lost=lost),))
    if len(before) == len(after) == 1:
        (base_series,), (new_series,) = before.values(), after.values()
        return Comparisons((_compared(base, new, base_series, new_series, "", unlike, design),))
    return Comparisons(
        _compared(base, new, before.get(name), after.get(name), name, unlike, design)
        for name in dict.fromkeys((*after, *before))
    )


def _compared(
    base: Record,
    new: Record,
    before: Series | None,
    after: Series | None,
    of: str,
    unlike: Sequence[str],
    design: Design,
) -> Comparison:
    if before is None or after is None:
        where = "base" if after is None else "new"
        return _not_compared(new, f"only in the {where} run", lost=after is None, of=of)
    if (before.unit, before.clock) != (after.unit, after.clock) or (
        not of and before.name != after.name
    ):
        kinds = f"{_kind(before)} in the base, {_kind(after)} in the new run"
        return _not_compared(new, kinds, of=of)
    if before.unit not in _TIME_UNITS:
        return _not_compared(new, f"{_kind(before)} is not a time", of=of)
    if min(*before.values, *after.values) <= 0.0:
        return _not_compared(new, f"{before.name} has samples that are not above zero", of=of)
    doubts = [*_doubted("base", base), *_doubted("new", new)]
    notes = [
        *doubts,
        *_repeated("base", base),
        *_repeated("new", new),
        *_unsteady("base", before),
        *_unsteady("new", after),
        *_changed_config(base, new),
    ]
    base_values, new_values = before.values, after.values
    if unlike:
        base_ceiling, new_ceiling = _ceiling_of(base), _ceiling_of(new)
        base_values = tuple(value * base_ceiling.value for value in base_values)
        new_values = tuple(value * new_ceiling.value for value in new_values)
        notes.insert(
            0,
            "ratio of times relative to each machine's own ceiling:"
            f" {base_ceiling.name} {base_ceiling.value / 1e12:.4g} and"
            f" {new_ceiling.value / 1e12:.4g} TFLOP/s",
        )
    judged = judge(base_values, new_values, design)
    if judged.reason and not doubts:
        notes.insert(0, judged.reason)
    return Comparison(
        study=new.study,
        case=new.case,
        verdict="cannot tell" if doubts else judged.outcome,
        unit=before.unit,
        base=summarize(before.values).median,
        new=summarize(after.values).median,
        ratio=judged.ratio,
        p=judged.p,
        note="; ".join(notes),
        of=of,
    )


def compare_runs(
    base_records: Sequence[Record], new_records: Sequence[Record], *, across: bool = False
) -> Comparisons:
    """Compare every case of either run: first those of the new run, then those only in the base.

    If a side has several runs of a case, as from interleaved runs of two commits, the median of
    each run is one sample. If the runs did not alternate, these samples may depend on each other.
    """
    # Before the samples of several runs become one: impossible values would overflow there.
    base = _by_case([computable(record) for record in base_records])
    new = _by_case([computable(record) for record in new_records])
    compared = [
        comparison
        for key, side in new.items()
        for comparison in (
            _compare_sides(base[key], side, across=across)
            if key in base
            else (_not_compared(side.record, "only in the new run"),)
        )
    ]
    gone = [
        _not_compared(side.record, "only in the base run", lost=bool(_subjects(side.record)))
        for key, side in base.items()
        if key not in new
    ]
    return Comparisons((*compared, *gone))


def exceeds(comparisons: Iterable[Comparison], limit: float) -> tuple[Comparison, ...]:
    """Return comparisons that are slower by more than `limit` (0.05 is 5 %), and cases
    that were measured in the base run but not in the new one."""
    return tuple(
        c
        for c in comparisons
        if c.lost or (c.verdict == "slower" and c.ratio and c.ratio.value > 1.0 + limit)
    )


def inconclusive(comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons whose samples do not show whether anything changed."""
    return tuple(c for c in comparisons if c.verdict in ("cannot tell", "too few samples"))


def _interleaved(base: _Side, new: _Side) -> bool:
    """True if several runs of both sides alternated, so that a drift of the machine affects both.
    Runs that started at the same time, as far as their records show, are not in an order."""
    if len(base.started) < 2 or len(new.started) < 2:
        return False
    order = sorted([(at, 0) for at in base.started] + [(at, 1) for at in new.started])
    in_order = len(set(base.started + new.started)) == len(order)
    switches = sum(before != after for (_, before), (_, after) in pairwise(order))
    return not in_order or switches >= min(len(base.started), len(new.started)) // 2


def _by_case(records: Sequence[Record]) -> dict[tuple[str, str], _Side]:
    """Return one record for each case: its newest attempt, or all of its runs as one."""
    newest: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        runs = newest.setdefault((record.study, record.case), {})
        previous = runs.get(record.run)
        if previous is None or record.attempt >= previous.attempt:
            runs[record.run] = record
    return {key: _as_one(list(runs.values())) for key, runs in newest.items()}


def _as_one(runs: Sequence[Record]) -> _Side:
    """Return several runs of a case as one record, with the median of each run as a sample: the
    steps of one process share its memory layout and the state of the machine, so they are not
    independent. Runs that are not good are left out, unless all of them are."""
    runs = sorted(runs, key=lambda run: run.started)
    measured = [run for run in runs if _subjects(run)]
    if len(runs) == 1 or not measured:
        return _Side(runs[-1])
    good = [run for run in measured if trust_of(run).good]
    used = good or measured
    last = used[-1]
    series = tuple(
        msgspec.structs.replace(one, values=tuple(medians), warmup=())
        for one in last.series
        if (medians := [summarize(same.values).median for run in used if (same := _same(run, one))])
    )
    note = f"{len(used)} runs" + (f" of {len(runs)}" if len(used) < len(runs) else "")
    one = msgspec.structs.replace(
        last,
        series=series,
        notes=last.notes | {_REPEATED: note},
        # Those of a good run belong to its samples, which are not in this record.
        failed_checks=() if good else last.failed_checks,
        readings=() if good else last.readings,
    )
    return _Side(one, tuple(run.started for run in used))


def _same(run: Record, series: Series) -> Series | None:
    found = run.find(series.name, series.clock, variant=series.variant, phase=series.phase,
                     rank=series.rank, size=series.size)  # fmt: skip
    return found if found is not None and found.values else None


def _subjects(record: Record) -> dict[str, Series]:
    """Series to compare (the step or each of its variants), on the device's clock if any."""
    if record.status != "ok" or not record.series:
        return {}
    first = record.series[0]
    wanted = {} if first.variant or first.size else {first.name: first}
    for series in record.series:
        if series.variant and series.name in _STEPS:
            # A side of a comparison keeps its name, whichever of its variants was the fastest.
            wanted[series.variant.partition(": ")[0]] = series
        elif series.size and first.size:
            wanted[str(series.size)] = series
    matches = {
        of: record.find(series.name, variant=series.variant, size=series.size)
        for of, series in wanted.items()
    }
    return {of: series for of, series in matches.items() if series is not None and series.values}


def _not_compared(record: Record, note: str, *, lost: bool = False, of: str = "") -> Comparison:
    return Comparison(
        study=record.study, case=record.case, verdict="not compared", note=note, lost=lost, of=of
    )


def _why_without_samples(base: Record, new: Record) -> str:
    return "; ".join(
        f"{side}: {record.status if record.status != 'ok' else 'no samples'}"
        + (f" ({record.reason})" if record.reason else "")
        for side, record in (("base", base), ("new", new))
        if not _subjects(record)
    )


def _kind(series: Series) -> str:
    return f"{series.label} in {series.unit} by the {series.clock}'s clock"


def _doubted(side: str, record: Record) -> list[str]:
    trust = trust_of(record)
    return [] if trust.good else [f"{side}: {trust.reason}"]


def _repeated(side: str, record: Record) -> list[str]:
    runs = record.notes.get(_REPEATED)
    return [f"{side}: {runs}"] if runs else []


def _unsteady(side: str, series: Series) -> list[str]:
    return [f"{side}: {complaint}" for complaint in stability(series.values)]


def _changed_config(base: Record, new: Record) -> list[str]:
    names = sorted(base.config.keys() | new.config.keys())
    return [
        f"{name} was {before} and is {after}"
        if not any(map(_is_nested, (before, after)))
        else f"{name} differs"
        for name in names
        if (before := base.config.get(name)) != (after := new.config.get(name))
    ]


def _is_nested(setting: object) -> bool:
    """True for a setting that is too long for a note, such as the advice that a trial is about."""
    parts = setting if isinstance(setting, list | tuple) else [setting]
    return any(isinstance(part, Mapping) for part in parts)


def _ceiling_of(record: Record) -> Ceiling:
    ceiling = matrix_ceiling(record)
    if ceiling is None:
        raise StepscopeError(
            f"{record.study} {record.case} of run {record.run} has no measured matrix ceiling for"
            f" its dtype ({record.config.get('dtype', 'none')})",
            "measure it again on that machine, or compare runs from one machine",
        )
    return ceiling
