"""Findings about an observed program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.limits import achieved_flops, mfu
from stepscope.analysis.lints import lint_record
from stepscope.records.memory import SAVED
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, count, duration, percent, rate
from stepscope.studies.program.rows import (
    Watched,
    last_to_come,
    lateness,
    resting_on,
    slowest,
    wait_worth,
)
from stepscope.studies.trace.findings import HOST_LIMITS_FROM, TRACED_APART, trace_findings
from stepscope.studies.views.energy import energy_finding

_MISSING = {
    "trace_missing": "The steps were not traced",
    "traced_fewer": "Fewer steps were traced than requested",
    "memory_missing": "There is no memory ledger",
    "snapshot_missing": "No memory snapshot was taken",
    "recording_failed": "The recording failed",
    "cut_short": "The recording is incomplete",
}
_SEVERAL = 4
_COUNTED_IN = "counted operator by operator"


def inspected_findings(ranks: Sequence[Watched]) -> tuple[Finding, ...]:
    """Findings of all ranks; those that name no record rest on that of the first rank."""
    lead = ranks[0]
    return resting_on(lead, _findings(lead, ranks))


def _findings(lead: Watched, ranks: Sequence[Watched]) -> tuple[Finding, ...]:
    return (
        *_time(lead),
        *_verdict(lead),
        *_issue(lead),
        *_ranks(ranks),
        *_trace(lead),
        *memory_finding(lead),
        *rate_finding(lead),
        *_no_ceilings(lead),
        *energy_finding(lead.record, lead.name),
        *_evaluations(lead),
        *_loop(lead),
        *(finding for one in ranks for finding in _missing(one, len(ranks) > 1)),
        *_lints(lead),
    )


def _time(lead: Watched) -> Iterator[Finding]:
    series = lead.record.find("step")
    if series is None or not series.values:
        return
    spread = summarize(series.values)
    whose = "by the device's clock" if series.clock == "device" else "by the host's clock"
    text = (
        f"A step of {lead.name} takes {duration(spread.median)} {whose}: the median of"
        f" {len(series.values)} steps, half of which are between {duration(spread.q1)} and"
        f" {duration(spread.q3)}."
    )
    more = lead.summary.wall_ms / spread.median - 1 if lead.summary is not None else 0.0
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
        conclusion=f"Under the profiler it takes {percent(-more)} less: the script's work or the"
        " machine's load was different in the traced steps."
        if more < -TRACED_APART
        else "",
    )


def _verdict(lead: Watched) -> Iterator[Finding]:
    idle = lead.host_idle
    if idle is None or lead.summary is None:
        return
    if idle < HOST_LIMITS_FROM:
        launches = round(lead.summary.launches)
        yield Finding(
            code="inspect.not-launch-bound",
            values={"kernels": launches, "host_idle": idle},
            text=f"This step is not launch-bound: its {count(launches)} kernels are launched in"
            f" time during {percent(1 - idle)} of it.",
            tone="good",
        )


def _trace(lead: Watched) -> Iterator[Finding]:
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
            f" the others take {duration(usual)}: excluded from the time ledger.",
        )


def _evaluations(lead: Watched) -> Iterator[Finding]:
    """Report steps that, unlike the others, also ran the model without gradients."""
    left_out = int(lead.record.notes.get("left_out", 0))
    traced = len(lead.traced_validations)
    if left_out:
        yield Finding(
            code="inspect.timed-evaluations",
            values={"steps": left_out},
            timed=False,
            text=f"{left_out} of the timed steps also ran the model without gradients, as in a"
            " validation: they are excluded from the step time.",
        )
    if traced and lead.summary is not None:
        yield Finding(
            code="inspect.traced-evaluations",
            values={"steps": traced},
            timed=False,
            text=f"{traced} of the traced steps also ran the model without gradients: they are"
            " excluded from the time ledger.",
        )
    if "validates_throughout" in lead.record.notes and lead.summary is not None:
        yield Finding(
            code="inspect.evaluates-in-every-step",
            timed=False,
            text="All traced steps also ran the model without gradients: the time ledger includes"
            " that work.",
            tone="warn",
        )


def _issue(lead: Watched) -> Iterator[Finding]:
    """Report the host's issue time, which is hidden as long as the device is slower."""
    took = lead.issue_ms
    if not took or lead.step_ms is None:
        return
    parts = ", ".join(f"{phase} {duration(ms)}" for phase, ms in took.items())
    total = sum(took.values())
    so = f"the step takes no longer ({duration(lead.step_ms)}), so the host is the bottleneck"
    if lead.step_ms >= total:
        so = (
            f"the step takes {lead.step_ms / total:.3g} times that; faster device work alone cannot"
            " make the step shorter than the host's time"
        )
    yield Finding(
        code="inspect.issue",
        values={"issue_ms": total, "step_ms": lead.step_ms, **took},
        text=f"The host takes {duration(total)} to issue a step to an idle device, without the"
        f" profiler ({parts}): {so}.",
    )


def _ranks(ranks: Sequence[Watched]) -> Iterator[Finding]:
    planned = ranks[0].case.ranks
    if planned > len(ranks):
        here = {one.rank for one in ranks}
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
    elif not wait_worth(ranks):
        code, text = (
            "ranks-alike",
            f"The {len(ranks)} ranks are equally fast: none delays the others.",
        )
    elif last is None:
        code, text = "ranks-late", _several_late(late, last_to_come(ranks))
    else:
        code = "slowest-rank"
        text = (
            f"Rank {last.rank} is the slowest: on average it arrives at a collective"
            f" {duration(late[last.rank])} after the first rank, and the others wait for it."
        )
    yield Finding(
        code=f"inspect.{code}",
        values={
            "ranks": len(ranks),
            "slowest": last.rank if last else None,
            **{f"rank{rank}_late_ms": ms for rank, ms in late.items()},
        },
        records=tuple(one.record.id for one in ranks),
        text=text,
        tone="warn" if last else "info",
        timed=bool(late),
    )


def _several_late(late: dict[int, float], times_last: dict[int, int]) -> str:
    """Describe late ranks if none is clearly later than all others."""
    often = sorted((r for r in times_last if times_last[r]), key=lambda r: -times_last[r])
    if len(often) > 1:
        listed = ", ".join(f"rank {rank} for {times_last[rank]}" for rank in often[:_SEVERAL])
        return (
            "Different ranks are late at different collectives, and the others wait for them. Of"
            f" {sum(times_last.values())} collectives, the last to arrive was {listed}."
        )
    most = sorted(late, key=lambda rank: -late[rank])[:_SEVERAL]
    listed = ", ".join(f"rank {rank} {duration(late[rank])}" for rank in most if late[rank] > 0)
    return f"Several ranks are late at collectives, on average after the first one: {listed}."


def memory_finding(lead: Watched) -> Iterator[Finding]:
    account = lead.account
    if account is None or not account.phases:
        return
    peak = account.highest
    ranked = sorted(account.groups(peak).items(), key=lambda item: -item[1])[:4]
    parts = ", ".join(f"{name} {bytes_(size)}" for name, size in ranked if size > 0)
    how = (
        ""
        if account.on_cuda
        else " (tensors counted one by one: a CPU has no allocator statistics)"
    )
    text = f"Memory peaks in the {peak.phase}, at {bytes_(peak.allocated)}{how}: {parts}."
    saved = {k: v for k, v in peak.lines.items() if k.startswith(SAVED)}
    if saved:
        line = max(saved, key=lambda one: saved[one])
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


def rate_finding(lead: Watched) -> Iterator[Finding]:
    flops, achieved = lead.record.quantity("flops"), achieved_flops(lead.record)
    if not flops or achieved is None:
        return
    text = (
        f"A step has {rate(flops, 'FLOP')}, {_COUNTED_IN}, mostly in"
        f" {lead.case.dtype}: {rate(achieved, 'FLOP/s')}"
    )
    share = mfu(lead.record)
    text += f", {percent(share)} of the ceiling measured here" if share else ""
    if share and share > 1:
        text += ", which was therefore measured too low, perhaps on a busy machine"
    yield Finding(
        code="inspect.rate",
        values={"flops": flops, "dtype": lead.case.dtype, "achieved": achieved, "mfu": share},
        text=f"{text}.",
    )


def _no_ceilings(lead: Watched) -> Iterator[Finding]:
    if not any(one.source == "measured" for one in lead.record.ceilings):
        yield Finding(
            code="inspect.no-ceilings",
            timed=False,
            text="The matmul rates and the bandwidth of this machine have not been measured yet, so"
            " the minimum time of this step is unknown. `stepscope advise` on these records, or on"
            " the script, measures them once.",
        )


def _loop(lead: Watched) -> Iterator[Finding]:
    setting, parts = lead.setting, []
    if lead.micro_batches > 1:
        parts.append(f"{lead.micro_batches} forward passes per step")
    if setting is not None and len(setting.optimizers) > 1:
        names = ", ".join(one.name for one in setting.optimizers)
        parts.append(f"{len(setting.optimizers)} optimizers ({names})")
    if parts:
        optimizers = len(setting.optimizers) if setting is not None else None
        yield Finding(
            code="inspect.loop",
            values={"micro_batches": lead.micro_batches, "optimizers": optimizers},
            text=f"A step here is one full iteration of the loop: {'; '.join(parts)}.",
            timed=False,
        )


def _missing(one: Watched, several: bool) -> Iterator[Finding]:
    whose = f"Rank {one.rank}: " if several else ""
    for note, what in _MISSING.items():
        if note in one.record.notes:
            yield Finding(
                code=f"inspect.{note.replace('_', '-')}",
                values={"rank": one.rank, "reason": one.record.notes[note]},
                text=f"{whose}{what}: {one.record.notes[note]}.",
                tone="warn",
                records=(one.record.id,),
                timed=False,
            )


def _lints(lead: Watched) -> Iterator[Finding]:
    for lint in lint_record(lead.record):
        yield Finding(
            code="inspect.lint",
            values={"lint": lint.code},
            text=f"{lint.message[0].upper()}{lint.message[1:]}.",
            tone="warn",
            timed=False,
        )
