"""Predicted against realised, and what is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import msgspec

from stepscope.analysis.advice.calibration import Verified, is_right, off_by
from stepscope.analysis.advice.changes import Advice, applicable
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.unjudged import BANDWIDTH, MEMORY, RATES, Unjudged
from stepscope.records.schema import Clock, Record
from stepscope.records.stats import Ratio, paired_ratio, summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Interval, Table
from stepscope.report.format import counted, duration, number, percent
from stepscope.studies.advice.cases import APART, BASE, CHANGED, Trial

LOSS_WITHIN = 0.05
"""How far the losses of the last steps may be apart, as a share of how far the loss has come or of
itself, whichever is more."""

NO_GAIN = "dropped: no gain shown"


class Tried:
    """One trial that ran."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.trial = msgspec.convert(record.config, Trial)

    @cached_property
    def ratio(self) -> Ratio | None:
        """Time of the changed step over the base's, for as many samples."""
        base, changed = (self._times(name) for name in (BASE, CHANGED))
        if not base or not changed:
            return None
        scale = 1 / self.trial.more_samples
        scaled = tuple(scale * value for value in changed)
        if len(base) != len(scaled) or min(*base, *scaled) <= 0.0:
            return None
        return paired_ratio(base, scaled)

    def _times(self, name: str) -> tuple[float, ...]:
        """By the wall: the host's clock includes what it takes to issue."""
        found = {
            s.clock: s.values for s in self.record.series if (s.name, s.variant) == ("step", name)
        }
        order: tuple[Clock, ...] = ("device", "host")
        return next((found[clock] for clock in order if clock in found), ())

    @property
    def base_ms(self) -> float | None:
        values = self._times(BASE)
        return summarize(values).median if values else None

    @property
    def predicted_ms(self) -> float | None:
        """As the same share of the base step in these turns: the machine may be slower now."""
        base = self.base_ms
        return None if base is None else base * self.trial.predicted_ms / self.trial.step_ms

    @property
    def predicted_range(self) -> Interval | None:
        """Of a single change, as the same share of the base step; None without a range."""
        predicted, base = self.predicted_ms, self.base_ms
        if predicted is None or base is None or len(self.trial.advice) != 1:
            return None
        (one,) = self.trial.advice
        if one.low_ms is None or one.high_ms is None:
            return None
        scale = base / self.trial.step_ms
        return Interval(value=predicted, low=scale * one.low_ms, high=scale * one.high_ms)

    @property
    def realised_ms(self) -> float | None:
        return None if self.realised is None else self.realised.value

    @property
    def realised(self) -> Interval | None:
        """The gain in milliseconds, with its interval."""
        ratio, base = self.ratio, self.base_ms
        if ratio is None or base is None:
            return None
        value, low, high = (base * (1 - one) for one in (ratio.value, ratio.high, ratio.low))
        return Interval(value=value, low=low, high=high)

    @property
    def without_effect(self) -> str:
        """Why nothing was changed; empty where something was."""
        return self.record.notes.get("without_effect", "")

    @property
    def is_vague(self) -> bool:
        """Chance moves the gain by more than was predicted and found: a prediction is not to be
        corrected by it."""
        predicted, found = self.predicted_ms, self.realised
        if predicted is None or found is None:
            return True
        return (found.high - found.low) / 2 > max(abs(predicted), abs(found.value))

    @property
    def loss_off(self) -> float | None:
        """Between the means of the last quarter of the steps."""
        base, changed = (self.record.find("loss", variant=name) for name in (BASE, CHANGED))
        if base is None or changed is None or self.trial.more_samples != 1:
            return None
        steps = min(len(base.values), len(changed.values))
        last = max(1, steps // 4)
        means = [sum(one.values[steps - last : steps]) / last for one in (base, changed)]
        travelled = abs(base.values[0] - means[0])
        return abs(means[1] - means[0]) / max(travelled, abs(means[0]), 1e-12)

    @property
    def same_loss(self) -> bool:
        return self.loss_off is None or self.loss_off <= LOSS_WITHIN

    @property
    def verdict(self) -> str:
        if self.record.status != "ok" or self.ratio is None:
            return f"not tried: {self.record.reason or self.record.status}"
        if self.without_effect:
            return f"dropped: {self.without_effect}"
        lost = self.record.quantity("loss_lost", variant=CHANGED)
        if lost is not None and self.record.quantity("loss_lost", variant=BASE) is None:
            return f"dropped: the loss is no number from step {lost:.0f} on"
        if not self.same_loss:
            return "dropped: the loss differs"
        if self.ratio.high < 1:
            seen = (
                self.trial.more_samples != 1 or self.record.find("loss", variant=BASE) is not None
            )
            return "kept" if seen else "kept, without a loss to compare"
        return "dropped: slower" if self.ratio.low > 1 else NO_GAIN

    @property
    def kept(self) -> bool:
        return self.verdict.startswith("kept")

    def verified(self) -> Verified | None:
        """For the calibration: single changes only, which were made."""
        if len(self.trial.advice) != 1 or self.without_effect:
            return None
        if self.realised_ms is None or self.predicted_ms is None or self.base_ms is None:
            return None
        return Verified(
            device=self.record.environment.device_name,
            code=self.trial.code,
            predicted_ms=self.predicted_ms,
            realised_ms=self.realised_ms,
            step_ms=self.base_ms,
            when=self.record.started,
            factor=self.trial.advice[0].factor,
        )


_SUPPLIED_BY = {
    RATES: "`stepscope advise SCRIPT` measures them, and `stepscope advise RECORDS` does on the"
    " machine of the records",
    BANDWIDTH: "`stepscope advise SCRIPT` measures it, and `stepscope advise RECORDS` does on the"
    " machine of the records",
    MEMORY: "`stepscope inspect` makes one unless --no-memory is given",
}


def cannot_rank(base: Record, facts: Facts) -> tuple[Finding, ...]:
    """Of a step whose times cannot be trusted: why, and its times."""
    if not facts.doubt:
        return ()
    low, high = (duration(max(0.0, facts.step_ms + sign * facts.noise_ms)) for sign in (-1, 1))
    return (
        Finding(
            code="advice.cannot-rank",
            values={"reason": facts.doubt, "step_ms": facts.step_ms, "noise_ms": facts.noise_ms},
            text=f"Cannot rank the changes: {facts.doubt} while the step was timed"
            f" ({duration(facts.step_ms)}, between {low} and {high}). End other work on the machine"
            " and record the step again.",
            tone="warn",
            records=(base.id,),
        ),
    )


def not_judged(left_out: Sequence[Unjudged]) -> Iterator[Finding]:
    """The rules that lack an input, by that input, and what supplies it."""
    for missing in dict.fromkeys(one.missing for one in left_out):
        titles = ", ".join(one.title for one in left_out if one.missing == missing)
        yield Finding(
            text=f"Not judged: {titles}. The records have no {missing}: {_SUPPLIED_BY[missing]}.",
            tone="warn",
        )


def not_tried(
    advice: Sequence[Advice], tried: Sequence[Tried], settings: Collection[str]
) -> tuple[Finding, ...]:
    """Advice without a trial, and why there is none."""
    done = {one.trial.code for one in tried}
    left = [one for one in advice if one.code not in done]
    reachable = list(applicable(left, settings))
    reasons: dict[str, list[str]] = {}
    for one in left:
        no_way = one.by_author or "it cannot be made from outside"
        why = "--only left it out, or there was no time" if one in reachable else no_way
        reasons.setdefault(why, []).append(one.title)
    return tuple(
        Finding(text=f"Not tried: {', '.join(titles)}; {why}.") for why, titles in reasons.items()
    )


def first_right(
    advice: Sequence[Advice], tried: Sequence[Tried], most: int = 3
) -> tuple[int, int]:  # fmt: skip
    """Of the first changes that were advised and tried: how many gained within a third of what was
    predicted, and how many these are. A trial that failed is one that was not right; one that
    changed nothing is none."""
    single = [one for one in tried if len(one.trial.advice) == 1]
    alone = {one.trial.code: one for one in single if not one.without_effect}
    counted = [alone[one.code] for one in advice if one.code in alone][:most]
    right = [one for one in counted if (v := one.verified()) is not None and is_right(v)]
    return len(right), len(counted)


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """Of those that are kept, the one with the fewest changes that none is proven faster than."""
    kept = {one: one.ratio for one in tried if one.kept and one.ratio is not None}
    if not kept:
        return None
    fastest = min(kept.values(), key=lambda ratio: ratio.value)
    as_fast = [one for one, ratio in kept.items() if ratio.value <= fastest.high]
    return min(as_fast, key=lambda one: (len(one.trial.advice), kept[one].value))


def trial_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    tried = [Tried(record) for record in records]
    kept = [one for one in tried if one.kept]
    best = best_of(tried)
    blocks: list[Block] = []
    if best is not None and best.ratio is not None:
        names = ", ".join(a.title for a in best.trial.advice)
        loss = "its loss was not compared"
        if best.loss_off is not None:
            loss = f"with a loss that differs by {percent(best.loss_off)}"
        blocks.append(
            Finding(
                text=f"{number(1 / best.ratio.value, 3)}× as fast with {names}: proven here, in"
                f" turns with the step as it was, {loss}.",
                tone="good",
            )
        )
    elif tried:
        blocks.append(Finding(text="No change that was tried is worth it here."))
    verified = [v for one in tried if (v := one.verified()) is not None]
    error = off_by(verified)
    if error is not None:
        blocks.append(
            Finding(
                text=f"Predictions were off by {percent(error)} of the step, in the median of"
                f" {counted(len(verified), 'change')}; {sum(map(is_right, verified))} of them"
                " gained within a third of what was predicted."
            )
        )
    blocks += _in_range(tried)
    apart = [one for one in tried if APART in one.record.notes]
    if apart:
        blocks.append(
            Finding(
                text=f"{', '.join(one.trial.code for one in apart)}: timed one after the other, as"
                f" it is, changed, changed, as it is, and not in turns:"
                f" {apart[0].record.notes[APART]}. What the machine did meanwhile is in the"
                " interval only in part.",
                tone="warn",
            )
        )
    if tried:
        proven = [one for one in kept if one is best or len(one.trial.advice) == 1]
        lines = [advice for one in proven for advice in one.trial.advice]
        blocks += [_trial_table(tried), _lines_table(lines)]
    return tuple(block for block in blocks if not isinstance(block, Table) or block.rows)


def _in_range(tried: Sequence[Tried]) -> Iterator[Finding]:
    """Trials that changed nothing are no evidence."""
    pairs = [
        (found, value)
        for one in tried
        if (found := one.predicted_range) and (value := one.realised_ms) is not None
        if not one.without_effect
    ]
    if pairs:
        inside = sum(found.low <= value <= found.high for found, value in pairs)
        yield Finding(text=f"Of {len(pairs)} realised gains {inside} lie in the predicted range.")


def _trial_table(tried: Sequence[Tried]) -> Table:
    def row(one: Tried) -> tuple[Cell, ...]:
        peaks = [one.record.quantity("peak_bytes", variant=name) for name in (BASE, CHANGED)]
        return (
            " + ".join(a.title for a in one.trial.advice),
            one.base_ms,
            one.predicted_range or one.predicted_ms,
            one.realised,
            1 / one.ratio.value if one.ratio else None,
            one.loss_off,
            peaks[1] - peaks[0] if peaks[0] is not None and peaks[1] is not None else None,
            one.verdict,
        )

    return Table(
        name="advise-trials",
        title="Predicted against realised",
        columns=(
            Column(title="change"),
            Column(title="step", kind="number", unit="ms", hint="without it, in the same turns"),
            Column(title="predicted", kind="number", unit="ms", hint="gain in a step"),
            Column(
                title="realised",
                kind="number",
                unit="ms",
                hint="median over the rounds, with its 99 % interval",
            ),
            Column(title="speed", kind="number", unit="×"),
            Column(title="loss off by", kind="percent", hint="mean of the last quarter of steps"),
            Column(title="peak memory", kind="bytes", hint="change of it, on a GPU"),
            Column(title="verdict"),
        ),
        rows=tuple(row(one) for one in tried),
        caption="Both steps begin with the same weights and see the same data. A larger batch is"
        " compared for as many samples, and its loss is not compared.",
    )


def _lines_table(advice: Sequence[Advice]) -> Table:
    return lines_table(advice, "advise-lines", "What to write")


def lines_table(advice: Sequence[Advice], name: str, title: str) -> Table:
    distinct = {one.code: one for one in advice}.values()
    return Table(
        name=name,
        title=title,
        columns=(Column(title="change"), Column(title="lines"), Column(title="risk")),
        rows=tuple((one.title, " ⏎ ".join(one.lines), one.risk) for one in distinct),
    )


def advice_table(advice: Sequence[Advice], step_ms: float) -> Table:
    """With ranks and ranges, unless the advice was given without them."""
    ranged = any(one.low_ms is not None for one in advice)
    ranks = {one.code: place for place, one in enumerate((a for a in advice if a.ranked), start=1)}
    rank = Column(title="rank", hint="by the lower end of the gain")
    gain = "predicted, in a step, with its range" if ranged else "predicted, in a step"
    caption = "Each gain is for the change alone; together they overlap."
    if ranged:
        caption += (
            " Its range is that of past verifications of the rule on this kind of device, with the"
            " noise of the step. A change whose range reaches zero has no rank: --verify tells."
        )
    return Table(
        name="advise-list",
        title=f"Changes that apply to a step of {duration(step_ms)}",
        columns=(
            *((rank,) if ranged else ()),
            Column(title="change"),
            Column(title="gain", kind="number", unit="ms", hint=gain),
            Column(title="share", kind="percent", hint="of the step"),
            Column(title="memory", kind="bytes", hint="predicted to be saved at the peak"),
            Column(title="why"),
        ),
        rows=tuple(
            (
                *((str(ranks[a.code]) if a.code in ranks else None,) if ranged else ()),
                a.title,
                predicted_gain(a),
                a.gain_ms / step_ms,
                a.gain_bytes or None,
                a.why,
            )
            for a in advice
        ),
        caption=caption,
    )


def predicted_gain(advice: Advice) -> Cell:
    """With its range, where it was given with one."""
    if advice.low_ms is None or advice.high_ms is None:
        return advice.gain_ms
    return Interval(value=advice.gain_ms, low=advice.low_ms, high=advice.high_ms)
