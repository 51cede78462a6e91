"""Sentences that answer the study's question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Finding
from stepscope.report.format import count, duration, number, percent, rate
from stepscope.studies.profile.answers import (
    AGREES_WITHIN,
    attention_core,
    grew_instead,
    matmul_share,
    top_kernel,
)
from stepscope.studies.profile.rows import Group, Traced, leading
from stepscope.studies.trace_findings import HOST_LIMITS_FROM, top_kernels

_MATTERS = 0.03
_BYTES_SET_THE_TIME = 0.4
_MOST_NAMES = 5
_CLASSED_FROM, _PLACED_FROM = 0.98, 0.95


def profile_findings(found: Sequence[Group]) -> tuple[Finding, ...]:
    """Of the longest step that was traced, and of the steps that the host limits."""
    if not found:
        return ()
    lead = leading(found)
    return (
        *_closing(found),
        _told_apart(found),
        *_host_limits(found),
        *_agreement(lead),
        *_top(lead),
        *_others(lead),
        *_shares(lead),
        *_softmax(lead),
    )


def _closing(found: Sequence[Group]) -> Iterator[Finding]:
    traced = [one for group in found for one in group.modes.values()]
    still_open = [one for one in traced if one.summary.doubt]
    worst = max(one.summary.residual_ms / one.summary.wall_ms for one in traced)
    if not still_open:
        yield Finding(
            text=f"The time of all {len(traced)} traced steps is accounted for: what is not"
            f" explained is at most {percent(worst)} of a step.",
            tone="good",
        )
        return
    worst_open = max(still_open, key=lambda one: one.summary.residual_ms / one.summary.wall_ms)
    named = [f"{one.workload.name} ({one.workload.mode})" for one in (worst_open, *still_open)]
    others = list(dict.fromkeys(named))[1:]
    more = f" Of {len(traced)} it is open for {_listed(others)} too." if others else ""
    yield Finding(
        text=f"The ledger of {named[0]} does not close: {worst_open.summary.doubt}.{more}",
        tone="warn",
    )


def _told_apart(found: Sequence[Group]) -> Finding:
    """The least share of the work, over all steps, that is known by class and by part."""
    traced = [one.summary for group in found for one in group.modes.values()]
    kind = min(summary.shares.kind for summary in traced)
    backward = [s.shares.backward_module for s in traced if s.phase_ms("backward") > 0]
    text = f"Of the work of every step at least {percent(kind)} has a class"
    if backward:
        text += f", and of every backward at least {percent(min(backward))} a part of the model"
    good = kind >= _CLASSED_FROM and min(backward, default=1.0) >= _PLACED_FROM
    return Finding(text=f"{text}.", tone="good" if good else "warn")


def _listed(names: Sequence[str]) -> str:
    left = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {left} more" if left > 0 else "")


def _host_limits(found: Sequence[Group]) -> Iterator[Finding]:
    """The step for which it is clearest in full, the others by name."""
    limited = [group for group in found if group.fullest().host_limits(HOST_LIMITS_FROM)]
    if limited:
        lead = min(limited, key=lambda group: _clearness(group.fullest()))
        traced = lead.fullest()
        bare = traced.idle_without_profiler
        share = traced.host_share() if bare is None else bare
        others = [group.name for group in limited if group is not lead]
        yield Finding(
            text=f"{lead.name}, {traced.workload.mode}: the host limits this step; the device is"
            f" idle for {percent(share)} of it, and in the trace nothing was launched in time for"
            f" {percent(traced.host_share())}{_issued(traced)}. A lower precision cannot help until"
            f" there are fewer launches{_proof(traced)}."
            + (f" So it is for {_listed(others)}, of {len(found)}." if others else ""),
            tone="warn",
        )
    free = [
        group.fullest()
        for group in found
        if group not in limited and group.fullest().experiments_say() is False
    ]
    if free:
        lead_free = max(free, key=lambda one: one.summary.wall_ms)
        others = [one.workload.name for one in free if one is not lead_free]
        yield Finding(
            text=f"{lead_free.workload.name}, {lead_free.workload.mode}: the host does not limit"
            f" this step{_issued(lead_free)}{_proof(lead_free)}."
            + (f" Nor does it for {_listed(others)}." if others else ""),
        )


def _issued(traced: Traced) -> str:
    """How long the host takes beside how long the device does, where both are known."""
    issue = traced.issue_ms()
    if issue is None:
        return ""
    return (
        f"; it takes the host {duration(issue)} to issue what the device runs in"
        f" {duration(traced.summary.busy_ms)}"
    )


def _clearness(traced: Traced) -> tuple[bool, float, float]:
    """Those that an experiment confirms first, and of them where a replay gains most."""
    untried = traced.experiments_say() is not True
    return untried, traced.graph_ratio() or 1.0, -traced.host_share()


def _proof(traced: Traced) -> str:
    """What the experiments gave, after a colon."""
    proof = []
    larger, times = traced.larger_batch_ratio(), traced.larger_batch()
    if larger is not None and times is not None:
        proof.append(f"{count(times)} times the batch takes {number(larger, 3)} times as long")
    graph = traced.graph_ratio()
    if graph is not None:
        proof.append(f"a graph replay takes {number(graph, 2)} times as long")
    return f": {', and '.join(proof)}" if proof else ""


def _agreement(group: Group) -> Iterator[Finding]:
    traced = group.modes.get("forward") or group.fullest()
    timer, seen = traced.timer_ms("forward"), traced.traced_ms("forward")
    if not timer or not seen:
        return
    differ = seen / timer - 1
    text = (
        f"The forward of {group.name} takes {duration(timer)} by the timer and {duration(seen)}"
        f" under the profiler ({round(differ * 100):+d} %)"
    )
    if abs(differ) < AGREES_WITHIN:
        yield Finding(text=f"{text}: they agree.", tone="good")
    else:
        yield Finding(
            text=f"{text}: they do not agree. The profiler lengthens what the host does for each"
            " operator, so the timer's is the time to quote, and the profile's shares are.",
        )


def _top(group: Group) -> Iterator[Finding]:
    top = top_kernel(group)
    if top is None:
        return
    unit = f" ({top.unit})" if top.unit else ""
    again = ""
    if top.also_first_in_backward is not None:
        same = "is the same" if top.also_first_in_backward else "is another one"
        again = f" With the backward, the first {same}."
    yield Finding(
        text=f"In the forward of {group.name}, {top.kernel}{unit} takes the most time:"
        f" {percent(top.share)}, in {count(top.calls)} calls = {top.story}.{again}"
    )


def _others(group: Group) -> Iterator[Finding]:
    summary = group.fullest().summary
    classes = {row.kernel: row.kind for row in summary.kernels}
    total = sum(row.ms for row in summary.kernels)
    others = [
        f"{name} {percent(ms / total)}"
        for name, ms, _ in top_kernels(summary)
        if classes[name] != "matmul" and ms > _MATTERS * total
    ]
    if others:
        mode = group.fullest().workload.mode
        yield Finding(
            text=f"Besides matrix products in {mode} of {group.name}: {', '.join(others[:5])}."
        )


def _shares(group: Group) -> Iterator[Finding]:
    forward, full = group.modes.get("forward"), group.fullest()
    less, more = matmul_share(forward), matmul_share(full)
    grew = grew_instead(forward, full)
    if less is None or more is None or grew is None:
        return
    kind, by = grew
    yield Finding(
        text=f"Matrix products are {percent(less)} of the work in inference and {percent(more)} in"
        f" {full.workload.mode} of {group.name}; {kind} grew most instead,"
        f" by {by * 100:.1f} points."
    )


def _softmax(group: Group) -> Iterator[Finding]:
    core = attention_core(group)
    if core is None:
        return
    in_time = core.softmax_ms / core.matmul_ms
    in_flops = core.softmax_flops / core.matmul_flops
    text = (
        f"Inside attention of {group.name} the softmax takes {number(in_time, 2)} times as long as"
        f" the two matrix products with {percent(in_flops)} of their FLOPs"
    )
    record = (group.modes.get("forward") or group.fullest()).record
    ceiling = record.ceiling("memory.copy")
    if ceiling is not None:
        least_ms = core.softmax_bytes / ceiling.value * 1e3
        share = least_ms / core.softmax_ms
        text += (
            f". To read and write every score takes {duration(least_ms)} at the"
            f" {rate(ceiling.value, 'B/s')} that a copy reaches here"
        )
        if share > 1:
            text += ", longer than it takes: part of the scores stays in the cache of the device"
        else:
            text += f": {percent(share)} of its time"
            text += ", so bytes set it and not FLOPs" if share >= _BYTES_SET_THE_TIME else ""
    yield Finding(text=f"{text}.")
