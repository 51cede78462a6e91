"""Build the training step of a workload, for a built-in or a user's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.model.checkpointing import NONE
from stepscope.training.subject import TrainingStep
from stepscope.training.transformer import TransformerStep
from stepscope.training.user_step import UserModel, UserStep
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device


def make_step(
    workload: Workload, device: Device, *, seed: int = 0, shares: TrainingStep | None = None
) -> TrainingStep:
    """Build the step; with `shares`, on the weights and moments of another step of the model."""
    if not workload.own:
        return TransformerStep(workload, device, seed=seed, shares=shares)
    model = UserModel(
        name=workload.own,
        batch=workload.batch,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        compile=workload.compile,
        compile_mode=workload.compile_mode,
        checkpoint=workload.checkpoint != NONE,
        mode=workload.mode,
    )
    step = UserStep(model, device, seed=seed, shares=shares)
    step.compile()
    return step
