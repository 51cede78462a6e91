"""Plans of a recorded step, of the same step with twice the batch, and with twice the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.errors import StepscopeError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.application import application_of, described
from stepscope.planning.fake_step import Fakes
from stepscope.planning.loop import Loop, options_of
from stepscope.planning.operators import known_rates
from stepscope.planning.plans import plans_of
from stepscope.records.plans import Frontier, PlannedStep, thinned

_MOST = 24
"""Plans of a frontier that are kept."""
_SHARE = 0.9
"""Share of the memory that a plan may need: no larger than a trial can measure."""


def planned_steps(
    loop: Loop, model: nn.Module, optimizer: Optimizer, memory: int, *, compiled: bool
) -> Iterator[PlannedStep]:
    """Plan the step of a loop that was watched, within a share of the device's memory. Steps of
    other sizes are left out if the program cannot run them."""
    given = [one.detach().to("cpu") for one in loop.batch]
    first = next((one for one in given if one.dim()), None)
    variants: list[tuple[Literal["step", "batch", "context"], int]] = [("step", 0)]
    if first is not None:
        variants.append(("batch", 0))
        if first.dim() > 1 and not first.is_floating_point():
            variants.append(("context", 1))
    for what, dim in variants:
        length = 0 if first is None else first.shape[dim]
        batch = given if what == "step" else [_doubled(one, dim, length) for one in given]
        size = length if what == "step" else 2 * length
        try:
            yield _planned(loop, model, optimizer, batch, memory, what, size, compiled=compiled)
        except (StepscopeError, RuntimeError, TypeError, ValueError, IndexError):
            if what == "step":
                raise


def _planned(
    loop: Loop, model: nn.Module, optimizer: Optimizer, batch: list[Tensor], memory: int,
    what: Literal["step", "batch", "context"], size: int, *, compiled: bool,
) -> PlannedStep:  # fmt: skip
    fakes, rates = Fakes(line_of_code), known_rates()
    with fakes.active():
        fake_model, fake_optimizer = fakes.copy(model, optimizer)
        fake_model.zero_grad()
        given = fakes.batch(batch)
        options = options_of(loop, fake_model, given)
        plans = plans_of(fake_model, fake_optimizer, given, options, rates, compiled=compiled)
    chosen = next((plan for plan in plans if plan.peak <= _SHARE * memory), None)
    return PlannedStep(
        what=what,
        size=size,
        frontier=Frontier(plans=tuple(map(described, thinned(plans, _MOST))), device=rates.device),
        plan=None if chosen is None else described(chosen),
        apply=None if chosen is None else application_of(chosen),
    )


def _doubled(given: Tensor, dim: int, length: int) -> Tensor:
    """Add the length to a tensor that has it along a dimension; for a context, up to a token that
    is the target of the last one alone."""
    size = given.shape[dim] if given.dim() > dim else 0
    if not size or abs(size - length) > dim:
        return given
    return torch.cat([given, given, given], dim).narrow(dim, 0, size + length)
