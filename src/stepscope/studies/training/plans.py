"""The plan of a workload, from which its memory is predicted."""

from __future__ import annotations

from typing import Literal

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.errors import UsageError
from stepscope.studies.training.workload import Workload


def plan_of(workload: Workload, device_kind: str) -> StepPlan:
    device: Literal["cuda", "cpu"] = "cuda" if device_kind == "cuda" else "cpu"
    return StepPlan(
        model=workload.model(),
        batch=workload.batch,
        context=workload.context,
        dtype=workload.dtype,
        attention=workload.attention,
        mode=workload.mode,
        optimizer=workload.optimizer,
        checkpoint=workload.checkpoint,
        loss="fused" if workload.loss == "fused" else "plain",
        fused=workload.fused,
        fused_projections=workload.fused_projections,
        activation_policy=workload.activation_policy,
        graph=workload.graph,
        device=device,
        # The small step before this one had a backward pass if this one has one.
        used_before=workload.mode != "forward",
    )


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
