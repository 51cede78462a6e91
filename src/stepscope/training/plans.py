"""The plan of a workload, from which its memory is predicted."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.errors import UsageError
from stepscope.training.workload import Workload


def plan_of(workload: Workload, device_kind: str) -> StepPlan:
    device: Literal["cuda", "cpu"] = "cuda" if device_kind == "cuda" else "cpu"
    return StepPlan(
        model=workload.model(),
        device=device,
        # The small step before this one had a backward pass if this one has one.
        used_before=workload.mode != "forward",
        **settings_of(workload, Workload),
    )


def settings_of(step: object, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of that kind of step that a plan has too."""
    names = set(StepPlan.__struct_fields__) & set(kind.__struct_fields__) - {"model"}
    return {name: getattr(step, name) for name in names}


def can_be_predicted(workload: Workload, device_kind: str) -> bool:
    """True if a plan exists. There is none for a compiled step, whose operators are the compiler's
    choice, for a graph replay, which requests nothing from the allocator, for combinations that
    no plan covers on that device, and for a user's model, whose shape is unknown."""
    if workload.compile != "no" or workload.graph:
        return False
    try:
        plan_of(workload, device_kind)
    except UsageError:
        return False
    return True


def prediction_for(workload: Workload, device_kind: str) -> Prediction | None:
    if not can_be_predicted(workload, device_kind):
        return None
    return predict(plan_of(workload, device_kind))
