"""Observe the gathers of FSDP steps on ranks. Imports torch lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.studies.base import Bench, Measurement
from stepscope.studies.fsdp.gathers import GATHERS, Gather, RankGathers
from stepscope.studies.sharding.cases import FSDP_STRATEGIES, FULLY
from stepscope.studies.sharding.measure import make, measure_case
from stepscope.training.ranks.steps import Span, Stopwatch, Trained, one_step, progress, settle
from stepscope.training.ranks.subject import Fed, RankedStep

if TYPE_CHECKING:
    from stepscope.parallel import World
    from stepscope.training.ranks.one_process import Subject

WARMUP = 2
"""Steps before the first that is observed: the order of prefetches is that of the step before."""
STEPS = 9
_DIGITS = 4
"""Decimals of a time in ms."""


class Observed(NamedTuple):
    """A gather in one step."""

    verb: str
    weight: str
    issued: float
    ended: float
    needed: float


def measure(case: RankedStep, bench: Bench) -> Measurement:
    return measure_case("fsdp", case, bench, FSDP_STRATEGIES, (GATHERS, observe_gathers))


def observe_gathers(world: World, subject: Subject) -> RankGathers:
    """Record the gathers of a few steps; runs on each rank."""
    trained = make(world, FULLY, subject.model)
    steps = []
    for step in range(-WARMUP, STEPS):
        progress()
        gathers, phases = _observed_step(world, trained, subject.fed)
        if step >= 0:
            steps.append((gathers, phases))
    # A step whose gathers differ cannot be aligned with the others.
    order = [(one.verb, one.weight) for one in steps[-1][0]]
    kept = [one for one in steps if [(g.verb, g.weight) for g in one[0]] == order]
    return RankGathers(
        gathers=[
            Gather(
                weight=weight,
                phase="forward" if verb == "gather" else "backward",
                issued=[round(gathers[index].issued, _DIGITS) for gathers, _ in kept],
                ended=[round(gathers[index].ended, _DIGITS) for gathers, _ in kept],
                needed=[round(gathers[index].needed, _DIGITS) for gathers, _ in kept],
            )
            for index, (verb, weight) in enumerate(order)
        ],
        phases=[
            [(round(a, _DIGITS), round(b, _DIGITS), name) for a, b, name in phases]
            for _, phases in kept
        ],
    )


def _observed_step(world: World, trained: Trained, fed: Fed) -> tuple[list[Observed], list[Span]]:
    """Run a step; return its gathers in the order in which they are needed, and its phases."""
    watch = Stopwatch(world)
    events: list[dict[str, Any]] = []
    needed: dict[str, Any] = {}

    def observer(verb: str, weight: str, work: Any) -> None:
        if work is None:
            waiting = (e for e in reversed(events) if e["weight"] == weight and "needed" not in e)
            event = next(waiting, None)
            if event is not None:
                event["needed"] = watch.now()
            else:
                # It is issued only now.
                needed[weight] = watch.now()
            return
        event = {"verb": verb, "weight": weight, "issued": watch.now()}
        if weight in needed:
            event["needed"] = needed.pop(weight)
        events.append(event)
        watch.at_end(work, lambda moment: event.update(ended=moment))

    model: Any = trained.model
    with model.observed(observer):
        one_step(world, trained, fed, watch.laps)
    settle(world)
    # A prefetched weight that the step does not use is not needed.
    used = [event for event in events if "needed" in event and "ended" in event]
    gathers = [
        Observed(
            event["verb"],
            event["weight"],
            *(watch.ms(event[moment]) for moment in ("issued", "ended", "needed")),
        )
        for event in used
    ]
    return sorted(gathers, key=lambda one: one.needed), watch.phases()
