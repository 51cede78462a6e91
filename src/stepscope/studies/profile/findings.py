"""Findings of the profile study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import level
from stepscope.analysis.verdict import at_most
from stepscope.errors import some
from stepscope.records.stats import summarize
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import count, duration, number, percent, rate
from stepscope.studies.profile.rows import (
    AGREES_WITHIN,
    Group,
    Traced,
    attention_core,
    grew_instead,
    leading,
    matmul_share,
    other_kernels,
    top_kernel,
)
from stepscope.views.builders import ids
from stepscope.views.trace.findings import HOST_LIMITS_FROM

_MATTERS = 0.03
_BYTES_SET_THE_TIME = 0.4
_MAX_NAMES = 5
_CLASSED_FROM, _PLACED_FROM = 0.98, 0.95


def profile_findings(groups: Sequence[Group]) -> Iterator[Finding]:
    """Findings on the longest traced step, and on the steps that the CPU limits."""
    if not groups:
        return
    lead = leading(groups)
    traced = [step for group in groups for step in group.modes.values()]
    yield from _closing(traced)
    yield from _host_limits([group.fullest() for group in groups])
    yield from _agreement(lead)
    yield from _top(lead)
    yield from _others(lead)
    yield from _shares(lead)
    yield from _softmax(lead)


def _closing(traced: Sequence[Traced]) -> Iterator[Finding]:
    """Steps whose time the trace does not explain."""
    still_open = [step for step in traced if step.summary.doubt]
    if not still_open:
        return
    worst = max(still_open, key=lambda one: one.summary.unattributed_ms / one.summary.wall_ms)
    named = [f"{step.workload.name} ({step.workload.mode})" for step in (worst, *still_open)]
    others = list(dict.fromkeys(named))[1:]
    more = (
        f" The same holds for {some(others, _MAX_NAMES)}, of {len(traced)} steps." if others else ""
    )
    yield Finding(
        code="profile.unattributed",
        values={"step": named[0], "reason": worst.summary.doubt, "others": len(others)},
        records=ids(still_open),
        text=f"The time of {named[0]} does not add up: {worst.summary.doubt}.{more}",
        tone="warn",
    )


def _host_limits(steps: Sequence[Traced]) -> Iterator[Finding]:
    """The clearest step in full, the others by name."""
    limited = [step for step in steps if step.host_limits(HOST_LIMITS_FROM)]
    if limited:
        lead = min(limited, key=_clearness)
        bare, late = lead.idle_without_profiler, lead.host_share()
        share = late if bare is None else bare
        others = [step.workload.name for step in limited if step is not lead]
        yield Finding(
            code="profile.host-limits",
            values={
                "step": lead.workload.name,
                "idle": share,
                "late": late,
                "others": len(others),
                **_experiments(lead),
            },
            records=ids(limited),
            text=f"{lead.workload.name}, {lead.workload.mode}: the GPU is idle for"
            f" {percent(share)} of it, and in the trace nothing was launched in time for"
            f" {percent(late)}{_issued(lead)}{_proof(lead)}."
            + (f" Likewise for {some(others, _MAX_NAMES)}, of {len(steps)}." if others else ""),
            conclusion=conclude(
                "The CPU limits this step: a lower precision cannot help until there are fewer"
                " launches.",
                *lead.host_effects(),
            ),
            tone="warn",
        )
    free = [step for step in steps if step not in limited and step.experiments_say() is False]
    if free:
        lead = max(free, key=lambda step: step.summary.wall_ms)
        others = [step.workload.name for step in free if step is not lead]
        yield Finding(
            code="profile.host-does-not-limit",
            values={"step": lead.workload.name, "others": len(others), **_experiments(lead)},
            records=ids(free),
            text=f"{lead.workload.name}, {lead.workload.mode}{_issued(lead)}{_proof(lead)}.",
            conclusion=conclude(
                "The CPU does not limit this step"
                + (f", nor {some(others, _MAX_NAMES)}." if others else "."),
                *(one for step in free for one in step.experiments() if one.shown),
            ),
        )


def _experiments(traced: Traced) -> dict[str, Value]:
    return {
        "graph_ratio": traced.graph_ratio(),
        "larger_batch_ratio": traced.larger_batch_ratio(),
        "larger_batch": traced.larger_batch(),
        "issue_ms": traced.issue_ms(),
    }


def _issued(traced: Traced) -> str:
    """Issue time of the CPU and busy time of the GPU, where both are known."""
    issue = traced.issue_ms()
    if issue is None:
        return ""
    return (
        f"; the CPU takes {duration(issue)} to issue what the GPU runs in"
        f" {duration(traced.summary.busy_ms)}"
    )


def _clearness(traced: Traced) -> tuple[bool, float, float]:
    """Sort key: steps that an experiment confirms, then those where a replay gains most."""
    untried = traced.experiments_say() is not True
    return untried, traced.graph_ratio() or 1.0, -traced.host_share()


def _proof(traced: Traced) -> str:
    """Results of the experiments, after a colon."""
    proof = []
    larger, times = traced.larger_batch_ratio(), traced.larger_batch()
    if larger is not None and times is not None:
        proof.append(f"{count(times)} times the batch takes {number(larger, 3)} times as long")
    graph = traced.graph_ratio()
    if graph is not None:
        proof.append(f"a graph replay takes {number(graph, 2)} times as long")
    return f": {', and '.join(proof)}" if proof else ""


def _agreement(group: Group) -> Iterator[Finding]:
    timer, seen = group.forward.timer_ms("forward"), group.forward.traced_ms("forward")
    samples = group.forward.timed("forward")
    if not timer or not seen or samples is None:
        return
    differ = seen / timer - 1
    # The profiler only slows down: by how much more than the timer's noise?
    slowed = level(samples, neutral=seen / (1 + AGREES_WITHIN))
    agree = abs(differ) < AGREES_WITHIN
    yield Finding(
        code="profile.timer-agrees" if agree else "profile.timer-differs",
        values={"step": group.name, "timer_ms": timer, "profiler_ms": seen, "apart": differ},
        records=ids(group.forward),
        text=f"The forward pass of {group.name} takes {duration(timer)} by the timer and"
        f" {duration(seen)} under the profiler ({round(differ * 100):+d} %):"
        f" {'they agree' if agree else 'they do not agree'}.",
        conclusion=conclude(
            "The profiler slows the CPU down for each operator, so quote the timer's time and"
            " the profile's shares.",
            slowed,
        )
        if slowed.below
        else NOTHING,
        tone="info",
    )


def _top(group: Group) -> Iterator[Finding]:
    top = top_kernel(group)
    if top is None:
        return
    unit = f" ({top.unit})" if top.unit else ""
    again = ""
    if top.also_first_in_backward is not None:
        same = "is the same" if top.also_first_in_backward else "is a different one"
        again = f" With the backward pass, the longest {same}."
    yield Finding(
        code="profile.top-kernel",
        values={
            "step": group.name,
            "kernel": top.kernel,
            "share": top.share,
            "calls": top.calls,
            "also_first_in_backward": top.also_first_in_backward,
        },
        records=ids(group.modes.values()),
        text=f"In the forward pass of {group.name}, {top.kernel}{unit} takes the most time:"
        f" {percent(top.share)}, in {count(top.calls)} calls = {top.story}.{again}",
    )


def _others(group: Group) -> Iterator[Finding]:
    full = group.fullest()
    known = list(other_kernels(full))
    others = {name: share for name, share, _ in known if share > _MATTERS}
    if known and not others and full.workload.mode == "forward":
        name, share, _ = known[0]
        yield Finding(
            code="profile.other-kernels",
            values={"step": group.name, name: share},
            records=ids(full),
            text=f"Besides matmuls no kernel takes more than {percent(_MATTERS)} of the forward"
            f" pass of {group.name}; the largest is {name} with {percent(share)}.",
        )
    if others:
        listed = ", ".join(f"{name} {percent(share)}" for name, share in list(others.items())[:5])
        yield Finding(
            code="profile.other-kernels",
            values={"step": group.name, **others},
            records=ids(full),
            text=f"Besides matmuls in {full.workload.mode} of {group.name}: {listed}.",
        )


def _shares(group: Group) -> Iterator[Finding]:
    forward, full = group.modes.get("forward"), group.fullest()
    less, more = matmul_share(forward), matmul_share(full)
    grew = grew_instead(forward, full)
    if forward is None or less is None or more is None or grew is None:
        return
    kind, by = grew
    yield Finding(
        code="profile.matmul-share",
        values={"step": group.name, "inference": less, "full": more, "grew": kind, "by": by},
        records=ids([forward, full]),
        text=f"Matmuls are {percent(less)} of the work in inference and {percent(more)} in"
        f" {full.workload.mode} of {group.name}; {kind} grew most instead,"
        f" by {by * 100:.1f} points.",
    )


def _softmax(group: Group) -> Iterator[Finding]:
    core = attention_core(group)
    if core is None:
        return
    in_time = core.softmax_ms / core.matmul_ms
    in_flops = core.softmax_flops / core.matmul_flops
    values = {"time": in_time, "flops": in_flops}
    limit, why = "", NOTHING
    ceiling = group.forward.record.ceiling("memory.copy")
    if ceiling is not None:
        least_ms = core.softmax_bytes / ceiling.value * 1e3
        share = least_ms / core.softmax_ms
        values["of_copy_rate"] = share
        limit = (
            f" Reading and writing every score takes {duration(least_ms)} at the"
            f" {rate(ceiling.value, 'B/s')} that a copy reaches here"
        )
        if share > 1:
            limit += ", longer than it takes: part of the scores stays in the cache."
        else:
            limit += f": {percent(at_most(share, ceiling.doubt))} of its time."
            steps = summarize(group.forward.summary.steps)
            # The kernels of a step vary as much as the step.
            effect = level(steps).times(core.softmax_ms / steps.median)
            slack = effect.against(least_ms / _BYTES_SET_THE_TIME)
            if slack.below and not ceiling.doubt:
                why = conclude("It is limited by bytes, not FLOPs.", slack)
    yield Finding(
        code="profile.softmax",
        values={"step": group.name, **values},
        records=ids(group.forward),
        text=f"Inside attention of {group.name} the softmax takes {number(in_time, 2)} times as"
        f" long as the two matmuls with {percent(in_flops)} of their FLOPs.{limit}",
        conclusion=why,
    )
