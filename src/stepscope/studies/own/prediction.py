"""Memory of the training step of a user's model, predicted on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analysis.predict.fit import MARGIN
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.studies.own.building import build, call, loss_of

if TYPE_CHECKING:
    from stepscope.planning.predict import MemoryPrediction


class NoBlocks(UsageError):  # noqa: N818
    """There is nothing to checkpoint."""


class ModelPlan(NamedTuple):
    """The settings of a predicted step."""

    model: str
    """`package.module:function` that builds the model."""
    batch: int
    dtype: str
    optimizer: str
    checkpoint: bool = False
    """Checkpoint every entry of its ModuleLists."""

    def __str__(self) -> str:
        how = ", blocks checkpointed" if self.checkpoint else ""
        return f"{self.model} at batch {self.batch}, in {self.dtype}{how}"


def predict_model(plan: ModelPlan) -> MemoryPrediction:
    """Build the model with fake tensors and predict the memory of its step."""
    import torch

    from stepscope.acceleration.changes import checkpoint_blocks
    from stepscope.measure.ledger import line_of_code
    from stepscope.planning.fake_step import Fakes
    from stepscope.planning.predict import StepOptions, predict_fake
    from stepscope.studies.training.parts import make_optimizer

    known = precision(plan.dtype)
    if known.fp8 or known.master or known.narrow_stream:
        raise UsageError(
            f"--dtype {plan.dtype} is predicted for the built-in sizes only",
            "use float32, tf32, bfloat16, float16 or bfloat16-pure",
        )
    fakes = Fakes(line_of_code)
    with fakes.active():
        built = build(plan.model)
        model = built.model.to(getattr(torch, known.weights)).train()
        if plan.checkpoint and not checkpoint_blocks(model):
            raise NoBlocks(
                f"the model of {plan.model} has no ModuleList of blocks to checkpoint",
                "leave --checkpoint out",
            )
        return predict_fake(
            fakes,
            model,
            make_optimizer(plan.optimizer, model),
            built.make_batch(plan.batch, torch.device("cpu")),
            StepOptions(
                lambda model, batch: loss_of(call(model, batch), batch, built.loss, plan.model),
                getattr(torch, known.compute) if known.autocast else None,
            ),
        )


def plans_that_fit(plan: ModelPlan, budget: int) -> Iterator[tuple[ModelPlan, MemoryPrediction]]:
    """The largest batch that fits, as the model is and with checkpointed blocks."""
    for checkpoint in (False, True):
        batch = plan.batch
        while batch:
            candidate = plan._replace(batch=batch, checkpoint=checkpoint)
            try:
                prediction = predict_model(candidate)
            except NoBlocks:
                return
            if prediction.peak.allocated * MARGIN <= budget:
                yield candidate, prediction
                break
            batch //= 2
