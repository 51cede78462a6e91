"""Findings of the step study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import quotient
from stepscope.records.stats import Summary
from stepscope.report.blocks import Finding, Value
from stepscope.report.format import counted, duration, number
from stepscope.studies.step.ladder import words
from stepscope.studies.step.rows import Ladder
from stepscope.views.builders import finding

GAINS = 1.01
"""Smallest speedup that counts as a gain."""


def step_findings(ladders: Sequence[Ladder]) -> Iterator[Finding]:
    for ladder in ladders:
        if ladder.start is not None and len(ladder.climb) > 1:
            yield _climb(ladder, ladder.start)
            yield from _cpu_bound(ladder)
            yield from _not_measured(ladder)


def _climb(ladder: Ladder, start: Summary) -> Finding:
    best, best_step = min(ladder.climb, key=lambda pair: pair[1].median)
    start_ms, best_ms, gain = start.median, best_step.median, quotient(start, best_step)
    times = gain.value
    values: dict[str, Value] = {"ladder": ladder.name, "start_ms": start_ms}
    if not gain.against(GAINS).above:
        return finding(
            "step.no-gain",
            f"{ladder.name}: no gain over the baseline's {duration(start_ms)} is shown.",
            [rung for rung, _ in ladder.climb],
            values,
        )
    conclusion = NOTHING
    if any(rung.case.how == "alone" for rung in ladder.rungs):
        alone = {
            rung.case.rung: rung.step
            for rung in ladder.rungs
            if rung.case.how in ("alone", "first") and rung.step
        }
        fastest = min(alone, key=lambda rung: alone[rung].median)
        alone_gain = quotient(start, alone[fastest]).against(GAINS)
        values |= {"alone": fastest, "alone_times": alone_gain.value}
        conclusion = conclude(
            f"The largest single gain is {words(fastest)}: {number(alone_gain.value, 3)} times."
            if alone_gain.above
            else "Alone, no change is faster than the baseline.",
            alone_gain,
        )
    return finding(
        "step.gain",
        f"{ladder.name}: from {duration(start_ms)} to {duration(best_ms)},"
        f" {number(times, 3)} times as fast, with all changes up to “{words(best.case.rung)}”.",
        [rung for rung in ladder.rungs if rung.step],
        values | {"best_ms": best_ms, "times": times, "up_to": best.case.rung},
        conclusion=conclusion,
        tone="good",
    )


def _cpu_bound(ladder: Ladder) -> Iterator[Finding]:
    """Rungs limited by the CPU's issue time, in which faster kernels do not show."""
    known = [(rung, host) for rung in ladder.rungs if (host := rung.host) is not None]
    bound = sum(host.bound for _, host in known)
    if bound:
        yield finding(
            "step.host-bound",
            f"{bound} of {len(known)} rows of {ladder.name} are CPU-bound.",
            [rung for rung, _ in known],
            {"ladder": ladder.name, "rows": bound, "of": len(known)},
            conclusion=conclude(
                "In these rows a change helps only by saving launches; faster kernels show once the"
                " step is a CUDA graph.",
                *(host.effect for _, host in known if host.bound),
            ),
        )


def _not_measured(ladder: Ladder) -> Iterator[Finding]:
    failed = [rung for rung in ladder.rungs if rung.record.status != "ok"]
    if failed:
        changes = ", ".join(dict.fromkeys(words(rung.case.rung) for rung in failed))
        reason = failed[0].record.reason
        yield finding(
            "step.not-measured",
            f"Of {ladder.name}, {counted(len(failed), 'row')} could not be measured: {changes}."
            f" First reason: {reason}",
            failed,
            {"ladder": ladder.name, "rows": len(failed), "reason": reason},
            tone="warn" if any(rung.record.status != "skipped" for rung in failed) else "info",
        )
