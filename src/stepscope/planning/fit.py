"""`stepscope.fit`: the fastest plan of a training step within a memory budget."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.train_step_arguments import Lever, require_valid
from stepscope.analysis.predict.fit import MARGIN
from stepscope.analysis.predict.sizes import bytes_of
from stepscope.display import html_of
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.application import Applied, application_of, apply_plan, described
from stepscope.planning.fake_run import (
    FakeStep,
    LossFunction,
    MemoryPrediction,
    StepOptions,
    predict_fake,
)
from stepscope.planning.fake_step import Fakes
from stepscope.planning.forms import EAGER, Form
from stepscope.planning.frontier import MemoryPlan
from stepscope.planning.host_states import FakeHostStates
from stepscope.planning.operators import Rates, known_rates
from stepscope.planning.other_sizes import largest_batch
from stepscope.planning.plans import is_compiled, plans_of, require_allowed
from stepscope.records.plans import FittedStep, Frontier, thinned
from stepscope.report.format import bytes_

_MOST = 40
"""Plans of a frontier that are shown."""
_FITTED: WeakKeyDictionary[nn.Module, Fitted] = WeakKeyDictionary()
"""Models that follow a plan."""


class Fitted:
    """A plan that is applied to a model; `undo()` takes it back."""

    def __init__(
        self,
        plan: MemoryPlan,
        plans: list[MemoryPlan],
        prediction: MemoryPrediction | None,
        budget: int,
        rates: Rates,
        applied: Applied,
        model: str,
    ) -> None:
        self.plan, self.plans = plan, plans
        self.prediction = prediction
        """A run of the full step with the plan; None with compiled blocks."""
        self.budget, self.rates = budget, rates
        self._model = model
        self._applied: Applied | None = applied

    @property
    def peak(self) -> int:
        """Predicted bytes at the peak: of compiled blocks an estimate."""
        return self.plan.peak if self.prediction is None else self.prediction.peak.allocated

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.plan.seconds

    def undo(self) -> None:
        """Let the blocks save everything again, and the optimizer keep its states."""
        if self._applied is not None:
            self._applied.remove()
        self._applied = None

    def _repr_html_(self) -> str:
        chosen = Chosen(self.plan, self.plans, self.prediction)
        return html_of(chosen.described(self.budget, self.rates, self._model))

    def __str__(self) -> str:
        fastest, plan = self.plans[0], self.plan
        lines = [
            f"predicted peak: {bytes_(self.peak, 4)} of {bytes_(self.budget, 4)}"
            f" ({bytes_(fastest.peak, 4)} without a plan)",
            f"predicted step: {1e3 * plan.seconds:.1f} ms at the rates of {self.rates.device},"
            f" {100 * (plan.seconds / fastest.seconds - 1):.1f} % more",
        ]
        for count, cost in plan.groups:
            row = f"{count:4} blocks  {bytes_(cost.saved + cost.to_host, 4):>12}  {cost.plan}"
            lines.append(f"{row}, {1e3 * cost.again_s:.2f} ms" if cost.again_s else row)
        if plan.micro_batches > 1:
            lines.append(f"{plan.micro_batches} micro-batches in a step")
        if plan.host_states:
            lines.append(f"optimizer states in host memory: {bytes_(plan.host_states, 4)}")
        return "\n".join(lines)


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    sample: Any,
    *,
    budget: str | int,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    allow: Collection[Lever] = (),
) -> Fitted:
    """Make a training step fit into a budget of memory, at the least predicted time.

        fitted = stepscope.fit(model, optimizer, batch, budget="60GiB", dtype=torch.bfloat16)
        print(fitted)

    Each repeated block saves its activations, recomputes some or all of them in the backward pass,
    or copies what it saves to pinned host memory. Memory comes from runs on fake tensors, time from
    FLOPs, bytes and the rates of the GPU. `sample`, `loss_fn`, `dtype` and `max_grad_norm` are
    those of `TrainStep`. The model is changed in place, and an earlier plan is undone; gradients
    stay the same.

    `allow=("micro-batches", "host-states")` permits more: to split the batch into parts whose
    gradients are added up, which `TrainStep(memory=…)` does and a loop of your own must do, and to
    keep the optimizer's states in pinned host memory between its steps.
    """
    require_valid({}, loss_fn, optimizer, max_grad_norm, dtype, None)
    require_allowed(allow)
    limit, options = bytes_of(budget), StepOptions(loss_fn, dtype, max_grad_norm)
    rates = known_rates()
    if model in _FITTED:
        _FITTED.pop(model).undo()
    fakes = Fakes(line_of_code)
    with fakes.active():
        step = FakeStep.of(fakes, model, optimizer, sample, options)
        compiled = is_compiled(model)
        chosen = fastest_within(step, limit, rates, compiled=compiled, allow=allow)
    applied = apply_plan(model, optimizer, application_of(chosen.plan))
    fitted = Fitted(*chosen, limit, rates, applied, type(model).__name__)
    _FITTED[model] = fitted
    return fitted


class Chosen(NamedTuple):
    """The fastest of some plans that fits."""

    plan: MemoryPlan
    plans: list[MemoryPlan]
    prediction: MemoryPrediction | None
    """A run of the full step with the plan; None with compiled blocks."""

    def described(self, budget: int, rates: Rates, model: str) -> FittedStep:
        """Return it as plain data; `model` is the name of the model's class."""
        plan, plans = described(self.plan), map(described, thinned(self.plans, _MOST))
        assumed: tuple[str, ...] = ()
        if self.prediction is not None:
            plan = msgspec.structs.replace(plan, peak=self.prediction.peak.allocated)
            assumed = self.prediction.assumed
        return FittedStep(
            frontier=Frontier(plans=tuple(plans), device=rates.device),
            budget=budget,
            plan=plan,
            apply=application_of(self.plan),
            model=model,
            is_estimate=self.prediction is None,
            assumed=assumed,
        )


def fastest_within(
    step: FakeStep,
    limit: int,
    rates: Rates,
    *,
    compiled: bool,
    allow: Collection[Lever] = (),
) -> Chosen:
    """Return the fastest plan within a budget, in `fakes.active()`; raise an error with the
    smallest budget and the largest batch if there is none."""
    form = Form("blocks") if compiled else EAGER
    plans = plans_of(step, rates, form, allow=allow)

    def predicted(plan: MemoryPlan) -> MemoryPrediction | None:
        if compiled:
            return None
        applied = apply_plan(step.model, step.optimizer, application_of(plan), FakeHostStates)
        parts = step.options._replace(micro_batches=plan.micro_batches)
        try:
            return predict_fake(step._replace(options=parts), steps=1)
        finally:
            applied.remove()

    def needed(plan: MemoryPlan, prediction: MemoryPrediction | None) -> float:
        return MARGIN * (plan.peak if prediction is None else prediction.peak.allocated)

    for plan in plans:
        if plan.peak * MARGIN <= limit:
            prediction = predicted(plan)
            if needed(plan, prediction) <= limit:
                return Chosen(plan, plans, prediction)
    smallest = needed(plans[-1], predicted(plans[-1]))
    more = smallest / plans[-1].peak
    batch = largest_batch(
        step, limit, lambda step: more * plans_of(step, rates, form, allow=allow)[-1].peak
    )
    raise UsageError(
        f"the budget of {bytes_(limit, 4)} is below {bytes_(smallest, 4)}, the smallest for this"
        " step",
        f"use a larger budget, or a batch of {batch}" if batch else "use a larger budget",
    )


def plans_of_step(
    model: nn.Module,
    optimizer: Optimizer,
    sample: Any,
    *,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    allow: Collection[Lever] = (),
) -> list[MemoryPlan]:
    """Return all plans that `fit` selects from, the fastest first."""
    fakes = Fakes(line_of_code)
    with fakes.active():
        options = StepOptions(loss_fn, dtype, max_grad_norm)
        step = FakeStep.of(fakes, model, optimizer, sample, options)
        form = Form("blocks") if is_compiled(model) else EAGER
        return plans_of(step, known_rates(), form, allow=allow)
