"""What the checkpointing study says, in sentences that carry their numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from stepscope.model.checkpointing import NESTED, NONE, inputs_kept, run_again
from stepscope.report.blocks import Finding
from stepscope.report.format import bytes_, duration, number, percent
from stepscope.studies.checkpointing.rows import Sweep, Tried

_PREDICTED = 0.05
_SAME = 0.01
"""Peaks this near to one another are one."""


def checkpointing_findings(found: Sequence[Sweep]) -> tuple[Finding, ...]:
    return (
        *(finding for sweep in found for finding in _saving(sweep)),
        *(finding for sweep in found for finding in _nested(sweep)),
        *(finding for sweep in found for finding in _budgets(sweep)),
        *_prediction(found),
    )


def _saving(sweep: Sweep) -> Iterator[Finding]:
    """The least of the simple strategies against keeping everything."""
    simple = [each for each in sweep.ran if len(each.sizes) == 1]
    if not simple:
        return
    least = min(simple, key=lambda each: each.peak)
    kept = sweep.of(NONE)
    words = "each block alone" if least.strategy == "1" else f"stretches of {least.strategy} blocks"
    text = f"{sweep.name}: of the simple strategies {words} needs the least,"
    if len(simple) == 1:
        text = f"{sweep.name}: {words} needs"
    if kept is None:
        status = next((each.record.status for each in sweep.all if each.strategy == NONE), "")
        without = {"oom": "ran out of memory", "": "was not tried"}.get(status, "did not run")
        yield Finding(
            text=f"{text} {bytes_(least.peak)} and {duration(least.ms or 0)} a step; with all"
            f" activations kept it {without}.",
            tone="good",
        )
        return
    slower = (least.ms or 0) / (kept.ms or math.inf)
    text += (
        f" {bytes_(least.peak)} instead of {bytes_(kept.peak)}, and takes"
        f" {duration(least.ms or 0)} instead of {duration(kept.ms or 0)}, {number(slower, 3)}× the"
        " time"
    )
    if slower < 1:
        yield Finding(
            text=f"{text}: it does more work, so the machine was busy with something else and its"
            " times tell nothing.",
            tone="warn",
        )
        return
    expected = sweep.predicted_slower(least)
    if expected is None:
        text += (
            f"; one forward more is {number(4 / 3, 3)}× where the forward is a third of the step"
            " and the optimizer costs nothing"
        )
    else:
        text += (
            f" ({number(expected, 3)}× predicted, as the forward is"
            f" {percent(kept.forward_share or 0)} of the step)"
        )
    yield Finding(
        text=f"{text}.",
        tone="good" if least.peak < kept.peak else "info",
    )


def _nested(sweep: Sweep) -> Iterator[Finding]:
    """The strategy with the fewest inputs kept, what it costs, and whether the peak follows."""
    halved, single = sweep.of(NESTED), sweep.of("1")
    if halved is None or single is None:
        return
    layers = halved.layers
    to_two = tuple(range(layers - 1, 0, -1))
    text = (
        f"{sweep.name}: the strategy that keeps the least is nested, {layers} blocks halved down to"
        f" single ones ({'-'.join(map(str, halved.sizes))}): {halved.inputs} inputs at most"
        f" instead of {single.inputs}, growing with the logarithm of the depth, for"
        f" {number(halved.again, 3)} forwards of each block run again instead of one;"
        f" {duration(halved.ms or 0)} against {duration(single.ms or 0)} a step."
    )
    if abs(halved.peak / single.peak - 1) <= _SAME:
        text += (
            f" The peak of the step stays at {bytes_(halved.peak)}: it is in the"
            f" {halved.peak_phase} phase, when all gradients and one block's activations live and"
            " few inputs are left, so single blocks are as good and cheaper."
        )
    else:
        text += f" Peak {bytes_(halved.peak)} against {bytes_(single.peak)}."
    if layers > 2:
        text += (
            f" As few as {inputs_kept(to_two, layers)} inputs are possible, one block split off at"
            f" a time, for {number(run_again(to_two, layers) / layers, 3)} forwards of each block."
        )
    yield Finding(text=text)


def _budgets(sweep: Sweep) -> Iterator[Finding]:
    """The strategy that was chosen before, and whether it fitted when run."""
    for each in sweep.budgets:
        assert each.budget is not None
        if not each.ok:
            yield Finding(
                text=f"{sweep.name} under {bytes_(each.budget)}: {each.record.status},"
                f" {each.record.reason}",
                tone="warn",
            )
            continue
        fits = each.peak <= each.budget
        limit = (
            "run under that limit,"
            if each.record.environment.device_kind == "cuda"
            else "counted (a CPU has no limit to set),"
        )
        best = _fastest_within(sweep, each.budget)
        text = (
            f"{sweep.name} under {bytes_(each.budget)}: {_words(each)} was chosen from the"
            f" prediction ({bytes_(each.predicted or 0)}) as what runs the least again; {limit} it"
            f" peaks at {bytes_(each.peak)} and {'fits' if fits else 'does not fit'}, with"
            f" {duration(each.ms or 0)} a step."
        )
        if best is not None and best.strategy != each.strategy:
            text += (
                f" Of the sweep the fastest that fits is {_words(best)}, {duration(best.ms or 0)}."
            )
        yield Finding(text=text, tone="good" if fits else "warn")


def _fastest_within(sweep: Sweep, budget: int) -> Tried | None:
    fitting = [each for each in sweep.ran if each.peak <= budget]
    return min(fitting, key=lambda each: each.ms or math.inf, default=None)


def _words(each: Tried) -> str:
    if each.strategy == NONE:
        return "no checkpointing"
    return f"checkpointing {each.strategy}"


def _prediction(found: Sequence[Sweep]) -> Iterator[Finding]:
    judged = [
        (abs(each.off), each)
        for sweep in found
        for each in (*sweep.ran, *sweep.budgets)
        if each.off is not None
    ]
    if not judged:
        return
    worst, case = max(judged, key=lambda pair: pair[0])
    yield Finding(
        text=f"Predicted peaks of {len(judged)} runs are off by"
        f" {percent(statistics.median(off for off, _ in judged))} in the median and"
        f" {percent(worst)} at most ({case.workload.name}).",
        tone="good" if worst <= _PREDICTED else "warn",
    )
