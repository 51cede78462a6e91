"""Tables and findings of advice and of its trials."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from stepscope.advisor.advise.cases import APART, BASE, CHANGED, Trial
from stepscope.advisor.advise.outcome import (
    Tried,
    best_of,
    undecided,
    why_none,
    work_order,
)
from stepscope.analysis.advice.calibration import is_right, median_error
from stepscope.analysis.advice.changes import Advice, applicable
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.missing_inputs import BANDWIDTH, MEMORY, RATES, NotEvaluated
from stepscope.analysis.advice.order import Order, predicted_order
from stepscope.analysis.advice.rule import NotApplicable
from stepscope.analysis.trust import trust_of
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Finding, Interval, Table, Tone, Value
from stepscope.report.format import counted, duration, number, percent
from stepscope.report.tables import col, table

_SUPPLIED_BY = {
    RATES: "`stepscope advise SCRIPT` measures them, as does `stepscope advise RECORDS` on the"
    " machine of the records",
    BANDWIDTH: "`stepscope advise SCRIPT` measures it, as does `stepscope advise RECORDS` on the"
    " machine of the records",
    MEMORY: "`stepscope inspect` records one unless --no-memory is given",
}


def cannot_rank(base: Record, facts: Facts) -> tuple[Finding, ...]:
    """Warn if the step's times cannot be trusted, with the order of the changes if that is known,
    or else with the times."""
    if not facts.doubt:
        return ()
    if (known := predicted_order(facts)) is not None:
        return (order_only(known, facts.doubt, [base.id]),)
    low, high = (duration(max(0.0, facts.step_ms + sign * facts.noise_ms)) for sign in (-1, 1))
    return (
        Finding(
            code="advice.cannot-rank",
            values={"reason": facts.doubt, "step_ms": facts.step_ms, "noise_ms": facts.noise_ms},
            text=f"Cannot rank the changes: {facts.doubt} while the step was timed"
            f" ({duration(facts.step_ms)}, between {low} and {high}). Stop other processes on the"
            " machine and record the step again.",
            tone="warn",
            records=(base.id,),
        ),
    )


def order_only(known: Order, reason: str, records: Sequence[str]) -> Finding:
    """The order of changes from a machine whose times are not reliable."""
    return Finding(
        code="advice.order-only",
        values={"order": ", ".join(known.codes), "by": known.by, "reason": reason},
        text=f"Order only; times are not reliable: {reason}. By {known.by}, best first:"
        f" {', '.join(known.titles)}.",
        tone="warn",
        records=tuple(records),
        timed=False,
    )


def doubtful_ceilings(facts: Facts) -> Iterator[Finding]:
    """Warn if predictions rest on ceilings that may be too low."""
    if facts.ceiling_doubts:
        names, reasons = facts.ceiling_doubts, dict.fromkeys(facts.ceiling_doubts.values())
        yield Finding(
            code="advice.doubtful-ceilings",
            values={"ceilings": ", ".join(names), "reason": next(iter(reasons))},
            timed=False,
            text=f"Ceilings that may be too low: {', '.join(names)} ({'; '.join(reasons)})."
            " Limits and MFU that rest on them are upper bounds, and predicted gains of other"
            " dtypes are less certain. `stepscope run --new-ceilings` on an idle machine measures"
            " them again.",
            tone="warn",
        )


def not_evaluated_findings(left_out: Sequence[NotEvaluated]) -> Iterator[Finding]:
    """Report the rules that lack an input, grouped by input, and the command that supplies it."""
    for missing in dict.fromkeys(one.missing for one in left_out):
        titles = ", ".join(one.title for one in left_out if one.missing == missing)
        yield Finding(
            code="advice.not-evaluated",
            values={"changes": titles, "missing": missing},
            timed=False,
            text=f"Not evaluated: {titles}. The records have no {missing};"
            f" {_SUPPLIED_BY[missing]}.",
            tone="warn",
        )


def not_tried(
    advice: Sequence[Advice], tried: Sequence[Tried], settings: Collection[str]
) -> tuple[Finding, ...]:
    """Report advised changes that were not tried, and why."""
    done = {one.trial.code for one in tried}
    done |= {code for trial in done for code in trial.split("+")}
    left = [one for one in advice if one.code not in done]
    reachable = list(applicable(left, settings))
    kept = [one.trial for one in tried if one.kept]
    reasons: dict[str, list[Advice]] = {}
    for one in left:
        not_reachable = one.by_author or "it cannot be applied without editing the program"
        why = _not_tried_alone(one, kept) if one in reachable else not_reachable
        reasons.setdefault(why, []).append(one)
    return tuple(
        Finding(
            code="advice.not-tried",
            values={
                "changes": ", ".join(one.title for one in some),
                "reason": why,
                "gains_ms": ", ".join(f"{one.gain_ms:.4g}" for one in some),
            },
            text=f"Not tried: {', '.join(map(_with_prediction, some))}; {why}.",
            timed=False,
        )
        for why, some in reasons.items()
    )


def _with_prediction(advice: Advice) -> str:
    if advice.gain_ms <= 0:
        return advice.title
    return f"{advice.title} ({duration(advice.gain_ms)} predicted)"


def _not_tried_alone(advice: Advice, kept: Sequence[Trial]) -> str:
    whole = next((trial for trial in kept if trial.contains(advice)), None)
    if whole is not None:
        return f"part of {whole.code}, which is kept"
    if advice.gain_ms < 0:
        first = f" without {advice.best_after}" if advice.best_after else ""
        return f"it is predicted to cost time{first}"
    rivals = (one for trial in kept for one in trial.advice if one.conflicts_with(advice))
    if (rival := next(rivals, None)) is not None:
        return f"it excludes {rival.title}, which is kept"
    return "excluded by --only, out of time, or predicted to add less than 3 % to the others"


def not_applicable_table(changes: Sequence[NotApplicable]) -> Table:
    return table(
        "advise-not-applicable",
        "Changes that do not apply, and why",
        changes,
        [col("change", lambda one: one.title), col("reason", lambda one: one.reason)],
        caption="From the recorded step. These changes are not tried.",
    )


def trial_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    tried = [Tried(record) for record in records]
    if not tried:
        return ()
    in_order: list[Finding] = []
    doubted = next((one for one in map(_doubt, tried) if one), "")
    if doubted and (known := work_order(tried)) is not None:
        in_order.append(order_only(known, doubted, _ids(tried)))
    best = best_of(tried)
    proven = [one for one in tried if one.kept and (one is best or len(one.trial.advice) == 1)]
    tables = (
        _trial_table(tried),
        lines_table(
            [a for one in proven for a in one.trial.advice],
            "advise-lines",
            "How to apply each kept change",
        ),
    )
    return (
        *in_order,
        _best(best, tried),
        *_left_out(best, tried),
        *_predictions(tried),
        *_in_range(tried),
        *_apart(tried),
        *(one for one in tables if one.rows),
    )


def _doubt(tried: Tried) -> str:
    return "" if tried.record.status != "ok" else trust_of(tried.record).reason


def _ids(tried: Sequence[Tried]) -> tuple[str, ...]:
    return tuple(one.record.id for one in tried)


def _best(best: Tried | None, tried: Sequence[Tried]) -> Finding:
    if best is None or best.ratio is None:
        return _no_gain(tried)
    speedup = 1 / best.ratio.value
    names = ", ".join(one.title for one in best.trial.advice)
    loss = "the loss was not compared"
    if best.shares_process:
        loss = "the loss was compared with more changes"
    if best.loss_off is not None:
        loss = f"with a loss that differs by {percent(best.loss_off)}"
    if best.loss_warning:
        loss += ": compare a longer training before you keep it"
    return Finding(
        code="advise.best",
        values={"change": best.trial.code, "speedup": speedup, "loss_off": best.loss_off},
        records=_ids([best]),
        text=f"{number(speedup, 3)}× as fast with {names}: verified here, interleaved with the"
        f" unchanged step, {loss}.",
        tone="warn" if best.loss_warning else "good",
    )


def _no_gain(tried: Sequence[Tried]) -> Finding:
    """Distinguish trials that failed, trials that show nothing, and changes that do not gain."""
    values: dict[str, Value] = {"tried": len(tried)}
    code = "advise.no-gain"
    text = "None of the tried changes is worth making: none gains 3 % or more with the same loss."
    if reason := why_none(tried):
        code, text = "advise.none-tried", f"No change could be tried: {reason}."
        values["reason"] = reason
    elif (most := undecided(tried)) is not None:
        gain, base = most.realized, most.base_ms
        assert gain is not None
        assert base is not None
        code = "advise.not-shown"
        values |= {"change": most.trial.code, "gain_ms": gain.value, "high_ms": gain.high}
        text = (
            f"No gain is shown. The largest measured gain, of {most.trial.code}, is"
            f" {most.gain_text} of {duration(base)}; more rounds (--rounds) narrow the interval."
        )
    tone: Tone = "info" if code == "advise.no-gain" else "warn"
    return Finding(code=code, values=values, records=_ids(tried), text=text, tone=tone)


def _left_out(best: Tried | None, tried: Sequence[Tried]) -> Iterator[Finding]:
    """Report changes that gain alone but are not in the best combination."""
    if best is None or len(best.trial.advice) < 2:
        return
    used = {one.code for one in best.trial.advice}
    single = [one for one in tried if one.kept and len(one.trial.advice) == 1]
    left = [one for one in single if one.trial.code not in used and one.trial.more_samples == 1]
    for reason, wanted in (
        ("replaced by another change of the same setting", True),
        ("no further gain on top of the others", False),
    ):
        group = [one for one in left if _conflicts(one, best) is wanted]
        if group:
            names = ", ".join(one.trial.advice[0].title for one in group)
            yield Finding(
                code="advise.left-out",
                values={"changes": names, "reason": reason},
                records=_ids(group),
                text=f"Not in the best combination: {names}; {reason}.",
            )


def _conflicts(one: Tried, best: Tried) -> bool:
    return any(map(one.trial.advice[0].conflicts_with, best.trial.advice))


def _predictions(tried: Sequence[Tried]) -> Iterator[Finding]:
    verified_trials = {one: verified for one in tried if (verified := one.verified()) is not None}
    error = median_error(list(verified_trials.values()))
    if error is not None:
        right = sum(map(is_right, verified_trials.values()))
        yield Finding(
            code="advise.predictions-off",
            values={"off": error, "changes": len(verified_trials), "right": right},
            records=_ids(list(verified_trials)),
            text="The median error of the predictions for"
            f" {counted(len(verified_trials), 'change')} is {percent(error)} of the step; the"
            f" measured gain of {right} of them was within a third of the predicted gain.",
        )


def _in_range(tried: Sequence[Tried]) -> Iterator[Finding]:
    """Report how many realized gains are in the predicted range; trials without effect are
    ignored."""
    inside = {
        one: predicted.low <= value <= predicted.high
        for one in tried
        if (predicted := one.predicted_range) and (value := one.realized_ms) is not None
        if not one.without_effect
    }
    if inside:
        right = sum(inside.values())
        yield Finding(
            code="advise.in-range",
            values={"gains": len(inside), "in_range": right},
            records=_ids(list(inside)),
            text=f"{right} of {len(inside)} measured gains are in the predicted range.",
        )


def _apart(tried: Sequence[Tried]) -> Iterator[Finding]:
    apart = [one for one in tried if APART in one.record.notes]
    if apart:
        codes, reason = ", ".join(one.trial.code for one in apart), apart[0].record.notes[APART]
        yield Finding(
            code="advise.timed-apart",
            values={"changes": codes, "reason": reason},
            records=_ids(apart),
            text=f"{codes}: timed in blocks (unchanged, changed, changed, unchanged) and not"
            f" interleaved: {reason}. The interval covers drift of the machine only in part.",
            tone="warn",
            timed=False,
        )


def _trial_table(tried: Sequence[Tried]) -> Table:
    def more_memory(one: Tried) -> float | None:
        before, after = (one.record.quantity("peak_bytes", variant=v) for v in (BASE, CHANGED))
        return None if before is None or after is None else after - before

    return table(
        "advise-trials",
        "Predicted and measured gain",
        tried,
        [
            col("change", lambda r: " + ".join(a.title for a in r.trial.advice), key=True),
            col("step", lambda r: r.base_ms, unit="ms", hint="unchanged, in the same rounds"),
            col(
                "predicted",
                lambda r: r.predicted_range or r.predicted_ms,
                unit="ms",
                hint="gain per step",
            ),
            col(
                "measured",
                lambda r: r.realized,
                unit="ms",
                hint="median over the rounds, with its 99 % interval",
            ),
            col("speed", lambda r: 1 / r.ratio.value if r.ratio else None, unit="×"),
            col(
                "loss off by",
                lambda r: r.loss_off,
                "percent",
                hint="mean of the last quarter of steps",
            ),
            col("peak memory", more_memory, "bytes", hint="increase, on a GPU"),
            col("took", lambda r: r.record.elapsed_s, unit="s", hint="the whole trial"),
            col("verdict", lambda r: r.verdict, key=True),
        ],
        caption="Both steps start from the same weights and see the same data. A larger batch is"
        " compared per sample, and its loss is not compared.",
    )


def lines_table(advice: Sequence[Advice], name: str, title: str) -> Table:
    return table(
        name,
        title,
        {one.code: one for one in advice}.values(),
        [
            col("change", lambda a: a.title),
            col("lines", lambda a: "\n".join(a.lines), "code"),
            col("risk", lambda a: a.risk),
        ],
    )


def advice_table(advice: Sequence[Advice], step_ms: float) -> Table:
    """Table of advised changes, with ranks and ranges unless the advice was stored without them."""
    ranged = any(one.low_ms is not None for one in advice)
    ranks = {one.code: str(n) for n, one in enumerate((a for a in advice if a.ranked), start=1)}
    rank = col("rank", lambda a: ranks.get(a.code), hint="by the lower end of the gain")
    gain = "predicted, per step, with its range" if ranged else "predicted, per step"
    caption = "Each gain is that of the change alone; gains of several changes overlap."
    if ranged:
        caption += (
            " The range comes from past verifications of the rule on this kind of device and the"
            " noise of the step. A change whose range includes zero has no rank; use --verify."
        )
    return table(
        "advise-list",
        f"Changes that apply to a step of {duration(step_ms)}",
        advice,
        [
            *((rank,) if ranged else ()),
            col("change", lambda a: a.title),
            col("gain", predicted_gain, unit="ms", hint=gain),
            col("share", lambda a: a.gain_ms / step_ms, "percent", hint="of the step"),
            col(
                "memory",
                lambda a: a.gain_bytes or None,
                "bytes",
                hint="predicted reduction of the peak",
            ),
            col("why", lambda a: a.why),
        ],
        caption=caption,
    )


def predicted_gain(advice: Advice) -> Cell:
    """Predicted gain, with its range if it has one."""
    if advice.low_ms is None or advice.high_ms is None:
        return advice.gain_ms
    return Interval(value=advice.gain_ms, low=advice.low_ms, high=advice.high_ms)
