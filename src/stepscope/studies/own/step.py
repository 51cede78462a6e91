"""The training step of a case of study own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.studies.own.cases import OwnStep
from stepscope.training.user_step import UserModel, UserStep

if TYPE_CHECKING:
    from stepscope.measure.device import Device


def own_step(case: OwnStep, device: Device) -> UserStep:
    """Create the step of a case, not compiled yet."""
    graphs = case.compile == "graphs"
    return UserStep(
        UserModel(
            name=case.model,
            batch=case.batch,
            dtype=case.dtype,
            optimizer=case.optimizer,
            compile=case.compile,
            compile_mode="reduce-overhead" if graphs else "default",
            fuse_attention=case.attention == "fused",
            checkpoint=case.checkpoint == "blocks",
        ),
        device,
    )
