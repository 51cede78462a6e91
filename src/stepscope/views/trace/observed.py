"""The files of an observer as findings, tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from stepscope.analysis.observed.lines import PARTS, Alarm, RankLines, Steps
from stepscope.analysis.observed.stragglers import Stragglers
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_, counted, duration, percent
from stepscope.report.tables import col, table

_MOST_POINTS = 400
_MOST_RANKS = 8
_SEARCHED = 1000
"""Lines of a rank in which stragglers are looked for."""
_MORE = {
    "compute": "of computation",
    "communication": "waiting for collectives",
    "loader": "waiting for its loader",
    "host": "before the forward, outside of the loader",
}


def alarm_text(alarm: Alarm) -> str:
    """The sentence of a deviation, without its step."""
    more, relative = _MORE.get(alarm.part, ""), percent(alarm.relative)
    if alarm.code == "straggler":
        where = f"; the others wait at {alarm.collective}" if alarm.collective else ""
        return (
            f"rank {alarm.rank} takes {relative} longer than the other ranks for its own part of"
            f" the step: {duration(alarm.more)} more {more}{where}"
        )
    if alarm.code == "memory-growth":
        return (
            f"{alarm.part} of rank {alarm.rank} grows by {bytes_(alarm.more)} a step: from"
            f" {bytes_(alarm.before)} to {bytes_(alarm.after)}"
        )
    how = "has drifted" if alarm.code == "drift" else "has changed"
    return (
        f"the step {how} from {duration(alarm.before)} to {duration(alarm.after)} ({relative}):"
        f" {duration(alarm.more)} more {more}"
    )


def alarms_of(ranks: Sequence[RankLines]) -> list[Alarm]:
    """All deviations by step. If none of the stragglers was found while the job ran, because the
    ranks had no folder in common, they are looked for in the latest lines."""
    alarms = [one for rank in ranks for one in rank.alarms]
    if len(ranks) > 1 and not any(one.code == "straggler" for one in alarms):
        detector = Stragglers(len(ranks))
        lines = ((one.start.rank, line) for one in ranks for line in one.steps[-_SEARCHED:])
        for rank, line in sorted(lines, key=lambda pair: pair[1].step):
            alarms += detector.add(rank, line)
    return sorted(alarms, key=lambda one: one.step)


def observed_blocks(ranks: Sequence[RankLines]) -> tuple[Block, ...]:
    """All blocks of the files of a job."""
    return (
        *_findings(ranks),
        rank_table(ranks),
        *([_over_time(ranks[0])] if ranks[0].steps else []),
        *([_ranks_over_time(ranks)] if len(ranks) > 1 else []),
    )


def _findings(ranks: Sequence[RankLines]) -> Iterator[Finding]:
    alarms = alarms_of(ranks)
    shared = {(one.code, one.step) for one in alarms if one.rank == 0}
    steps = max((rank.steps[-1].step for rank in ranks if rank.steps), default=0)
    means = [statistics.fmean(line.step_ms for line in one.steps) for one in ranks if one.steps]
    yield Finding(
        code="observed.steps",
        values={"steps": steps, "ranks": len(ranks), "alarms": len(alarms)},
        text=f"{counted(steps, 'step')} on {counted(len(ranks), 'rank')}"
        + (f", {duration(max(means))} each." if means else "."),
    )
    for alarm in alarms:
        if (
            alarm.rank
            and alarm.code in ("drift", "level-shift")
            and (alarm.code, alarm.step) in shared
        ):
            continue
        text = alarm_text(alarm)
        yield Finding(
            code=f"observed.{alarm.code}",
            values={"rank": alarm.rank, "step": alarm.step, "part": alarm.part},
            text=f"Step {alarm.step}: {text}.",
            tone="warn",
        )
    for traced in ranks[0].traced:
        yield Finding(
            code="observed.traced",
            values={"step": traced.step, "folder": traced.folder},
            text=f"From step {traced.step}, {traced.verdict} ({traced.folder}/trace.html).",
        )
    missing = sorted(set(range(ranks[0].start.ranks)) - {one.start.rank for one in ranks})
    if missing:
        yield Finding(
            code="observed.missing",
            values={"missing": len(missing)},
            text=f"The files of {counted(len(missing), 'rank')} are missing: {missing[:8]}.",
            tone="warn",
            timed=False,
        )


def rank_table(ranks: Sequence[RankLines]) -> Table:
    rows = [one for one in ranks if one.steps]

    def mean(part: str) -> object:
        return lambda one: statistics.fmean(line.part_ms(part) for line in one.steps)

    columns = [col(part, mean(part), unit="ms") for part in PARTS]  # type: ignore[arg-type]
    return table(
        "observed-ranks",
        "A step on each rank",
        rows,
        [
            col("rank", lambda one: one.start.rank, "count"),
            col("host name", lambda one: one.start.host),
            col("steps", lambda one: one.steps[-1].step, "count"),
            col("step", mean("step"), unit="ms"),  # type: ignore[arg-type]
            *columns,
            col("memory", lambda one: _memory(one.steps[-1]), "bytes", hint="at the end"),
        ],
        caption="Means over all lines. Compute, communication (exposed: the step waits for it),"
        " loader and host (before a forward, outside of the loader) add up to the step.",
    )


def _memory(line: Steps) -> int | None:
    return line.allocated_bytes or line.resident_bytes


def _thinned(lines: Sequence[Steps]) -> Sequence[Steps]:
    return lines[:: 1 + len(lines) // _MOST_POINTS]


def _over_time(rank: RankLines) -> Figure:
    lines = _thinned(rank.steps)
    return Figure(
        name="observed-parts",
        title=f"Parts of a step of rank {rank.start.rank}",
        kind="areas",
        curves=tuple(
            Curve(
                label=part,
                x=tuple(line.step for line in lines),
                y=tuple(max(0.0, line.part_ms(part)) for line in lines),
            )
            for part in PARTS
        ),
        x_label="step",
        y_label="time in a step (ms)",
    )


def _ranks_over_time(ranks: Sequence[RankLines]) -> Figure:
    """Own times of the ranks, those with the longest."""
    with_lines = [one for one in ranks if one.steps]
    slowest = sorted(
        with_lines, key=lambda one: -statistics.fmean(line.own_ms for line in one.steps)
    )[:_MOST_RANKS]
    return Figure(
        name="observed-own",
        title="Own time of the ranks",
        curves=tuple(
            Curve(
                label=f"rank {one.start.rank}",
                x=tuple(line.step for line in _thinned(one.steps)),
                y=tuple(line.own_ms for line in _thinned(one.steps)),
            )
            for one in sorted(slowest, key=lambda one: one.start.rank)
        ),
        x_label="step",
        y_label="step without exposed communication (ms)",
    )
