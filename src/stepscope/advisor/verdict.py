"""The verdict on a recorded training program: from its record and the trials of its changes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from msgspec.structs import replace

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.given import advice_given
from stepscope.advisor.advise.outcome import Tried, best_of, undecided, why_none, work_order
from stepscope.advisor.advise.step import RecordedStep
from stepscope.analysis.advice.changes import (
    WORTH,
    Advice,
    advise,
    afterwards,
    applicable,
    compatible,
)
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.order import predicted_order
from stepscope.analysis.advice.rules.accelerate import ACCELERATE
from stepscope.analysis.limits import hardware_limit, mfu
from stepscope.analysis.lines.rules import costly_lines
from stepscope.analysis.parts import part_names
from stepscope.analysis.trace.summary import KernelRow, Summary
from stepscope.analysis.trust import trust_of
from stepscope.analysis.verdict import (
    MAX_CHANGES,
    MAX_NAMED_LINES,
    BreakdownPart,
    Estimate,
    Evaluations,
    Gain,
    Limit,
    MemoryChange,
    RankedChange,
    Share,
    SlowestRank,
    TrustState,
    Verdict,
    at_most,
    plain,
    ranked,
)
from stepscope.analysis.waterfall import FASTER_FROM
from stepscope.errors import StepscopeError
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.studies.own.cases import STUDY_NAME as OWN
from stepscope.views.program.cases import STUDY_NAME as INSPECTED
from stepscope.views.program.rows import ProgramRecord, lateness, programs, slowest
from stepscope.views.program.waterfall import program_waterfall

_NAMED_FROM = 0.02
"""Share of matmuls, attention, convolutions and recurrent layers from which each is named."""
_RECURRENT = "rnn", "lstm", "gru_"
"""Parts of the names of recurrent layers: `aten::mkldnn_rnn_layer`, `LSTM_elementWise_fp`."""
_NOTABLE = 0.1
"""Share of the timed steps from which on validations and rollouts are part of the verdict."""


def program_verdict(records: Sequence[Record], step: RecordedStep | None = None) -> Verdict | None:
    """The verdict on the recorded program of these records; None where there is none, or where a
    model was measured in several variants and no trial says which one is meant. `step` is that of
    the first record, if it is known."""
    inspected = [record for record in records if record.study == INSPECTED]
    trials = [Tried(record) for record in records if record.study == TRIALS]
    own = [record for record in records if record.study == OWN]
    if not inspected and (not own or (len(own) > 1 and not trials)):
        return None
    ranks = programs(inspected)[0] if inspected else [ProgramRecord(own[0])]
    return _verdict(ranks, trials, step or RecordedStep(ranks[0].record))


def _trust(ranks: Sequence[ProgramRecord]) -> tuple[TrustState, str]:
    """The trust in the first rank's times, and whether the recordings of all ranks are complete."""
    trust = trust_of(ranks[0].record)
    if not trust.good or ranks[0].record.study != INSPECTED:
        return trust.level, trust.reason
    why = next((why for one in ranks if (why := one.incomplete)), "")
    return ("incomplete", why) if why else (trust.level, trust.reason)


def _verdict(
    ranks: Sequence[ProgramRecord], trials: Sequence[Tried], recorded: RecordedStep
) -> Verdict:
    lead = ranks[0]
    record = lead.record
    trust, trust_reason = _trust(ranks)
    verdict = Verdict(
        subject=lead.name,
        device=record.environment.device_name,
        step=_step(record),
        mfu=mfu(record),
        dtype=lead.case.dtype,
        trust=trust,
        trust_reason=trust_reason,
        judged=False,
        evaluations=_evaluations(lead),
        slowest=_slowest(ranks),
        lines=() if lead.lines is None else costly_lines(lead.lines)[:MAX_NAMED_LINES],
        next_command=_inspect_again(ranks),
    )
    try:
        facts = recorded.facts
    except StepscopeError:
        return verdict
    assert lead.summary is not None
    limit = hardware_limit(
        facts.flops, facts.parameters, facts.dtype, facts.rates, facts.bandwidth, facts.lacks,
        facts.ceiling_doubts,
    )  # fmt: skip
    at_ceilings = limit
    limit, parts = breakdown(lead.summary, facts.step_ms, limit, lead.waited_less_ms)
    advice = recorded.advice_of_rules
    best = best_of(trials)
    tried = _codes_of(trials)
    untried = [one for one in advice if one.code not in tried]
    together, reachable = _predicted(recorded, untried)
    if best is not None:
        together, reachable = best.trial.advice, best.changed_ms
    open_question = undecided(trials)
    known = None
    if facts.doubt or any(not trust_of(one.record).good for one in trials):
        known = work_order(trials) or (predicted_order(facts) if facts.doubt else None)
    job = _job(ranks)
    next_ = "" if job is None and not trials else _next(lead, advice, trials, best)
    return replace(
        verdict,
        judged=True,
        dtype=facts.dtype,
        mfu=_utilization(verdict.mfu, facts, at_ceilings, limit),
        parts=parts,
        limit=limit,
        reachable_ms=reachable,
        reachable_verified=best is not None,
        reachable_with=tuple(one.title for one in together),
        reachable_warning=best.loss_warning if best is not None else "",
        peak_bytes=facts.peak_bytes,
        memory_change=_memory_change(facts, advice, together, trials, best),
        changes=_changes(facts, untried, together, trials, best),
        uncertain=_uncertain(facts, untried),
        order=() if known is None else known.titles,
        order_by="" if known is None else known.by,
        tried=sum(one.realized is not None for one in trials),
        not_tried=why_none(trials),
        undecided=None if open_question is None else _measured_change(open_question),
        unchanged_ms=_unchanged_ms(trials, best),
        not_evaluated=tuple(one.title for one in recorded.not_evaluated),
        next_command=f"{next_}{job or ''} {lead.command}" if next_ else "",
        next_on_recording=next_ if "--verify" not in next_ else "",
    )


def _slowest(ranks: Sequence[ProgramRecord]) -> SlowestRank | None:
    if len(ranks) < 2 or (last := slowest(ranks)) is None:
        return None
    return SlowestRank(rank=last.rank, late_ms=lateness(ranks)[last.rank])


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


def _utilization(
    mfu: Share | None, facts: Facts, at_ceilings: Limit | None, capped: Limit | None
) -> Share | None:
    """The MFU, as a bound if matmuls of its dtype were faster than their ceiling."""
    if mfu is None or at_ceilings is None or capped is None or capped.dtype != facts.dtype:
        return mfu
    faster = (at_ceilings.matmul_ms - capped.matmul_ms) / facts.step_ms
    return at_most(plain(mfu), capped.doubt) if faster >= FASTER_FROM else mfu


def _unchanged_ms(trials: Sequence[Tried], best: Tried | None) -> float | None:
    """Time of the unchanged step in the best trial, or else in the first one."""
    return next((one.base_ms for one in (best, *trials) if one is not None and one.base_ms), None)


def breakdown(
    summary: Summary, step_ms: float, limit: Limit | None, waited_less_ms: float = 0.0
) -> tuple[Limit | None, tuple[BreakdownPart, ...]]:
    """The hardware limit, at most what the step took for the same work; and the parts of the
    waterfall above it, idle time as one part."""
    water = program_waterfall(summary, limit, step_ms, waited_less_ms)
    return water.breakdown(limit, part_names(matmul_kinds(summary), on_gpu=summary.on_device))


def matmul_kinds(summary: Summary) -> list[str]:
    """Return what a step has of matmuls, attention, convolutions and recurrent layers, the largest
    first."""
    spent: defaultdict[str, float] = defaultdict(float)
    for row in summary.kernels:
        if row.kind in ("matmul", "attention"):
            spent[_matmul_kind(row)] += row.ms
    total = sum(spent.values())
    shown = [kind for kind, ms in spent.items() if ms >= _NAMED_FROM * total]
    return sorted(shown, key=lambda kind: -spent[kind])


def _matmul_kind(row: KernelRow) -> str:
    name = row.kernel.lower()
    if row.kind == "attention":
        return "attention"
    if any(layer in name for layer in _RECURRENT):
        return "recurrent layers"
    return "convolutions" if "conv" in name or row.library == "cuDNN" else "matmuls"


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
        tried=most.code in _codes_of(trials), measured=_measured(most, best, trials),
    )  # fmt: skip


def _codes_of(trials: Sequence[Tried]) -> set[str]:
    """The changes that were tried, alone or with others."""
    return {one.code for trial in trials if not trial.cut_off for one in trial.trial.advice}


def _measured(advice: Advice, best: Tried | None, trials: Sequence[Tried]) -> Gain | None:
    """Measured gain of a change: as part of the best combination, or alone."""
    if best is not None and advice.code in [one.code for one in best.trial.advice]:
        return _share(advice, best, trials)
    alone = (one for one in trials if one.trial.code == advice.code and one.realized is not None)
    trial = next(alone, None)
    return None if trial is None else _gain(trial)


def _step(record: Record) -> Estimate | None:
    series = record.find("step")
    if series is None or not series.values:
        return None
    times = summarize(series.values)
    return Estimate(value=times.median, low=times.low, high=times.high)


def _predicted(
    recorded: RecordedStep, untried: Sequence[Advice]
) -> tuple[tuple[Advice, ...], float | None]:
    """The ranked changes of the best predicted combination that can be made from outside, and the
    step with them; with stored advice that today's rules no longer give."""
    known = {one.code: one for one in untried if one.ranked and one.gain_ms > 0}
    space = recorded.space(known)
    best = space.best() if known else None
    # As advised for the unchanged step: the gains are those of each change alone.
    chosen = [] if best is None else [known.get(one.code, one) for one in best.advice]
    stored = applicable([*known.values()], recorded.settings)
    older = [one for one in stored if not {one.code} & space.known and "batch" not in one.setting]
    together = compatible((*chosen, *sorted(older, key=lambda one: -one.gain_ms)))
    if not together:
        return (), None
    reachable = recorded.facts.step_ms if best is None else best.step_ms
    return together, min(recorded.facts.step_ms, reachable)


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
    codes = {one.code for one in untried}
    more = [
        one
        for one in advise(afterwards(facts, [one.code for one in together]))
        if one.code in codes and _goes_with(one, together)
    ]
    titles = tuple(one.title for one in together)
    added = [
        replace(one, gain=replace(one.gain, on_top_of=titles))
        for one in ranked(list(_predictions(compatible(more))))
    ]
    return (*_of_combination(best, trials), *added)[:MAX_CHANGES]


def _of_combination(best: Tried, trials: Sequence[Tried]) -> tuple[RankedChange, ...]:
    """The changes of the best combination, if the gain of each is known; or else all of them as
    one, followed by those whose gain is."""
    shares = [(one, _share(one, best, trials)) for one in best.trial.advice]
    known = [_ranked_change(one, gain) for one, gain in shares if gain is not None and gain.low > 0]
    known.sort(key=lambda one: -one.gain.low)
    warnings = {trial.trial.code: trial.loss_warning for trial in trials}
    known = [replace(one, warning=warnings.get(one.code, "")) for one in known]
    if len(known) == len(shares) <= MAX_CHANGES:
        return tuple(known)
    return _measured_change(best), *(replace(one, lines=()) for one in known)


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
    gain = Gain(value=advice.gain_ms, low=advice.low_ms, high=advice.high_ms)
    return _ranked_change(advice, gain)


def _uncertain(facts: Facts, untried: Sequence[Advice]) -> RankedChange | None:
    """The largest predicted gain that may be none, of a change without a trial."""
    gains = [one for one in untried if not one.ranked and one.gain_ms >= WORTH * facts.step_ms]
    most = max(gains, key=lambda one: one.gain_ms, default=None)
    return None if most is None else _prediction(most)


def _measured_change(tried: Tried) -> RankedChange:
    """All changes of a trial as one, with its gain."""
    advice = tried.trial.advice
    risks = dict.fromkeys(one.risk for one in advice if one.risk)
    return RankedChange(
        code=tried.trial.code,
        title=" and ".join(one.title for one in advice),
        gain=_gain(tried),
        risk="; ".join(risks),
        lines=tuple(dict.fromkeys(line for one in advice for line in one.lines)),
        gain_bytes=sum(one.gain_bytes for one in advice),
        warning=tried.loss_warning,
    )


def _ranked_change(advice: Advice, gain: Gain) -> RankedChange:
    return RankedChange(
        code=advice.code, title=advice.title, gain=gain, risk=advice.risk, lines=advice.lines,
        gain_bytes=advice.gain_bytes, setting=_setting(advice),
    )  # fmt: skip


def _share(advice: Advice, best: Tried, trials: Sequence[Tried]) -> Gain | None:
    """The measured gain of a change of the best combination: alone, on top of the others, or on top
    of those before it; None if no trial isolates it."""
    by_codes = {
        frozenset(one.code for one in trial.trial.advice): trial
        for trial in trials
        if trial.ratio is not None
    }
    alone = by_codes.get(frozenset((advice.code,)))
    if alone is not None and (alone is best or alone.kept):
        return _gain(alone)
    codes = [one.code for one in best.trial.advice]
    others = frozenset(codes) - {advice.code}
    for first in (others, frozenset(codes[: codes.index(advice.code)])):
        pair = (by_codes.get(one) for one in (first, first | {advice.code}))
        without, added = pair
        if without is None or added is None or not without.ratio or not added.ratio:
            continue
        gain = without.ratio.value - added.ratio.value
        noise = math.hypot(*((one.high - one.low) / 2 for one in (without.ratio, added.ratio)))
        base = best.base_ms or 0.0
        low, value, high = (base * one for one in (gain - noise, gain, gain + noise))
        return Gain(value=value, low=low, high=high, measured=True, on_top_of=_titles(best, first))
    return None


def _titles(best: Tried, codes: Collection[str]) -> tuple[str, ...]:
    return tuple(one.title for one in best.trial.advice if one.code in codes)


def _gain(trial: Tried) -> Gain:
    """The gain of a trial, as in its table."""
    realized = trial.realized
    assert realized is not None
    return Gain(value=realized.value, low=realized.low, high=realized.high, measured=True)


def _setting(advice: Advice) -> str:
    """Return the setting that a change is compared by. In older records `accelerate`
    has several."""
    if ACCELERATE in advice.setting.values():
        return ACCELERATE
    return next(iter(advice.setting), "")


def _job(ranks: Sequence[ProgramRecord]) -> str | None:
    """Return the option with which a command starts the program in as many ranks; None if no
    command does, as for ranks on other machines or a process group of its own."""
    lead = ranks[0]
    if lead.distributed and not 1 < lead.case.ranks == len(ranks):
        return None
    return f" --nproc {len(ranks)}" if lead.distributed else ""


def _inspect_again(ranks: Sequence[ProgramRecord]) -> str:
    """Return the command that records the program again; empty if no command runs it, as in a
    notebook."""
    lead = ranks[0]
    if not lead.command:
        return ""
    command = "inspect" if lead.record.study == INSPECTED else "run own"
    return f"stepscope {command}{_job(ranks) or ''} {lead.command}"


def _next(
    lead: ProgramRecord, advice: Sequence[Advice], trials: Sequence[Tried], best: Tried | None
) -> str:
    """Return the next command without the program: predict the gains, measure them, or write the
    changes into the script. Empty if no command runs the program."""
    if not lead.command:
        return ""
    if not advice and not trials:
        # Most rules need the rates of this machine, which `advise` measures.
        return "" if lead.record.ceilings else "stepscope advise"
    if not trials:
        # What `advise` has recorded, --resume takes from the store.
        resume = " --resume" if advice_given(lead.record) is not None else ""
        return f"stepscope advise --verify{resume}"
    is_script = lead.record.study == INSPECTED
    return "stepscope advise --apply" if best is not None and is_script else ""
