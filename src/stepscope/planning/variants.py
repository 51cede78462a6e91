"""Plans of a recorded step, of the same step with a larger batch, and with twice the context."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Literal

import msgspec
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.analysis.predict.largest import largest_within
from stepscope.measure.ledger import line_of_code
from stepscope.planning.application import application_of, described
from stepscope.planning.fake_run import FakeStep
from stepscope.planning.fake_step import Fakes
from stepscope.planning.forms import EAGER, Form
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.loop import Loop, options_of
from stepscope.planning.operators import known_rates
from stepscope.planning.other_sizes import length_of, resized
from stepscope.planning.plans import plans_of
from stepscope.records.plans import Frontier, PlannedStep, thinned

_MOST = 24
"""Plans of a frontier that are kept."""
_SHARE = 0.9
"""Share of the memory that a plan may need: no larger than a trial can measure."""


def planned_steps(
    loop: Loop, model: nn.Module, optimizer: Optimizer, memory: int, *, compiled: bool
) -> list[PlannedStep]:
    """Plan the step of a loop that was watched, within a share of the device's memory. Steps of
    other sizes are left out if the program cannot run them."""
    fakes, form = Fakes(line_of_code), Form("blocks") if compiled else EAGER
    batch = [one.detach().to("cpu") for one in loop.batch]
    with fakes.active():
        copies, given = fakes.copy(model, optimizer), fakes.batch(batch)
        step = FakeStep(fakes, *copies, given, options_of(loop, copies[0], given))
        return _planned_sizes(step, form, _SHARE * memory)


def _planned_sizes(step: FakeStep, form: Form, limit: float) -> list[PlannedStep]:
    rates = known_rates()

    @cache
    def plans(dim: int, length: int) -> list[MemoryPlan]:
        return plans_of(resized(step, dim, length), rates, form)

    def planned(what: Literal["step", "batch", "context"], dim: int, length: int) -> PlannedStep:
        found = plans(dim, length)
        chosen = next((plan for plan in found if plan.peak <= limit), None)
        shown = tuple(map(described, thinned(found, _MOST)))
        return PlannedStep(
            what=what,
            size=length,
            frontier=Frontier(plans=shown, device=rates.device),
            plan=None if chosen is None else described(chosen),
            apply=None if chosen is None else application_of(chosen),
        )

    first = next((one for one in step.batch if one.numel()), None)
    found = [planned("step", 0, length_of(step.batch))]
    if first is None or not first.dim():
        return found
    with suppress(Exception):
        # Such as an assertion of the longest context.
        larger = planned("batch", 0, 2 * len(first))
        most = largest_within(lambda rows: plans(0, rows)[0].peak, len(first), limit)
        found.append(msgspec.structs.replace(larger, largest=most))
    if first.dim() > 1 and not first.is_floating_point():
        with suppress(Exception):
            found.append(planned("context", 1, 2 * first.shape[1]))
    return found
