"""Findings of the step study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Tone, Value
from stepscope.report.format import duration, number, percent
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.races import SIDES
from stepscope.studies.step.rows import AGREES_WITHIN, FALLS_BY, Ladder, LossCurve, StepRace
from stepscope.studies.views.energy import at_cap_words

GAINS = 1.01
"""Smallest speedup that counts as a gain."""


def step_findings(
    ladders: Sequence[Ladder], curves: dict[str, LossCurve], raced: Sequence[StepRace]
) -> Iterator[Finding]:
    for ladder in ladders:
        if ladder.start is not None and len(ladder.climb) > 1:
            yield _climb(ladder, ladder.start.median)
            yield from _host_bound(ladder)
            yield from _not_measured(ladder)
    yield from _loss(curves)
    for race in raced:
        yield from _race(race)
    for race in raced:
        yield from _power_capped(race)
    yield from _no_energy(raced)


def _ids(records: Iterable[Record]) -> tuple[str, ...]:
    return tuple(record.id for record in records)


def _climb(ladder: Ladder, start_ms: float) -> Finding:
    best, best_ms = min(
        ((rung.case.rung, step.median) for rung, step in ladder.climb), key=lambda one: one[1]
    )
    times = start_ms / best_ms
    values: dict[str, Value] = {"ladder": ladder.name, "start_ms": start_ms}
    if times < GAINS:
        return Finding(
            code="step.no-gain",
            values=values,
            records=_ids(rung.record for rung, _ in ladder.climb),
            text=f"{ladder.name}: no change is faster than the baseline's {duration(start_ms)}.",
        )
    conclusion = ""
    if any(rung.case.how == "alone" for rung in ladder.rungs):
        alone = {
            rung.case.rung: rung.step.median
            for rung in ladder.rungs
            if rung.case.how in ("alone", "first") and rung.step
        }
        most = min(alone, key=alone.__getitem__)
        gain = start_ms / alone[most]
        values |= {"alone": most, "alone_times": gain}
        conclusion = (
            "Alone, no change is faster than the baseline."
            if gain < GAINS
            else f"The largest single gain is {words(most)}: {number(gain, 3)} times."
        )
    return Finding(
        code="step.gain",
        values=values | {"best_ms": best_ms, "times": times, "up_to": best},
        records=_ids(rung.record for rung in ladder.rungs if rung.step),
        text=f"{ladder.name}: from {duration(start_ms)} to {duration(best_ms)},"
        f" {number(times, 3)} times as fast, with all changes up to {words(best)}.",
        conclusion=conclusion,
        tone="good",
    )


def _host_bound(ladder: Ladder) -> Iterator[Finding]:
    """Report rungs limited by host issue time, in which faster kernels do not show."""
    known = [(rung.record, host) for rung in ladder.rungs if (host := rung.host) is not None]
    bound = sum(host.bound for _, host in known)
    if bound:
        yield Finding(
            code="step.host-bound",
            values={"ladder": ladder.name, "rows": bound, "of": len(known)},
            records=_ids(record for record, _ in known),
            text=f"{bound} of {len(known)} rows of {ladder.name} are host-bound: in these rows a"
            " change helps only by saving launches, and faster kernels show once the step is a"
            " CUDA graph.",
        )


def _not_measured(ladder: Ladder) -> Iterator[Finding]:
    failed = [rung for rung in ladder.rungs if rung.record.status != "ok"]
    if failed:
        changes = ", ".join(dict.fromkeys(words(rung.case.rung) for rung in failed))
        reason = failed[0].record.reason
        yield Finding(
            code="step.not-measured",
            values={"ladder": ladder.name, "rows": len(failed), "reason": reason},
            records=_ids(rung.record for rung in failed),
            text=f"{len(failed)} rows of {ladder.name} were not measured: {changes}."
            f" First reason: {reason}",
            tone="warn" if any(rung.record.status != "skipped" for rung in failed) else "info",
        )


def _loss(curves: dict[str, LossCurve]) -> Iterator[Finding]:
    start = curves.get(START)
    fell = start.fell_by() if start is not None else None
    if start is None or fell is None:
        return
    steps = max(len(values) for values in start.by_seed.values())
    text = f"In {steps} steps the loss of the float32 step falls by {percent(fell)}."
    values: dict[str, Value] = {"steps": steps, "fell_by": fell}
    if fell < FALLS_BY:
        yield Finding(
            code="step.not-learnt",
            values=values,
            records=_ids(start.records),
            text=text,
            conclusion="That is too little to judge the other rungs: train for more steps.",
            tone="warn",
        )
        return
    deviations = {
        rung: deviation
        for rung, curve in curves.items()
        if rung != START and (deviation := curve.apart(start)) is not None
    }
    records = _ids(record for rung in (START, *deviations) for record in curves[rung].records)
    wrong = {rung: share for rung, share in deviations.items() if abs(share) > AGREES_WITHIN}
    if wrong:
        listed = ", ".join(f"{words(rung)} ({percent(share)})" for rung, share in wrong.items())
        yield Finding(
            code="step.loss-apart",
            values={**values, **wrong},
            records=records,
            text=f"{text} The final loss deviates by more than {percent(AGREES_WITHIN)}: {listed}.",
            tone="warn",
        )
    elif deviations:
        farthest = max(deviations, key=lambda rung: abs(deviations[rung]))
        largest = abs(deviations[farthest])
        yield Finding(
            code="step.loss-same",
            values=values | {"rungs": len(deviations), "farthest": farthest, "apart": largest},
            records=records,
            text=f"{text} All {len(deviations)} other rungs end within {percent(AGREES_WITHIN)} of"
            f" it; the largest deviation is {percent(largest)} ({words(farthest)}).",
            tone="good",
        )


def _race(race: StepRace) -> Iterator[Finding]:
    ratio, ms, peer_ms, times = race.ratio(), race.step_ms(), race.step_ms("peer"), race.speedup()
    if ratio is None or ms is None or peer_ms is None or times is None:
        return
    lead, share = race.lead(), race.mfu()
    interval = ratio if lead is None else lead.ratio
    tone: Tone
    if interval is not None and interval.low <= 1 <= interval.high:
        tone, code, outcome = "info", "step.race-no-difference", "statistically indistinguishable"
    elif times >= 1:
        tone, code = "good", "step.race-faster"
        outcome = f"ours is {number(times, 3)} times as fast"
    else:
        tone, code = "warn", "step.race-slower"
        outcome = f"ours takes {number(1 / times, 3)} times as long"
    rate = f", {percent(share)} MFU" if share is not None else ""
    where = "" if lead is None else " in consecutive steps"
    text = (
        f"{race.name}: a step takes {duration(ms)}{rate}{where}; the fastest peer"
        f" ({race.form('peer')}) takes {duration(peer_ms)}: {outcome}."
    )
    if lead is not None:
        text += f" Interleaved samples give a ratio of {number(ratio.value, 3)}."
    values: dict[str, Value] = {"race": race.name, "ms": ms, "peer_ms": peer_ms, "times": times}
    values |= {"interleaved": ratio.value, "mfu": share}
    narrow_ms, narrow_times = race.step_ms("narrow"), race.speedup("narrow")
    if narrow_ms is not None and narrow_times is not None:
        values |= {"narrow_ms": narrow_ms, "narrow_times": narrow_times}
        text += f" With narrower dtypes ours takes {duration(narrow_ms)}; the peer takes"
        text += f" {number(narrow_times, 3)} times as long."
    # Races with fewer variants of the peer, or in which its fastest was slower relative to ours.
    others = [(other, result) for other in race.others if (result := other.ratio()) is not None]
    for other, result in others:
        text += f" Another race, against {other.peers} of its variants, gave a ratio of"
        text += f" {number(result.value, 3)}."
    yield Finding(
        code=code,
        values=values | {"other_races": len(others)},
        records=_ids((race.record, *(other.record for other, _ in others))),
        text=text,
        tone=tone,
    )


def _power_capped(race: StepRace) -> Iterator[Finding]:
    capped = {
        side: (draw, draw.lasts_ms)
        for side in ("ours", *SIDES)
        if (draw := race.draw(side)) is not None and draw.lasts_ms is not None
    }
    if not capped:
        return
    (first, (draw, _)), *others = capped.items()
    text = f"{race.name}: {SIDES[first]} takes {number(draw.joules, 3)} J per step"
    text += f" {at_cap_words(draw)}."
    for side, (other, lasts_ms) in others:
        text += f" {SIDES[side].capitalize()} takes {number(other.joules, 3)} J, which lasts"
        text += f" {duration(lasts_ms)}."
    values: dict[str, Value] = {"race": race.name}
    for side, (one, lasts_ms) in capped.items():
        values |= {f"{side}_joules": one.joules, f"{side}_lasts_ms": lasts_ms}
    yield Finding(code="step.power-capped", values=values, records=(race.record.id,), text=text)


def _no_energy(raced: Sequence[StepRace]) -> Iterator[Finding]:
    missing: dict[str, list[StepRace]] = {}
    for race in raced:
        if reason := race.record.notes.get("no_energy"):
            missing.setdefault(reason, []).append(race)
    for reason, races in missing.items():
        names = ", ".join(race.name for race in races)
        yield Finding(
            code="step.no-energy",
            values={"races": names, "reason": reason},
            records=_ids(race.record for race in races),
            text=f"The energy per step of {names} was not measured: {reason}.",
        )
