"""From a workload to the plan that a prediction is made of."""

from __future__ import annotations

from typing import Literal

from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import Prediction, predict
from stepscope.studies.workload import Workload
from stepscope.studies.workload_flags import IN_BACKWARD


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
        device=device,
        # The small step before it had a backward where this one has.
        used_before=workload.mode != "forward",
    )


def can_be_predicted(workload: Workload) -> bool:
    """Not a compiled step, whose operators are the compiler's choice, nor one of our kernels, nor
    somebody else's model, nor one whose gradients go as they come."""
    plain = workload.compile == "no" and not workload.fused and not workload.graph
    return plain and not workload.own and workload.optimizer != IN_BACKWARD


def prediction_for(workload: Workload, device_kind: str) -> Prediction | None:
    if not can_be_predicted(workload):
        return None
    return predict(plan_of(workload, device_kind))
