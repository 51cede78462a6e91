"""Findings about an observed program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.checks import check_record
from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import level, part
from stepscope.analysis.limits import achieved_flops, mfu, step_ms
from stepscope.analysis.trace.collectives import times_last
from stepscope.analysis.verdict import AtMost, plain
from stepscope.records.memory import SAVED
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, count, duration, percent, rate
from stepscope.views.builders import ids
from stepscope.views.prediction import planned_findings
from stepscope.views.program.rows import (
    ProgramRecord,
    lateness,
    resting_on,
    slowest,
    starts,
    wait_matters,
)
from stepscope.views.trace.findings import HOST_LIMITS_FROM, TRACED_APART, trace_findings

_MISSING = {
    "trace_missing": "The steps were not traced",
    "timed_fewer": "Fewer steps were timed than usual",
    "traced_fewer": "Fewer steps were traced than requested",
    "memory_missing": "There is no memory breakdown",
    "plans_missing": "The memory of the step was not planned",
    "snapshot_missing": "No memory snapshot was taken",
    "recording_failed": "The recording failed",
    "cut_short": "The recording is incomplete",
}
_MAX_RANKS = 4


def inspected_findings(ranks: Sequence[ProgramRecord]) -> tuple[Finding, ...]:
    """Findings of all ranks; those that name no record rest on that of the first rank."""
    lead = ranks[0]
    findings = (
        *_time(lead),
        *_launches(lead),
        *_issue(lead),
        *_ranks(ranks),
        *_trace(lead),
        *memory_finding(lead),
        *planned_findings(lead.plans),
        *rate_finding(lead),
        *_no_ceilings(lead),
        *_evaluations(lead),
        *_bursts(lead),
        *_loop(lead),
        *(finding for rank in ranks for finding in _missing(rank, len(ranks) > 1)),
        *_failed_checks(lead),
    )
    return resting_on(lead, findings)


def _time(lead: ProgramRecord) -> Iterator[Finding]:
    series = lead.record.find("step")
    if series is None or not series.values:
        return
    spread = summarize(series.values)
    clock = "GPU" if series.clock == "device" else "CPU"
    text = (
        f"A step of {lead.name} takes {duration(spread.median)} by the {clock}'s clock: the median"
        f" of {len(series.values)} steps, half of which are between {duration(spread.q1)} and"
        f" {duration(spread.q3)}."
    )
    more = 0.0
    if lead.summary is not None:
        more = (lead.summary.wall_ms + lead.waited_less_ms) / spread.median - 1
    if more > TRACED_APART:
        text += f" Under the profiler it takes {percent(more)} more."
    yield Finding(
        code="inspect.step",
        values={
            "program": lead.name,
            "step_ms": spread.median,
            "steps": len(series.values),
            "q1_ms": spread.q1,
            "q3_ms": spread.q3,
            "clock": series.clock,
            "traced_more": more,
        },
        text=text,
        conclusion=conclude(
            f"Under the profiler it takes {percent(-more)} less: the script's work or the machine's"
            " load was different in the traced steps.",
            level(spread).against((1 + more) * spread.median / (1 - TRACED_APART)),
        )
        if more < -TRACED_APART
        else NOTHING,
    )


def _launches(lead: ProgramRecord) -> Iterator[Finding]:
    idle = lead.host_idle
    if idle is not None and lead.summary is not None and idle < HOST_LIMITS_FROM:
        launches, step = round(lead.summary.launches), summarize(lead.summary.steps)
        waits = part(idle * step.median, step).against(HOST_LIMITS_FROM * step.median)
        yield Finding(
            code="inspect.not-launch-bound",
            values={"kernels": launches, "host_idle": idle},
            text=f"The {count(launches)} kernels of a step are launched in time during"
            f" {percent(1 - idle)} of it.",
            conclusion=conclude("This step is not launch-bound.", waits),
            tone="good" if waits.below else "info",
        )


def _trace(lead: ProgramRecord) -> Iterator[Finding]:
    if lead.summary is None:
        return
    yield from trace_findings(
        lead.summary, lead.step_ms, lead.loading_ms, records=(lead.record.id,)
    )
    longer = lead.traced_longer
    if longer:
        usual = lead.summary.wall_ms
        yield Finding(
            code="inspect.traced-longer",
            values={"steps": len(longer), "longest_ms": max(longer), "usual_ms": usual},
            text=f"{len(longer)} of the traced steps took {', '.join(map(duration, longer))}, while"
            f" the others take {duration(usual)}: excluded from the time breakdown.",
        )


def _evaluations(lead: ProgramRecord) -> Iterator[Finding]:
    """Report steps that, unlike the others, also ran the model without gradients."""
    timed = int(lead.record.notes.get("left_out", 0))
    traced = len(lead.traced_validations) if lead.summary is not None else 0
    also = "also ran the model without gradients"
    longer = f", for {duration(lead.evaluating_ms)} more" if lead.evaluating_ms else ""
    if timed:
        yield Finding(
            code="inspect.timed-evaluations",
            values={"steps": timed},
            timed=False,
            text=f"{timed} of the timed steps {also}, as in a validation or a rollout{longer}: they"
            " are excluded from the step time.",
        )
    if starts := int(lead.record.notes.get("epoch_starts", 0)):
        yield Finding(
            code="inspect.epoch-starts",
            values={"steps": starts},
            timed=False,
            text=f"{starts} of the timed steps took the first batch of an epoch, for which the"
            " workers of the DataLoader have to start: excluded from the step time.",
        )
    if traced:
        yield Finding(
            code="inspect.traced-evaluations",
            values={"steps": traced},
            timed=False,
            text=f"{traced} of the traced steps {also}: they are excluded from the time breakdown.",
        )
    if "validates_throughout" in lead.record.notes and lead.summary is not None:
        yield Finding(
            code="inspect.evaluates-in-every-step",
            timed=False,
            text=f"All traced steps {also}: the time breakdown includes that work.",
            tone="warn",
        )


def _bursts(lead: ProgramRecord) -> Iterator[Finding]:
    """Report waits for a DataLoader that were averaged over the timed steps."""
    waits = lead.record.find("loading")
    if "loader_bursts" not in lead.record.notes or waits is None or not waits.values:
        return
    least, most = min(waits.values), max(waits.values)
    yield Finding(
        code="inspect.loader-bursts",
        values={"least_ms": least, "most_ms": most},
        text="The workers of the DataLoader are slower than the step and deliver batches in bursts:"
        f" a step waits between {duration(least)} and {duration(most)}. The step time has the mean"
        " of these waits.",
        conclusion=conclude(
            "More workers, or less work for each sample, make the step faster.",
            level(summarize(waits.values)),
        ),
        tone="warn",
    )


def _issue(lead: ProgramRecord) -> Iterator[Finding]:
    """Report the CPU's issue time, which is hidden as long as the GPU is slower."""
    took = lead.issue_ms
    if not took or lead.step_ms is None:
        return
    parts = ", ".join(f"{phase} {duration(ms)}" for phase, ms in took.items())
    total, series = sum(took.values()), lead.record.find("step")
    consequence = (
        f"the step takes {lead.step_ms / total:.3g} times that; faster GPU work alone cannot make"
        " the step shorter than the CPU's time"
        if lead.step_ms >= total
        else f"the step takes no longer ({duration(lead.step_ms)})"
    )
    assert series is not None
    step = level(summarize(series.values), neutral=total)
    yield Finding(
        code="inspect.issue",
        values={"issue_ms": total, "step_ms": lead.step_ms, **took},
        text=f"The CPU takes {duration(total)} to issue a step to an idle GPU, without the profiler"
        f" ({parts}): {consequence}.",
        conclusion=conclude("The CPU is the bottleneck.", step) if step.below else NOTHING,
    )


def _ranks(ranks: Sequence[ProgramRecord]) -> Iterator[Finding]:
    planned = ranks[0].case.ranks
    if planned > len(ranks):
        here = {present.rank for present in ranks}
        gone = ", ".join(str(rank) for rank in range(planned) if rank not in here)
        yield Finding(
            code="inspect.ranks-missing",
            values={"ranks": planned, "missing": gone},
            text=f"Of {planned} ranks, there are no records of: {gone}.",
            tone="warn",
            timed=False,
        )
    if len(ranks) < 2:
        return
    late, last = lateness(ranks), slowest(ranks)
    if not late:
        code, text = "no-collectives", "The ranks ran no collectives that could be compared."
    elif not wait_matters(ranks):
        code, text = "ranks-alike", f"The {len(ranks)} ranks are equally fast: none delays another."
    elif last is None:
        code, text = "ranks-late", _several_late(late, times_last(starts(ranks)))
    else:
        code, text = (
            "slowest-rank",
            (
                f"Rank {last.rank} is the slowest: on average it arrives at a collective"
                f" {duration(late[last.rank])} after the first rank, and the others wait for it."
            ),
        )
    yield Finding(
        code=f"inspect.{code}",
        values={
            "ranks": len(ranks),
            "slowest": last.rank if last else None,
            **{f"rank{rank}_late_ms": ms for rank, ms in late.items()},
        },
        records=ids(ranks),
        text=text,
        tone="warn" if last else "info",
        timed=bool(late),
    )


def _several_late(late: dict[int, float], last: dict[int, int]) -> str:
    """Describe late ranks if none is clearly later than all others."""
    often = sorted((rank for rank in last if last[rank]), key=lambda rank: -last[rank])
    if len(often) > 1:
        listed = ", ".join(f"rank {rank} for {last[rank]}" for rank in often[:_MAX_RANKS])
        return (
            "Different ranks are late at different collectives, and the others wait for them. Of"
            f" {sum(last.values())} collectives, the last to arrive was {listed}."
        )
    most = sorted(late, key=lambda rank: -late[rank])[:_MAX_RANKS]
    listed = ", ".join(f"rank {rank} {duration(late[rank])}" for rank in most if late[rank] > 0)
    return f"Several ranks are late at collectives, on average after the first one: {listed}."


def memory_finding(lead: ProgramRecord) -> Iterator[Finding]:
    account = lead.account
    if account is None or not account.phases:
        return
    peak = account.highest
    ranked = sorted(account.groups(peak).items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {bytes_(size)}" for name, size in ranked if size > 0)
    how = "" if account.on_cuda else " (tensors counted: a CPU has no allocator statistics)"
    text = f"Memory peaks in the {peak.phase}, at {bytes_(peak.allocated)}{how}: {parts}."
    saved = {k: v for k, v in peak.lines.items() if k.startswith(SAVED)}
    if saved:
        line = max(saved, key=lambda name: saved[name])
        text += (
            f" The largest line of tensors saved for backward is “{line.removeprefix(SAVED)}”:"
            f" {bytes_(saved[line])}."
        )
    yield Finding(
        code="inspect.memory",
        values={"phase": peak.phase, "peak_bytes": peak.allocated, **dict(ranked)},
        text=text,
        timed=False,
    )


def rate_finding(lead: ProgramRecord) -> Iterator[Finding]:
    flops, achieved = lead.record.quantity("flops"), achieved_flops(lead.record)
    if not flops or achieved is None:
        return
    text = (
        f"A step has {rate(flops, 'FLOP')}, counted operator by operator, mostly in"
        f" {lead.case.dtype}: {rate(achieved, 'FLOP/s')}"
    )
    share = mfu(lead.record)
    known = None if share is None else plain(share)
    text += f", {percent(share)} of the ceiling measured here" if share else ""
    step = step_ms(lead.record)
    why = NOTHING
    if known and known > 1 and step is not None:
        why = conclude(
            "The ceiling was measured too low, perhaps on a busy machine.",
            level(step, neutral=known * step.median),
        )
    elif isinstance(share, AtMost):
        text += f", which may be too low: {share.reason}"
    yield Finding(
        code="inspect.rate",
        values={"flops": flops, "dtype": lead.case.dtype, "achieved": achieved, "mfu": known},
        text=f"{text}.",
        conclusion=why,
    )


def _no_ceilings(lead: ProgramRecord) -> Iterator[Finding]:
    if not any(ceiling.source == "measured" for ceiling in lead.record.ceilings):
        yield Finding(
            code="inspect.no-ceilings",
            timed=False,
            text="The matmul rates and the bandwidth of this machine have not been measured yet, so"
            " the ideal time of this step is unknown. `stepscope advise` on these records, or on"
            " the script, measures them once.",
        )


def _loop(lead: ProgramRecord) -> Iterator[Finding]:
    setting, parts = lead.setting, []
    if lead.micro_batches > 1:
        parts.append(f"{lead.micro_batches} forward passes per step")
    if setting is not None and len(setting.optimizers) > 1:
        names = ", ".join(optimizer.name for optimizer in setting.optimizers)
        parts.append(f"{len(setting.optimizers)} optimizers ({names})")
    if parts:
        optimizers = len(setting.optimizers) if setting is not None else None
        yield Finding(
            code="inspect.loop",
            values={"micro_batches": lead.micro_batches, "optimizers": optimizers},
            text=f"A step here is one full iteration of the loop: {'; '.join(parts)}.",
            timed=False,
        )


def _missing(watched: ProgramRecord, several: bool) -> Iterator[Finding]:
    whose = f"Rank {watched.rank}: " if several else ""
    for note, what in _MISSING.items():
        if reason := watched.record.notes.get(note):
            yield Finding(
                code=f"inspect.{note.replace('_', '-')}",
                values={"rank": watched.rank, "reason": reason},
                text=f"{whose}{what}: {reason}.",
                tone="warn",
                records=(watched.record.id,),
                timed=False,
            )


def _failed_checks(lead: ProgramRecord) -> Iterator[Finding]:
    for check in check_record(lead.record):
        yield Finding(
            code="inspect.failed-check",
            values={"check": check.code},
            text=f"{check.message[0].upper()}{check.message[1:]}.",
            tone="warn",
            timed=False,
        )
