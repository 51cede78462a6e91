"""The ranks of a job as findings, tables and a figure."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.conclusions import Conclusion, conclude
from stepscope.analysis.effects import Effect
from stepscope.analysis.job.job import CollectiveRow, Job, Straggler
from stepscope.analysis.trace.summary import LedgerLine
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table
from stepscope.report.format import bytes_, counted, duration, percent
from stepscope.report.tables import col, table
from stepscope.views.trace.view import CLASS_STYLES, IDLE_STYLES, Change, change_table

MAX_COLLECTIVES = 20
_BALANCED = 0.05
_WORTH = 0.05
_WAIT_STYLE = 12


def job_blocks(job: Job) -> tuple[Block, ...]:
    """All blocks of a job, without those of single ranks."""
    return (
        *job_findings(job),
        rank_table(job),
        rank_figure(job),
        *([collective_table(job)] if job.collectives else []),
        *([unread_table(job)] if job.unread else []),
    )


def job_findings(job: Job) -> Iterator[Finding]:
    yield from _stragglers(job)
    yield _exposed(job)
    yield _imbalance(job)
    yield _read(job)
    yield _clocks(job)
    doubtful = [row for row in job.ranks if row.doubt]
    if doubtful:
        yield Finding(
            code="job.ledger-open",
            values={"ranks": len(doubtful)},
            text=f"The ledger does not close on {counted(len(doubtful), 'rank')}: on rank"
            f" {doubtful[0].rank}, {doubtful[0].doubt}.",
            tone="warn",
        )


def _read(job: Job) -> Finding:
    ranks, world = len(job.ranks), job.world_size
    text = (
        f"{counted(ranks, 'rank')} of {world} read." if world else f"{counted(ranks, 'rank')} read."
    )
    if job.unread:
        text += f" {counted(len(job.unread), 'file')} not read."
    complete = not job.unread and world in (None, ranks)
    return Finding(
        code="job.ranks",
        values={"ranks": ranks, "world_size": world, "unread": len(job.unread)},
        text=text,
        tone="info" if complete else "warn",
        timed=False,
    )


def _clocks(job: Job) -> Finding:
    furthest = max((abs(row.clock_us) for row in job.ranks), default=0.0) / 1e3
    values = {
        "compared": job.compared,
        "unmatched": job.unmatched,
        "shift_ms": furthest,
        "scatter_ms": job.scatter_us / 1e3,
    }
    if not job.compared:
        return Finding(
            code="job.not-compared",
            values=values,
            text="No collective could be compared across ranks: it is unknown which rank the"
            " others wait for."
            + (" The number of collectives in a step differs between ranks." * bool(job.unmatched)),
            tone="warn",
        )
    shifted = (
        f"clocks differ by up to {duration(furthest)} and were aligned"
        if furthest
        else "clocks agree"
    )
    left = (
        f" {counted(job.unmatched, 'collective')} could not be compared, because their number"
        " differs between ranks."
        if job.unmatched
        else ""
    )
    return Finding(
        code="job.clocks",
        values=values,
        text=f"{counted(job.compared, 'collective')} of each rank were compared: {shifted}, to"
        f" within {duration(job.scatter_us / 1e3)}.{left}",
        tone="warn" if job.unmatched or not job.aligned else "info",
    )


def _exposed(job: Job) -> Finding:
    step, exposed = job.mean("step_ms"), job.mean("exposed_ms")
    total = job.mean("communication_ms")
    waiting = [row.waiting_ms for row in job.ranks if row.waiting_ms is not None]
    overlapped = 1 - exposed / total if total else None
    text = f"Exposed communication takes {duration(exposed)} of a step of {duration(step)}"
    if overlapped is not None:
        text += f"; {percent(overlapped)} of the communication is overlapped with other work"
    if waiting and exposed:
        mean = sum(waiting) / len(waiting)
        text += f". {duration(mean)} of the exposed time is waiting for ranks that arrive later"
    return Finding(
        code="job.exposed",
        values={"exposed_ms": exposed, "step_ms": step, "overlapped": overlapped},
        text=f"{text}.",
        tone="warn" if exposed > _WORTH * step else "good",
    )


def _stragglers(job: Job) -> Iterator[Finding]:
    for one in job.stragglers[:3]:
        yield Finding(
            code="job.straggler",
            values={
                "rank": one.rank,
                "late_ms": one.late_ms,
                "work_ms": one.work_ms,
                "number": one.collective.number,
                "collective": one.collective.collective,
            },
            text=f"Rank {one.rank} is a straggler: at {collective_label(one.collective)} it is"
            f" {duration(one.late_ms)} behind the median of the others, and last in"
            f" {percent(one.last_share)} of the steps.",
            conclusion=_cause(one, job.scatter_us / 1e3),
            tone="warn",
        )


def _cause(one: Straggler, scatter_ms: float) -> Conclusion:
    """Compare work and lateness, both known to within the scatter of the clocks."""
    late, more_work = (
        Effect(ms, ms - scatter_ms, ms + scatter_ms, neutral=0.0)
        for ms in (one.late_ms, one.work_ms - one.late_ms / 2)
    )
    return conclude(
        f"Before it, its device works {duration(one.work_ms)} longer than the others': more data,"
        " or a slower device."
        if more_work.value > 0
        else "Before it, its device does not work longer than the others': it is idle, waiting for"
        " its CPU or its data.",
        late,
        more_work,
    )


def _imbalance(job: Job) -> Finding:
    longest = max(job.ranks, key=lambda row: row.compute_ms)
    return Finding(
        code="job.imbalance",
        values={"imbalance": job.imbalance, "rank": longest.rank},
        text=f"Computation is balanced to {percent(job.imbalance)}: the longest, on rank"
        f" {longest.rank}, takes {duration(longest.compute_ms)} of a step; the mean is"
        f" {duration(job.mean('compute_ms'))}.",
        tone="warn" if job.imbalance > _BALANCED else "good",
    )


def collective_label(row: CollectiveRow) -> str:
    size = f" ({bytes_(row.bytes)})" if row.bytes else ""
    group = f" in group {row.group}" if row.group else ""
    return f"{row.collective} {row.number} of {row.of}{size}{group}"


def rank_table(job: Job) -> Table:
    return table(
        "job-ranks",
        "A step on each rank",
        job.ranks,
        [
            col("rank", lambda row: row.rank, "count"),
            col("step", lambda row: row.step_ms, unit="ms"),
            col("computation", lambda row: row.compute_ms, unit="ms"),
            col(
                "exposed communication",
                lambda row: row.exposed_ms,
                unit="ms",
                hint="nothing else runs",
            ),
            col(
                "of it waiting",
                lambda row: row.waiting_ms,
                unit="ms",
                hint="for ranks that arrive later at the collective",
            ),
            col("idle", lambda row: row.idle_ms, unit="ms"),
            col(
                "overlapped",
                lambda row: (
                    1 - row.exposed_ms / row.communication_ms if row.communication_ms else None
                ),
                "percent",
                hint="of the communication",
            ),
            col(
                "late by",
                lambda row: row.lateness_ms,
                unit="ms",
                hint="behind the median of the other ranks, mean over collectives",
            ),
            col("last at", lambda row: row.last, "count", hint="collectives of all steps"),
            col("clock", lambda row: row.clock_us, unit="µs", hint="correction of its clock"),
        ],
        caption="Computation, exposed communication and idle time add up to the step. Waiting is"
        " part of the exposed communication; the rest of it is transfer.",
    )


def rank_figure(job: Job) -> Figure:
    names = tuple(str(row.rank) for row in job.ranks)
    parts = (
        ("computation", CLASS_STYLES["matmul"], [row.compute_ms for row in job.ranks]),
        (
            "transfer",
            CLASS_STYLES["communication"],
            [row.exposed_ms - (row.waiting_ms or 0.0) for row in job.ranks],
        ),
        ("waiting for ranks", _WAIT_STYLE, [row.waiting_ms or 0.0 for row in job.ranks]),
        ("idle", IDLE_STYLES[0], [row.idle_ms for row in job.ranks]),
    )
    return Figure(
        name="job-breakdown",
        title="Breakdown of a step on each rank",
        kind="stacks",
        curves=tuple(
            Curve(label=label, x=names, y=tuple(max(0.0, ms) for ms in values), style=style)
            for label, style, values in parts
            if any(values)
        ),
        x_label="rank",
        y_label="time in a step (ms)",
    )


def collective_table(job: Job) -> Table:
    shown = job.collectives[:MAX_COLLECTIVES]
    more = len(job.collectives) - len(shown)
    return table(
        "job-collectives",
        "Collectives by the time that ranks wait at them",
        shown,
        [
            col("collective", lambda row: row.collective),
            col("in the step", lambda row: f"{row.number} of {row.of}"),
            col("group", lambda row: row.group or "–"),
            col("ranks", lambda row: row.ranks, "count"),
            col("size", lambda row: row.bytes or None, "bytes"),
            col(
                "waiting",
                lambda row: row.waiting_ms,
                unit="ms",
                hint="until the last rank arrives, mean over the ranks",
            ),
            col(
                "transfer",
                lambda row: row.transfer_ms,
                unit="ms",
                hint="from the arrival of the last rank to the end",
            ),
            col("last rank", lambda row: row.last_rank, "count"),
            col("last in", lambda row: row.last_share, "percent", hint="of the steps"),
        ],
        caption=f"{more} more." if more else "",
    )


def unread_table(job: Job) -> Table:
    return table(
        "job-unread",
        "Files that were not read",
        list(job.unread.items()),
        [col("file", lambda item: item[0]), col("reason", lambda item: item[1])],
    )


def compared_jobs(first: Job, second: Job, names: tuple[str, str]) -> Table:
    """The mean step of two jobs: parts of a rank, then classes and causes."""
    parts = ("compute_ms", "exposed_ms", "idle_ms")
    labels = ("computation", "exposed communication", "idle")
    rows = [
        Change(label, first.mean(part), second.mean(part))
        for label, part in zip(labels, parts, strict=True)
    ]
    rows += [Change("waiting for ranks", *(_waiting(job) for job in (first, second)))]
    keys = dict.fromkeys(
        (line.phase == "idle", line.kind) for j in (first, second) for line in j.lines
    )
    classes = [
        Change(kind, *(_line_ms(job.lines, kind, idle=idle) for job in (first, second)))
        for idle, kind in keys
    ]
    classes.sort(key=lambda row: -abs(row.after - row.before))
    step = Change("step", first.mean("step_ms"), second.mean("step_ms"))
    return change_table(
        [*rows, *classes, step],
        names,
        f"Mean over {counted(len(first.ranks), 'rank')} and over"
        f" {counted(len(second.ranks), 'rank')}; the first four rows are parts of a rank's step,"
        " the others its classes and causes, the largest change first.",
    )


def _waiting(job: Job) -> float:
    return sum(row.waiting_ms or 0.0 for row in job.ranks) / len(job.ranks)


def _line_ms(lines: tuple[LedgerLine, ...], kind: str, *, idle: bool) -> float:
    return sum(line.ms for line in lines if line.kind == kind and (line.phase == "idle") == idle)
