"""The verdict on a recorded training program: from its record and the trials of its changes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import advice_given
from stepscope.advisor.advise.outcome import Tried, best_of
from stepscope.analysis import verdict as verdict_parts
from stepscope.analysis.advice.changes import (
    WORTH,
    Advice,
    advise,
    afterwards,
    applicable,
    compatible,
    without_ranks,
)
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.pieces import ACCELERATE
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.limits import hardware_limit, mfu
from stepscope.analysis.trace.summary import Summary
from stepscope.analysis.trust import trust_of
from stepscope.analysis.verdict import (
    MAX_CHANGES,
    BreakdownPart,
    Estimate,
    Evaluations,
    Limit,
    MemoryChange,
    RankedChange,
    Verdict,
    parts_of,
    ranked,
)
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.studies.own.cases import STUDY_NAME as OWN
from stepscope.studies.program import waterfall
from stepscope.studies.program.cases import STUDY_NAME as INSPECTED
from stepscope.studies.program.rows import ProgramRecord, programs

_LABELS = {
    waterfall.MATMULS: verdict_parts.SLOW_MATMULS,
    waterfall.UPDATE: verdict_parts.OPTIMIZER,
    waterfall.LOADER: verdict_parts.LOADER,
    waterfall.COPIES: verdict_parts.COPIES,
    waterfall.OUTSIDE: verdict_parts.OUTSIDE,
    waterfall.UNEXPLAINED: verdict_parts.UNATTRIBUTED,
    waterfall.NOT_TRACED: verdict_parts.UNATTRIBUTED,
}
"""Causes of the waterfall by their names in the verdict."""
_NOTABLE = 0.1
"""Share of the timed steps from which on validations and rollouts are part of the verdict."""


def program_verdict(records: Sequence[Record]) -> Verdict | None:
    """The verdict on the recorded program of these records; None where there is none, or where a
    model was measured in several variants and no trial says which one is meant."""
    inspected = [record for record in records if record.study == INSPECTED]
    trials = [Tried(record) for record in records if record.study == TRIALS]
    own = [record for record in records if record.study == OWN]
    if not inspected and (not own or (len(own) > 1 and not trials)):
        return None
    lead = programs(inspected)[0][0] if inspected else ProgramRecord(own[0])
    return _verdict(lead, trials)


def _verdict(lead: ProgramRecord, trials: Sequence[Tried]) -> Verdict:
    record = lead.record
    trust = trust_of(record)
    verdict = Verdict(
        subject=lead.name,
        device=record.environment.device_name,
        step=_step(record),
        mfu=mfu(record),
        dtype=lead.case.dtype,
        trust=trust.level,
        trust_reason=trust.reason,
        judged=False,
        evaluations=_evaluations(lead),
        next_command=_inspect_again(lead),
    )
    try:
        facts = facts_of(record)
    except StepscopeError:
        return verdict
    assert lead.summary is not None
    limit = hardware_limit(
        facts.flops, facts.parameters, facts.dtype, facts.rates, facts.bandwidth, facts.lacks
    )
    advice = _advice(record, facts)
    best = best_of(trials)
    tried = _codes_of(trials)
    untried = [one for one in advice if one.code not in tried]
    together = best.trial.advice if best is not None else _combination(untried, lead)
    reachable = _proven(best, facts) if best is not None else _predicted(facts, together)
    return replace(
        verdict,
        judged=True,
        dtype=facts.dtype,
        parts=breakdown(lead.summary, facts.step_ms, limit, lead.waited_less_ms),
        limit=limit,
        reachable_ms=reachable,
        reachable_verified=best is not None,
        reachable_with=tuple(one.title for one in together),
        reachable_warning=best.loss_warning if best is not None else "",
        peak_bytes=facts.peak_bytes,
        memory_change=_memory_change(facts, advice, together, trials, best),
        changes=_changes(facts, untried, together, trials, best),
        uncertain=_uncertain(facts, advice, trials),
        tried=sum(one.realized is not None for one in trials),
        next_command=_next(lead, advice, trials, best),
    )


def _evaluations(lead: ProgramRecord) -> Evaluations | None:
    """Steps with a validation or a rollout, if these take a notable share of the timed steps."""
    longer, step = lead.record.find("evaluating"), lead.record.find("step", "host")
    if longer is None or step is None or not step.values:
        return None
    timed = sum(longer.values) + sum(step.values)
    if lead.evaluating_ms < _NOTABLE * timed:
        return None
    count = len(longer.values)
    return Evaluations(steps=count, timed=count + len(step.values), ms=lead.evaluating_ms)


def breakdown(
    summary: Summary, step_ms: float, limit: Limit | None, waited_less_ms: float = 0.0
) -> tuple[BreakdownPart, ...]:
    """The parts of the waterfall above the hardware limit, idle time as one part."""
    least = {} if limit is None else {"matmuls": limit.matmul_ms, "update": limit.update_ms}
    parts = waterfall.parts_of(summary, least, step_ms, waited_less_ms)
    spent: defaultdict[str, float] = defaultdict(float)
    spent[verdict_parts.IDEAL] = sum(parts.least.values())
    labels = _LABELS if limit is not None else _LABELS | {waterfall.MATMULS: verdict_parts.MATMULS}
    for cause, ms in parts.beyond.items():
        idle = cause.startswith(waterfall.IDLE)
        spent[verdict_parts.IDLE if idle else labels.get(cause, cause)] += ms
    return parts_of(spent)


def _advice(record: Record, facts: Facts) -> Sequence[Advice]:
    """The advice stored with the record, then what newer rules add to it."""
    advice = advise(facts)
    if (given := advice_given(record)) is not None:
        codes = {one.code for one in given}
        stored = [_with_range(one, facts) for one in given]
        advice = (*stored, *(one for one in advice if one.code not in codes))
    return without_ranks(advice) if facts.doubt else advice


def _memory_change(
    facts: Facts,
    advice: Sequence[Advice],
    together: Sequence[Advice],
    trials: Sequence[Tried],
    best: Tried | None,
) -> MemoryChange | None:
    """The largest predicted reduction of the peak that goes with the combination, if it is worth a
    change."""
    codes = {one.code for one in together}
    refuted = {trial.trial.code for trial in trials if not (trial.works or trial.cut_off)}
    fitting = (
        one
        for one in advice
        if one.code in codes or (one.code not in refuted and _goes_with(one, together))
    )
    most = max(fitting, key=lambda one: one.gain_bytes, default=None)
    if most is None or most.gain_bytes < max(1, WORTH * facts.peak_bytes):
        return None
    return MemoryChange(
        code=most.code, title=most.title, gain_bytes=most.gain_bytes, gain_ms=most.gain_ms,
        best_after=most.best_after, gain_after_ms=most.gain_after_ms,
        tried=most.code in _codes_of(trials), measured=_measured(most, best, trials, facts),
    )  # fmt: skip


def _codes_of(trials: Sequence[Tried]) -> set[str]:
    """The changes that were tried, alone or with others."""
    return {one.code for trial in trials if not trial.cut_off for one in trial.trial.advice}


def _measured(
    advice: Advice, best: Tried | None, trials: Sequence[Tried], facts: Facts
) -> Estimate | None:
    """Measured gain of a change: as part of the best combination, or alone."""
    if best is not None and advice.code in [one.code for one in best.trial.advice]:
        kept = _kept(advice, best, trials, facts)
        return kept.gain if kept is not None and kept.verified else None
    alone = (one for one in trials if one.trial.code == advice.code and one.realized is not None)
    trial = next(alone, None)
    return None if trial is None else _verified(advice, trial, facts).gain


def _with_range(advice: Advice, facts: Facts) -> Advice:
    """Advice that was stored before predictions had ranges gets the range of its rule."""
    if advice.low_ms is not None and advice.high_ms is not None:
        return advice
    low, high = gain_range(advice.code, advice.gain_ms, facts)
    return replace(advice, low_ms=low, high_ms=high, ranked=low > 0)


def _step(record: Record) -> Estimate | None:
    series = record.find("step")
    if series is None or not series.values:
        return None
    times = summarize(series.values)
    return Estimate(value=times.median, low=times.low, high=times.high)


def _proven(best: Tried, facts: Facts) -> float | None:
    return None if best.ratio is None else facts.step_ms * best.ratio.value


def _combination(advice: Sequence[Advice], lead: ProgramRecord) -> tuple[Advice, ...]:
    """All ranked changes that go together and can be applied from outside."""
    settings = OF_SCRIPTS if lead.record.study == INSPECTED else OF_MODELS
    faster = [one for one in advice if one.ranked and one.gain_ms > 0]
    same_batch = [one for one in faster if "batch" not in one.setting]
    largest = sorted(applicable(same_batch, settings), key=lambda one: -one.gain_ms)
    return compatible(largest)


def _predicted(facts: Facts, together: Sequence[Advice]) -> float | None:
    if not together:
        return None
    return min(facts.step_ms, afterwards(facts, [one.code for one in together]).step_ms)


def _changes(
    facts: Facts,
    untried: Sequence[Advice],
    together: Sequence[Advice],
    trials: Sequence[Tried],
    best: Tried | None,
) -> tuple[RankedChange, ...]:
    """The changes of the combination, then those that add to it. Of a verified combination, the
    others are predicted for the changed step, and what trials left out is not advised."""
    if best is None:
        most = sorted(untried, key=lambda one: -(one.low_ms or 0.0))
        return ranked(list(_predictions(compatible((*together, *most)))))
    kept = [change for one in together if (change := _kept(one, best, trials, facts)) is not None]
    codes = {one.code for one in untried}
    more = [
        one
        for one in advise(afterwards(facts, [one.code for one in together]))
        if one.code in codes and _goes_with(one, together)
    ]
    kept.sort(key=lambda one: -one.gain.low)
    return (*kept, *ranked(list(_predictions(compatible(more)))))[:MAX_CHANGES]


def _goes_with(advice: Advice, together: Sequence[Advice]) -> bool:
    """True if a change can be added to a combination that does not have it."""
    return not any(
        advice.conflicts_with(one) or _setting(advice) == _setting(one) for one in together
    )


def _predictions(advice: Sequence[Advice]) -> Iterator[RankedChange]:
    for one in advice:
        if one.ranked and one.gain_ms > 0 and (change := _prediction(one)) is not None:
            yield change


def _prediction(advice: Advice) -> RankedChange | None:
    """The predicted gain of a change; None if it has no range."""
    if advice.low_ms is None or advice.high_ms is None:
        return None
    gain = Estimate(value=advice.gain_ms, low=advice.low_ms, high=advice.high_ms)
    return _ranked_change(advice, gain, verified=False)


def _uncertain(
    facts: Facts, advice: Sequence[Advice], trials: Sequence[Tried]
) -> RankedChange | None:
    """The largest predicted gain that may be none, of a change without a trial."""
    measured = {one.trial.code for one in trials if one.realized is not None}
    gains = [
        one
        for one in advice
        if not one.ranked and one.code not in measured and one.gain_ms >= WORTH * facts.step_ms
    ]
    most = max(gains, key=lambda one: one.gain_ms, default=None)
    return None if most is None else _prediction(most)


def _ranked_change(
    advice: Advice, gain: Estimate, *, verified: bool, warning: str = ""
) -> RankedChange:
    return RankedChange(
        code=advice.code, title=advice.title, gain=gain, verified=verified, risk=advice.risk,
        lines=advice.lines, gain_bytes=advice.gain_bytes, warning=warning,
        setting=_setting(advice),
    )  # fmt: skip


def _kept(
    advice: Advice, best: Tried, trials: Sequence[Tried], facts: Facts
) -> RankedChange | None:
    """A change of the best combination: its gain alone, or on top of those before it."""
    by_codes = {
        tuple(sorted(one.code for one in trial.trial.advice)): trial
        for trial in trials
        if trial.ratio is not None
    }
    alone = by_codes.get((advice.code,))
    if alone is not None and alone.kept:
        return _verified(advice, alone, facts)
    codes = [one.code for one in best.trial.advice]
    first = codes[: codes.index(advice.code)]
    without, added = (by_codes.get(tuple(sorted(one))) for one in (first, [*first, advice.code]))
    if without is not None and added is not None and without.ratio and added.ratio:
        gain = without.ratio.value - added.ratio.value
        noise = math.hypot(*((one.high - one.low) / 2 for one in (without.ratio, added.ratio)))
        low, value, high = (facts.step_ms * one for one in (gain - noise, gain, gain + noise))
        return _ranked_change(advice, Estimate(value=value, low=low, high=high), verified=True)
    others = [code for code in codes if code != advice.code]
    later = [one for one in advise(afterwards(facts, others)) if one.code == advice.code]
    return next(_predictions(later), None)


def _verified(advice: Advice, trial: Tried, facts: Facts) -> RankedChange:
    """The gain of a trial as the same share of the recorded step."""
    realized, base = trial.realized, trial.base_ms
    assert realized is not None
    assert base is not None
    scale = facts.step_ms / base
    gain = Estimate(
        value=scale * realized.value, low=scale * realized.low, high=scale * realized.high
    )
    return _ranked_change(advice, gain, verified=True, warning=trial.loss_warning)


def _setting(advice: Advice) -> str:
    """Return the setting that a change is compared by: the pieces of `accelerate` are parts of
    one."""
    if ACCELERATE in advice.setting.values():
        return ACCELERATE
    return next(iter(advice.setting), "")


def _inspect_again(lead: ProgramRecord) -> str:
    """Return the command that records the program again; empty if no command runs it, as in a
    notebook."""
    return f"stepscope inspect {lead.command}" if lead.command else ""


def _next(
    lead: ProgramRecord, advice: Sequence[Advice], trials: Sequence[Tried], best: Tried | None
) -> str:
    if not lead.command:
        return ""
    if not advice and not trials:
        # Most rules need the rates of this machine, which `advise` measures.
        return "" if lead.record.ceilings else f"stepscope advise {lead.command}"
    if not trials:
        return f"stepscope advise --verify {lead.command}"
    return _inspect_again(lead) if best is not None else ""
