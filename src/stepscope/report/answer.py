"""The answer of a verdict in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.verdict import (
    RELIABLE,
    AtMost,
    Estimate,
    Gain,
    MemoryChange,
    MemoryPart,
    OnCluster,
    RankedChange,
    Verdict,
    plain,
)
from stepscope.report.format import bytes_, count, duration, listed, percent

_SUBJECTS = {"step": "A step", "full trace": "The full trace (no step is marked)"}
_TRUST = {
    "good": "good measurement",
    "noisy": "noisy",
    "invalid": "invalid",
    "incomplete": "incomplete",
    "unchecked": "not checked",
}
"""States of trust in words."""
_APART = 0.1
"""Relative difference of the recorded step and the unchanged step of the trials that is
explained."""


def sentences(verdict: Verdict, *, with_stats: bool = False) -> Iterator[str]:
    """The answer: how long, how far from the limit, where the time goes, what to do. `with_stats`
    leaves out what the numbers above it on a page say."""
    if verdict.memory:
        yield from _memory_sentences(verdict, with_stats=with_stats)
        return
    if verdict.step is None:
        yield "No step was timed."
        return
    share = verdict.limit_share
    if verdict.cluster is not None:
        yield from _cluster_sentences(verdict.cluster, verdict.step.value, with_stats=with_stats)
    elif verdict.limit is not None and verdict.limit_is_wrong:
        yield (
            f"A step takes {duration(verdict.step.value)}, less than the hardware limit of"
            f" {duration(verdict.limit.ms)}: the ceilings were measured too low, or the FLOPs are"
            " overestimated; measure the ceilings again with `stepscope run --new-ceilings`."
        )
    elif with_stats:
        if verdict.limit is not None and verdict.limit.doubt:
            yield f"The hardware limit is an upper bound: {verdict.limit.doubt}."
    elif verdict.limit is not None and share is not None:
        yield (
            f"A step takes {duration(verdict.step.value)}. The hardware limit is"
            f" {'at most ' if verdict.limit.doubt else ''}{duration(verdict.limit.ms)}, with"
            f" {verdict.limit.dtype} matmuls: {percent(plain(share))} of the"
            f" step{_because(verdict.limit.doubt)}."
        )
    else:
        yield f"{_SUBJECTS[verdict.timed]} takes {duration(verdict.step.value)}."
    if (longer := verdict.evaluations) is not None:
        yield (
            f"Not included: {longer.steps} of {longer.timed} timed steps also ran the model without"
            f" gradients (validation, rollout), for {duration(longer.ms)} more."
        )
    loss = verdict.largest_loss
    if loss is not None:
        named = "attributed part" if verdict.unattributed_ms > loss.ms else "part"
        it = "the hardware limit" if with_stats else "it"
        beyond = "" if verdict.limit is None else f" beyond {it}"
        rest = f"The largest {named}{' beyond compute' if verdict.cluster else beyond}"
        label = loss.label.removesuffix(" beyond the limit") if beyond else loss.label
        yield (f"{rest}: {label}, {duration(loss.ms)} ({percent(loss.ms / verdict.step.value)}).")
    if (late := verdict.slowest) is not None:
        yield (
            f"Rank {late.rank} is the slowest: it arrives at collectives {duration(late.late_ms)}"
            " after the first rank."
        )
    if verdict.cluster is not None:
        yield from _scaling_sentences(verdict.cluster, with_stats=with_stats)
    if verdict.trust in RELIABLE and verdict.trust_reason:
        yield f"{verdict.trust_reason[:1].upper()}{verdict.trust_reason[1:]}."
    if with_stats:
        if why := _mfu_doubt(verdict):
            yield f"The MFU is an upper bound: {why}."
    elif verdict.mfu is not None:
        yield f"MFU in {verdict.dtype}: {_mfu_text(verdict)}."
    if verdict.trust not in RELIABLE:
        ranked = ""
        if verdict.judged:
            what = "predicted changes" if verdict.changes else "changes"
            ranked = f", so {what} are not ranked"
        yield f"The times are not reliable: {verdict.trust_reason}{ranked}."
    if verdict.order:
        yield f"Order only, by {verdict.order_by}, best first: {', '.join(verdict.order)}."
    if (unchanged := verdict.unchanged_ms) is not None and _apart(unchanged, verdict.step.value):
        yield (
            f"In the trials, at another time, the unchanged step took {duration(unchanged)};"
            " measured gains are relative to that."
        )
    if (listed := verdict.listed_ms) is not None and _apart(listed, verdict.step.value):
        yield (
            f"The benchmark measured {duration(listed)} for this step, at another time; the parts"
            " are those of the traced step."
        )
    if verdict.reachable_ms is not None and _may_conclude(verdict):
        yield _reachable(verdict, verdict.step.value, with_stats=with_stats)
        if verdict.reachable_warning:
            yield f"Warning: with these changes {verdict.reachable_warning}."
    elif verdict.judged and not verdict.changes and verdict.trust in RELIABLE:
        yield _no_change(verdict)
    if verdict.memory_change is not None and _may_conclude(verdict):
        yield _memory_sentence(verdict.memory_change, verdict.peak_bytes)
    alone = sum(not one.gain.on_top_of for one in verdict.changes)
    if alone > 1 and verdict.cluster is None:
        # Gains of several changes overlap and do not add up.
        yield "Gains: each alone."


def _may_conclude(verdict: Verdict) -> bool:
    """True if changes are ranked: from reliable times, or because trials measured them."""
    return verdict.trust in RELIABLE or verdict.reachable_verified


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > _APART * other


def _because(doubt: str) -> str:
    return f" ({doubt})" if doubt else ""


def _mfu_text(verdict: Verdict) -> str:
    mfu = verdict.mfu
    assert mfu is not None
    bound = "at most " if isinstance(mfu, AtMost) else ""
    return f"{bound}{percent(plain(mfu))}{_because(_mfu_doubt(verdict))}"


def _mfu_doubt(verdict: Verdict) -> str:
    """Why the MFU is a bound, unless the limit gives the same reason."""
    mfu, limit = verdict.mfu, verdict.limit
    if not isinstance(mfu, AtMost) or (limit is not None and limit.doubt == mfu.reason):
        return ""
    return mfu.reason


def _reachable(verdict: Verdict, step_ms: float, *, with_stats: bool) -> str:
    """The step with the best combination; if measured, against the unchanged step of its trial."""
    assert verdict.reachable_ms is not None
    if with_stats:
        return f"The changes: {listed(verdict.reachable_with)}."
    with_changes = f"With {listed(verdict.reachable_with)}: {duration(verdict.reachable_ms)}"
    if not verdict.reachable_verified:
        return f"{with_changes}, {step_ms / verdict.reachable_ms:.2f}× as fast (predicted)."
    before = verdict.unchanged_ms or step_ms
    against = "" if duration(before) == duration(step_ms) else f" instead of {duration(before)}"
    return f"{with_changes}{against}, {before / verdict.reachable_ms:.2f}× as fast (measured)."


def _cluster_sentences(cluster: OnCluster, step_ms: float, *, with_stats: bool) -> Iterator[str]:
    why = " (each updates only its share)" if cluster.efficiency > 1 else ""
    if with_stats:
        yield f"The ranks run {cluster.strategy}."
        if why:
            yield f"Together they are more than as many times as fast as one{why}."
        return
    yield (
        f"On {count(cluster.ranks)} ranks over {cluster.link}, a step is predicted to take"
        f" {duration(step_ms)} with {cluster.strategy}; one rank alone takes"
        f" {duration(cluster.alone_ms)}: {percent(cluster.efficiency)} scaling efficiency{why}."
    )


def _scaling_sentences(cluster: OnCluster, *, with_stats: bool) -> Iterator[str]:
    if cluster.stops_paying_at is not None:
        yield (
            f"With DDP, more than {percent(cluster.exposed_above)} of a step is not compute from"
            f" {count(cluster.stops_paying_at)} ranks on."
        )
    if cluster.memory_bytes is not None and not with_stats:
        fits = ""
        if cluster.device_bytes is not None:
            can = "fits" if cluster.fits else "does not fit"
            fits = f", which {can} into the {bytes_(cluster.device_bytes)} of the recorded device"
        yield f"Peak memory of a rank is {bytes_(cluster.memory_bytes)}{fits}."


def _no_change(verdict: Verdict) -> str:
    """Why no change is ranked: none is known, none is certain, or none of the tried ones gains."""
    if verdict.not_tried:
        return f"No change could be tried: {verdict.not_tried}."
    if (most := verdict.uncertain) is not None:
        return (
            f"No known change is certain to gain time; the largest predicted gain is that of"
            f" {most.title}, {_with_range(most.gain)}."
        )
    if (most := verdict.undecided) is not None:
        return (
            f"No tried change is shown to gain time; the largest measured gain is that of"
            f" {most.title}, {_with_range(most.gain)}: it may be none."
        )
    if verdict.tried:
        return "None of the tried changes gains time."
    if verdict.not_evaluated:
        return (
            "No change that could be evaluated is predicted to gain 3 % or more; not evaluated:"
            f" {', '.join(verdict.not_evaluated)}."
        )
    return "No known change is predicted to gain 3 % or more."


def _memory_sentence(change: MemoryChange, peak_bytes: int) -> str:
    """The largest reduction of the peak, with what it does to the time."""
    saved = f"{change.title} would lower it by {bytes_(change.gain_bytes)}"
    time = _measured_time(change.measured) if change.tried else _predicted_time(change)
    return f"Peak memory is {bytes_(peak_bytes)}; {saved}{time}."


def _measured_time(gain: Gain | None) -> str:
    """The time of a change that was tried; none where no trial isolates the change."""
    if gain is None:
        return " (predicted)"
    if gain.low <= 0 <= gain.high:
        return " (predicted); no gain in time was measured"
    if gain.low > 0:
        return f" (predicted) and gain {_with_range(gain)}, measured"
    cost = Estimate(value=-gain.value, low=-gain.high, high=-gain.low)
    return f" (predicted) and cost {_with_range(cost)}, measured"


def _predicted_time(change: MemoryChange) -> str:
    if change.best_after:
        after = duration(change.gain_after_ms)
        return f" and with {change.best_after} gain {after} (predicted)"
    if change.gain_ms == 0:
        return " at no cost in time (predicted)"
    verb = "gain" if change.gain_ms > 0 else "cost"
    return f" and {verb} {duration(abs(change.gain_ms))} (predicted)"


def _memory_sentences(verdict: Verdict, *, with_stats: bool) -> Iterator[str]:
    peak = verdict.memory_bytes
    assert peak
    largest = verdict.memory[0]
    if not with_stats:
        yield f"The peak is {bytes_(peak)}."
    yield f"The largest owner is {largest.label}: {share_of_peak(largest, peak)}."
    if verdict.trust_reason:
        yield f"{verdict.trust_reason[:1].upper()}{verdict.trust_reason[1:]}."


def trust_text(verdict: Verdict) -> str:
    if verdict.cluster is not None and verdict.trust in RELIABLE:
        return "predicted, not measured"
    reason = f": {verdict.trust_reason}" if verdict.trust_reason else ""
    return f"{_TRUST[verdict.trust]}{reason}"


def gain_text(change: RankedChange) -> str:
    """The gain with its basis: measured or predicted, and the changes that it is on top of."""
    basis = "measured" if change.gain.measured else "predicted"
    if change.gain.on_top_of:
        basis += f" on top of {listed(change.gain.on_top_of)}"
    memory = ""
    if change.gain_bytes:
        sign = "−" if change.gain_bytes > 0 else "+"
        memory = f"; {sign}{bytes_(abs(change.gain_bytes))} predicted"
    return f"−{_with_range(change.gain)} {basis}{memory}"


def _with_range(one: Estimate) -> str:
    """The value with its interval in the same unit, if it has one."""
    if one.low == one.high:
        return duration(one.value)
    return f"{duration(one.value)} ({range_text(one)})"


def range_text(one: Estimate, digits: int = 3) -> str:
    low, high = (duration(end, digits) for end in (one.low, one.high))
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def share_of_peak(part: MemoryPart, peak: int) -> str:
    return f"{bytes_(part.bytes)}, {percent(part.bytes / peak)}"
