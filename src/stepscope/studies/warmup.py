"""What do the first steps cost, and how many must be left out of a measurement?

    stepscope run warmup --size small --context 256

Every case starts in a fresh process: one that has already run a step shows no warm-up. Each step is
timed with marks between its phases from the very first on; the first `warmup` of them are kept
apart, as a benchmark with that many warm-up steps would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.analysis.steady import Settling, settling
from stepscope.errors import UsageError
from stepscope.records.schema import Environment, Record, Series
from stepscope.records.stats import summarize
from stepscope.records.trust import MEDIAN_KNOWN_TO, uncertainty
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import duration, number, percent
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.flag_checks import check_each
from stepscope.studies.post_mortem import step_post_mortem
from stepscope.studies.trusted import all_good
from stepscope.studies.workload import Workload, WorkloadFlags, workloads


class WarmupFlags(WorkloadFlags, frozen=True, kw_only=True):
    """What to measure: every combination of the values is a case."""

    warmup: tuple[int, ...] = (0, 1, 2, 5)
    """Numbers of warm-up steps to try."""
    steps: int = 10
    """Samples after them."""

    def __post_init__(self) -> None:
        if self.steps < 4:
            raise UsageError(f"steps is {self.steps}", "telling first from steady steps takes 4")
        meant = "give numbers of steps, such as 0 1 2 5"
        check_each("warmup", self.warmup, lambda steps: steps >= 0, meant)


class Warmup(Study[WarmupFlags, Any]):
    name = "warmup"
    title = "Warm-up"
    question = "What do the first steps cost, and how many of them must a measurement leave out?"
    examples = (
        "stepscope run warmup --size small medium --context 256",
        "stepscope run warmup --size xl --dtype bfloat16 --warmup 0 2 5 10",
    )
    fresh_process = True
    flags = WarmupFlags

    def cases(self, flags: WarmupFlags) -> tuple[PlannedCase, ...]:
        return tuple(
            PlannedCase(
                study=self.name,
                key=f"{workload.key}_w{warmup}",
                config=msgspec.to_builtins(workload) | {"warmup": warmup, "steps": flags.steps},
                needs=workload.needs,
            )
            for workload in workloads(flags, ("train-step",))
            for warmup in flags.warmup
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.timed_step import time_steps
        from stepscope.studies.training_step import make_step

        step = make_step(msgspec.convert(config, Workload), bench.device)
        timing = time_steps(step, bench, config, inner_marks="always")
        return Measurement(
            series=timing.series, quantities=step.quantities(), readings=timing.readings
        )

    def post_mortem(self, config: dict[str, Any], bench: Bench, said: str) -> dict[str, Any]:
        return step_post_mortem(config, bench, said)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        timed = [record for record in records if _steps(record)]
        return (*_findings(timed), *_figure(timed), _table(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[WarmupFlags]]:
        course = ("small", "medium", "large", "xl")
        on_cpu = environment.device_kind == "cpu"
        quick = WarmupFlags(
            size=("mini",) if on_cpu else ("small",), context=(32,) if on_cpu else (256,), steps=8
        )
        seeds = WarmupFlags(size=(*course, "2.7b"), context=(256,))
        course_2026 = WarmupFlags(size=(*course, "10b"), table="2026", context=(256,))
        return {
            "quick": (quick,),
            "seeds": (seeds,),
            "cs336-2026": (course_2026,),
            "h200": (WarmupFlags(size=("small", "large", "2.7b"), context=(256,)),),
            "full": (seeds, course_2026),
        }


STUDY = Warmup()


def _steps(record: Record) -> Series | None:
    """The whole steps by the host's clock: first-step costs are mostly the host's."""
    series = record.find("step", "host")
    return series if series is not None and series.values else None


def _all_steps(record: Record) -> tuple[float, ...]:
    series = _steps(record)
    assert series is not None
    return (*series.warmup, *series.values)


def _name(record: Record) -> str:
    return msgspec.convert(record.config, Workload).name


def _findings(records: Sequence[Record]) -> Iterator[Finding]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_name(record), []).append(record)
    needed = []
    judged: list[tuple[Record, Settling]] = []
    unlike: dict[str, list[float]] = {}
    for name, members in groups.items():
        curves = [settling(_all_steps(record)) for record in members]
        judged += zip(members, curves, strict=True)
        slowest = max(curves, key=lambda curve: curve.steps)
        needed.append(slowest.steps)
        levels = [curve.steady for curve in curves]
        if uncertainty(levels) >= MEDIAN_KNOWN_TO:
            unlike[name] = levels
        steady = summarize(levels).median
        first = summarize([_all_steps(record)[0] for record in members]).median
        extra = summarize([curve.extra for curve in curves]).median
        many = len(members) > 1
        where = f"by the medians of {len(members)} fresh processes" if many else "in its process"
        text = (
            f"{name}, {where}: the first step takes {duration(first)},"
            f" {number(first / steady, 3)}× a steady one ({duration(steady)}), and the steps before"
            f" steady state cost {duration(extra)} extra."
        )
        cold = next((record for record in members if record.config["warmup"] == 0), None)
        if cold is not None:
            biased = summarize(_all_steps(cold)[: cold.config["steps"]])
            text += (
                f" Without warm-up{', in one process,' * many} the mean of {biased.count} steps is"
                f" {percent(biased.mean / steady - 1)} off, with a standard deviation of"
                f" {duration(biased.std)}."
            )
        yield Finding(
            code="warmup.first-step",
            values={"step": name, "first_ms": first, "steady_ms": steady, "extra_ms": extra},
            text=text,
            records=tuple(record.id for record in members),
        )
    if unlike:
        yield _unlike(unlike, records)
    elif needed and not all_good(records):
        yield Finding(
            code="warmup.steps-unknown",
            text="How many warm-up steps this machine needs cannot be told.",
            tone="warn",
            records=tuple(record.id for record in records),
        )
    elif needed:
        most = max(needed)
        sized = "no warm-up step" if most == 0 else f"{most} warm-up step{'s' if most > 1 else ''}"
        rest = "; more than that changes nothing"
        if any(curve.steps >= len(_all_steps(record)) // 2 for record, curve in judged):
            sized, rest = f"at least {sized}", ""
        yield Finding(
            code="warmup.steps-needed",
            values={"steps": most, "processes": len(records)},
            text=f"This machine needs {sized} before a step is steady, in the slowest of"
            f" {len(records)} fresh processes{rest}.",
            tone="good" if most <= 5 else "warn",
            records=tuple(record.id for record in records),
        )


def _unlike(levels: dict[str, list[float]], records: Sequence[Record]) -> Finding:
    """Steady steps of fresh processes that differ among each other: none of them is steady."""
    name = max(levels, key=lambda one: max(levels[one]) / min(levels[one]))
    low, high = min(levels[name]), max(levels[name])
    return Finding(
        code="warmup.unlike-processes",
        values={"step": name, "fastest_ms": low, "slowest_ms": high},
        text=f"How many warm-up steps this machine needs cannot be told: after its first steps"
        f" {name} takes {duration(low)} in one fresh process and {duration(high)} in another. End"
        " other work on the machine and measure again.",
        tone="warn",
        records=tuple(record.id for record in records),
    )


def _figure(records: Sequence[Record]) -> Iterator[Figure]:
    cold = [record for record in records if record.config["warmup"] == 0]
    if not cold:
        return
    curves = []
    for record in cold:
        values = _all_steps(record)
        steady = settling(values).steady
        curves.append(
            Curve(
                label=_name(record),
                x=tuple(float(i + 1) for i in range(len(values))),
                y=tuple(value / steady for value in values),
            )
        )
    yield Figure(
        name="warmup-curve",
        title="The first steps of a fresh process",
        kind="lines",
        curves=tuple(curves),
        x_label="step",
        y_label="time, × a steady step",
        y_log=True,
        caption="No warm-up left out; 1 is the median of the second half.",
    )


def _table(records: Sequence[Record]) -> Table:
    phases = ("forward", "backward", "step")
    rows = []
    for record in records:
        config = record.config
        identity: tuple[Cell, ...] = (
            config["size"], config["context"], config["dtype"], config["warmup"],
        )  # fmt: skip
        if record.status != "ok":
            rows.append((*identity, record.status, *(None,) * (2 * len(phases))))
            continue
        numbers: list[Cell] = []
        for phase in phases:
            series = record.find(phase)
            held = summarize(series.values) if series else None
            numbers += [held.mean if held else None, held.std if held else None]
        rows.append((*identity, _all_steps(record)[0], *numbers))
    heads = [
        Column(title=f"{phase} {what}", kind="number", unit="ms")
        for phase in phases
        for what in ("mean", "std")
    ]
    return Table(
        name="warmup-steps",
        title="The same step after 0, 1, 2, 5 warm-up steps",
        columns=(
            Column(title="size"),
            Column(title="context", kind="count"),
            Column(title="dtype"),
            Column(title="warm-up steps", kind="count"),
            Column(
                title="first step", kind="number", unit="ms",
                hint="the very first step of the process, whether left out or not",
            ),
            *heads,
        ),
        rows=tuple(rows),
        caption="Every row is a fresh process; mean and standard deviation of what comes after the"
        " warm-up steps.",
    )  # fmt: skip
