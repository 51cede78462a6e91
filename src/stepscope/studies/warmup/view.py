"""Findings, first-steps figure and table of the warm-up study. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from stepscope.analysis.steady_state import Settling, settling
from stepscope.records.stats import summarize
from stepscope.records.trust import MAX_UNCERTAINTY, uncertainty
from stepscope.report.blocks import Block, Figure, Finding, Table, Value
from stepscope.report.format import counted, duration, number, percent
from stepscope.report.tables import col, table
from stepscope.studies.base import Result
from stepscope.studies.trusted import all_good
from stepscope.studies.warmup.cases import WarmupCase
from stepscope.views.builders import curve, finding, grouped


class Process:
    """The steps of one fresh process."""

    def __init__(self, result: Result[WarmupCase]) -> None:
        self.record, self.case = result
        # Host clock: the cost of the first steps is mostly on the host.
        series = self.record.find("step", "host")
        self.steps = (*series.warmup, *series.values) if series and series.values else ()

    @cached_property
    def settling(self) -> Settling:
        return settling(self.steps)


def view(results: Sequence[Result[WarmupCase]]) -> tuple[Block, ...]:
    processes = [Process(result) for result in results]
    timed = [process for process in processes if process.steps]
    return (*_findings(timed), *_figure(timed), _table(processes))


def _findings(processes: Sequence[Process]) -> Iterator[Finding]:
    groups = grouped(processes, lambda process: process.case.name)
    unlike = _unlike(groups)
    for name, members in groups.items():
        yield _first_step(name, members)
        # Means of processes that differ anyway say nothing about their warm-up steps.
        if unlike is None:
            yield from _few_steps(name, members)
    if processes:
        yield unlike or _needed(processes)


def _first_step(name: str, processes: Sequence[Process]) -> Finding:
    steady = summarize([process.settling.steady for process in processes]).median
    first = summarize([process.steps[0] for process in processes]).median
    extra = summarize([process.settling.extra for process in processes]).median
    values: dict[str, Value] = {"first_ms": first, "steady_ms": steady, "extra_ms": extra}
    many = len(processes) > 1
    where = f"median of {len(processes)} fresh processes" if many else "in its process"
    text = (
        f"{name}, {where}: the first step takes {duration(first)},"
        f" {number(first / steady, 3)}× a steady one ({duration(steady)}), and the steps before"
        f" steady state cost {duration(extra)} extra."
    )
    cold = next((process for process in processes if process.case.warmup == 0), None)
    if cold is not None:
        biased = summarize(cold.steps[: cold.case.steps])
        off = biased.mean / steady - 1
        values["cold_mean_off"] = off
        text += (
            f" Without warm-up{', in one process,' * many} the mean of {biased.count} steps is"
            f" {percent(off)} off, with a standard deviation of {duration(biased.std)}."
        )
    values |= {"step": name, "processes": len(processes)}
    return finding("warmup.first-step", text, processes, values)


def _few_steps(name: str, processes: Sequence[Process]) -> Iterator[Finding]:
    """The mean after few warm-up steps over that after the most, each in a fresh process."""
    by_warmup = {
        process.case.warmup: summarize(series.values)
        for process in processes
        if (series := process.record.find("step", "host")) is not None and series.values
    }
    if len(by_warmup) < 2:
        return
    most = max(by_warmup)
    off = {
        warmup: summary.mean / by_warmup[most].mean - 1
        for warmup, summary in sorted(by_warmup.items())
        if warmup != most
    }
    listed = ", ".join(
        f"{percent(share)} after {counted(warmup, 'warm-up step') if warmup else 'none'}"
        for warmup, share in off.items()
    )
    late = max(process.settling.steps for process in processes)
    left = late - 2
    why = (
        f"After two of them {counted(left, 'step')} of the slowest process would still be unsteady."
        if left > 0
        else f"The slowest process is steady after {counted(late, 'step')}."
    )
    yield finding(
        "warmup.few-steps",
        f"{name}: mean step over that after {most} warm-up steps, minus one: {listed}. {why}",
        processes,
        {"step": name} | {f"off after {warmup}": share for warmup, share in off.items()},
    )


def _unlike(groups: dict[str, list[Process]]) -> Finding | None:
    """A finding if the steady steps of fresh processes differ: then none of them is steady."""
    steady = {
        name: [process.settling.steady for process in members] for name, members in groups.items()
    }
    unlike = {
        name: (min(levels), max(levels))
        for name, levels in steady.items()
        if uncertainty(levels) >= MAX_UNCERTAINTY
    }
    if not unlike:
        return None
    name, (low, high) = max(unlike.items(), key=lambda item: item[1][1] / item[1][0])
    return finding(
        "warmup.unlike-processes",
        "The number of warm-up steps that this machine needs is unknown: after its first"
        f" steps {name} takes {duration(low)} in one fresh process and {duration(high)} in another."
        " Stop other work on the machine and measure again.",
        groups[name],
        {"step": name, "fastest_ms": low, "slowest_ms": high},
        tone="warn",
    )


def _needed(processes: Sequence[Process]) -> Finding:
    """Number of steps until the slowest process is steady."""
    if not all_good(process.record for process in processes):
        return finding(
            "warmup.steps-unknown",
            "The number of warm-up steps that this machine needs is unknown.",
            processes,
            {"processes": len(processes)},
            tone="warn",
        )
    most = max(process.settling.steps for process in processes)
    at_least = any(process.settling.steps >= len(process.steps) // 2 for process in processes)
    needed = counted(most, "warm-up step") if most else "no warm-up step"
    return finding(
        "warmup.steps-needed",
        f"This machine needs {'at least ' * at_least}{needed} before a step is steady, in the"
        f" slowest of {len(processes)} fresh processes.",
        processes,
        {"steps": most, "processes": len(processes), "at_least": at_least},
        tone="info" if most <= 5 else "warn",
    )


def _figure(processes: Sequence[Process]) -> Iterator[Figure]:
    cold = [process for process in processes if process.case.warmup == 0]
    if not cold:
        return
    yield Figure(
        name="warmup-curve",
        title="The first steps of a fresh process",
        curves=tuple(
            curve(
                process.case.name,
                ((float(i), ms / process.settling.steady) for i, ms in enumerate(process.steps, 1)),
            )
            for process in cold
        ),
        x_label="step",
        y_label="time, × a steady step",
        y_log=True,
        caption="All steps, warm-up included; 1 is the median of the second half.",
    )


def _table(processes: Sequence[Process]) -> Table:
    return table(
        "warmup-steps",
        "The same step after 0, 1, 2, 5 warm-up steps",
        processes,
        [
            col("size", lambda r: r.case.size, key=True),
            col("context", lambda r: r.case.context, "count", key=True),
            col("dtype", lambda r: r.case.dtype, key=True),
            col("warm-up steps", lambda r: r.case.warmup, "count", key=True),
            col(
                "first step",
                lambda r: r.steps[0],
                unit="ms",
                hint="the first step of the process, whether it was left out or not",
            ),
            *(
                col(f"{phase} {what}", partial(_statistic, phase, what), unit="ms")
                for phase in ("forward", "backward", "step")
                for what in ("mean", "std")
            ),
        ],
        caption="Every row is a fresh process: mean and standard deviation of the samples after the"
        " warm-up steps.",
    )


def _statistic(phase: str, what: str, process: Process) -> float | None:
    series = process.record.find(phase)
    return float(getattr(summarize(series.values), what)) if series else None
