"""Sentences that answer the study's question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Finding
from stepscope.report.format import duration, number, percent
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.power import power_findings
from stepscope.studies.step.rows import (
    AGREES_WITHIN,
    FALLS_BY,
    Curve,
    Ladder,
    Race,
    peers_that_ran,
)

GAINS = 1.01
"""From here on a step counts as faster."""


def step_findings(
    climbed: Sequence[Ladder], learnt: dict[str, Curve], raced: Sequence[Race]
) -> tuple[Finding, ...]:
    return (
        *(finding for ladder in climbed for finding in _climb(ladder)),
        *_learnt(learnt),
        *(finding for race in raced for finding in _race(race)),
        *power_findings(raced),
    )


def _climb(ladder: Ladder) -> Iterator[Finding]:
    first = ladder.first
    timed = [stand for stand in ladder.climb() if stand.step]
    if first is None or first.step is None or len(timed) < 2:
        return
    best = min(timed, key=lambda stand: stand.step.median if stand.step else 0.0)
    assert best.step is not None
    ratio = first.step.median / best.step.median
    if ratio < GAINS:
        text = f"{ladder.name}: no change makes its {duration(first.step.median)} shorter."
        yield Finding(text=text, tone="info")
    else:
        text = (
            f"{ladder.name}: from {duration(first.step.median)} to {duration(best.step.median)},"
            f" {number(ratio, 3)} times as fast, with all up to {words(best.rung)}."
        )
        yield Finding(text=f"{text}{_alone(ladder, first.step.median)}", tone="good")
    yield from _waiting(ladder)
    lost = [s for s in ladder.stands if s.record.status != "ok"]
    if lost:
        kinds = dict.fromkeys(words(s.rung) for s in lost)
        yield Finding(
            text=f"{len(lost)} rows of {ladder.name} were not measured: {', '.join(kinds)}."
            f" The first said: {lost[0].record.reason}",
            tone="warn" if any(s.record.status != "skipped" for s in lost) else "info",
        )


def _waiting(ladder: Ladder) -> Iterator[Finding]:
    """Steps that take as long as the host needs: what the device gains in them does not show."""
    known = [stand for stand in ladder.stands if stand.host is not None]
    bound = [stand for stand in known if stand.host is not None and stand.host.bound]
    if bound:
        yield Finding(
            text=f"In {len(bound)} of {len(known)} rows of {ladder.name} the device waits for the"
            " host: there a change shows by the launches that it saves, and what the device gains"
            " shows once the step is a graph."
        )


def _alone(ladder: Ladder, start_ms: float) -> str:
    alone = {s.rung: s.step.median for s in ladder.stands if s.how in ("alone", "first") and s.step}
    if not any(s.how == "alone" for s in ladder.stands):
        return ""
    rung = min(alone, key=lambda name: alone[name])
    gain = start_ms / alone[rung]
    if gain < GAINS:
        return " Alone, no change makes it faster."
    return f" Alone, {words(rung)} brings most: {number(gain, 3)} times."


def _learnt(learnt: dict[str, Curve]) -> Iterator[Finding]:
    start = learnt.get(START)
    fell = start.fell_by() if start is not None else None
    if start is None or fell is None:
        return
    apart = {
        rung: away
        for rung, curve in learnt.items()
        if rung != START and (away := curve.apart(start)) is not None
    }
    steps = max(len(values) for values in start.by_seed.values())
    text = f"In {steps} steps the loss of the float32 step falls by {percent(fell)}."
    if fell < FALLS_BY:
        yield Finding(
            text=f"{text} That is too little to tell right from wrong: train for longer.",
            tone="warn",
        )
        return
    wrong = [rung for rung, away in apart.items() if abs(away) > AGREES_WITHIN]
    if wrong:
        told = ", ".join(f"{words(rung)} ({percent(apart[rung])})" for rung in wrong)
        yield Finding(
            text=f"{text} Not within {percent(AGREES_WITHIN)} of it at the end: {told}.",
            tone="warn",
        )
    elif apart:
        farthest = max(apart, key=lambda rung: abs(apart[rung]))
        yield Finding(
            text=f"{text} All {len(apart)} other rungs end within {percent(AGREES_WITHIN)} of it;"
            f" farthest is {words(farthest)} with {percent(abs(apart[farthest]))}.",
            tone="good",
        )


def _race(race: Race) -> Iterator[Finding]:
    ratio, ms, peer_ms = race.ratio(), race.step_ms(), race.step_ms("peer")
    if ratio is None or ms is None or peer_ms is None:
        return
    lead, share = race.lead(), race.mfu()
    rate = f", {percent(share)} MFU" if share is not None else ""
    where = "" if lead is None else " where steps follow each other"
    text = (
        f"{race.name}: a step takes {duration(ms)}{rate}{where}; the fastest peer"
        f" ({race.form('peer')}) takes {duration(peer_ms)}"
    )
    shown = ratio if lead is None else lead.ratio
    value = ratio.value if lead is None else lead.value
    also = "" if lead is None else f" Interleaved samples give {number(ratio.value, 3)} times."
    also += _narrower(race) + _other_races(race)
    if shown is not None and shown.low <= 1 <= shown.high:
        yield Finding(text=f"{text}: no difference is shown.{also}")
        return
    faster = value >= 1
    times = number(value if faster else 1 / value, 3)
    yield Finding(
        text=f"{text}: ours is {times} times as {'fast' if faster else 'long'}.{also}",
        tone="good" if faster else "warn",
    )


def _narrower(race: Race) -> str:
    ms, lead, ratio = race.step_ms("narrow"), race.lead("narrow"), race.ratio("narrow")
    if ms is None or ratio is None:
        return ""
    times = number(ratio.value if lead is None else lead.value, 3)
    return f" With narrower dtypes it takes {duration(ms)}, the peer {times} times as long."


def _other_races(race: Race) -> str:
    """What came out where fewer peers ran, or the fastest was farther away."""
    found = [(peers_that_ran(other), other.ratio()) for other in race.others]
    return "".join(
        f" Another race, against {peers} of its forms, gave {number(ratio.value, 3)} times."
        for peers, ratio in found
        if ratio is not None
    )
