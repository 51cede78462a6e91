"""Memory of the training step of a user's model, predicted on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from stepscope.analysis.predict.fit import MARGIN, within
from stepscope.analysis.predict.largest import largest_within
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.plans import FittingBatch, Frontier
from stepscope.training.building import build, call, loss_of

if TYPE_CHECKING:
    from stepscope.planning.fake_run import FakeStep, MemoryPrediction
    from stepscope.planning.forms import Compile, Form

COMPILE: dict[str, Compile | None] = {
    "no": None,
    "block": "blocks",
    "model": "model",
    "accelerate": "accelerate",
}
"""Values of --compile."""


_WORDS = {
    "block": "blocks compiled",
    "model": "compiled as one",
    "accelerate": "accelerated, as a CUDA graph",
}


class ModelPlan(NamedTuple):
    """The settings of a predicted step."""

    model: str
    """`package.module:function` that builds the model."""
    batch: int
    dtype: str
    optimizer: str
    checkpoint: bool = False
    """Checkpoint every entry of its ModuleLists."""
    compile: str = "no"
    ranks: int = 1
    sharding: Literal["none", "full"] = "none"

    def __str__(self) -> str:
        parts = [f"{self.model} at batch {self.batch}, in {self.dtype}"]
        parts += ["blocks checkpointed"] if self.checkpoint else []
        parts += [_WORDS[self.compile]] if self.compile != "no" else []
        if self.ranks > 1:
            parts.append(f"{'FSDP2' if self.sharding == 'full' else 'DDP'} on {self.ranks} ranks")
        return ", ".join(parts)

    @property
    def form(self) -> Form:
        from stepscope.planning.forms import Form
        from stepscope.planning.ranks import Ranks

        ranks = Ranks(self.ranks, self.sharding)
        return Form(COMPILE[self.compile], ranks, precision(self.dtype).fp8)


@contextmanager
def _fake_step(plan: ModelPlan) -> Iterator[FakeStep]:
    import torch

    from stepscope.acceleration.changes import checkpoint_blocks
    from stepscope.measure.ledger import line_of_code
    from stepscope.planning.fake_run import FakeStep, StepOptions
    from stepscope.planning.fake_step import Fakes
    from stepscope.training.parts import make_optimizer

    known = precision(plan.dtype)
    if known.master or known.narrow_stream:
        raise UsageError(
            f"--dtype {plan.dtype} is predicted for the built-in sizes only",
            "use float32, tf32, bfloat16, float16, bfloat16-pure, fp8 or fp8-pure",
        )
    fakes = Fakes(line_of_code)
    with fakes.active():
        built = build(plan.model)
        model = built.model.to(getattr(torch, known.weights)).train()
        if plan.checkpoint and not checkpoint_blocks(model):
            raise UsageError(
                f"the model of {plan.model} has no ModuleList of blocks to checkpoint",
                "leave --checkpoint out",
            )
        yield FakeStep(
            fakes,
            model,
            make_optimizer(plan.optimizer, model),
            built.make_batch(plan.batch, torch.device("cpu")),
            StepOptions(
                lambda model, batch: loss_of(call(model, batch), batch, built.loss, plan.model),
                getattr(torch, known.compute) if known.autocast else None,
            ),
        )


def predict_model(plan: ModelPlan) -> MemoryPrediction:
    """Build the model with fake tensors and predict the memory of its step."""
    from stepscope.planning.forms import predict_step

    with _fake_step(plan) as step:
        return predict_step(step, plan.form)


def frontier_of(plan: ModelPlan) -> Frontier:
    """Build the model with fake tensors and predict all plans of its step."""
    from stepscope.planning.application import described
    from stepscope.planning.operators import known_rates
    from stepscope.planning.plans import plans_of

    with _fake_step(plan) as step:
        rates = known_rates()
        plans = tuple(map(described, plans_of(step, rates, plan.form)))
    return Frontier(plans=plans, device=rates.device, ranks=plan.ranks, sharding=plan.sharding)


def batches_that_fit(plan: ModelPlan, budget: int) -> Iterator[FittingBatch]:
    """The largest batch that fits as the model is, and those that fit with a plan of its blocks:
    the batch of the step, and the largest one."""
    frontiers = cache(lambda batch: frontier_of(plan._replace(batch=batch)))

    @cache
    def as_it_is(batch: int) -> int:
        if plan.compile in ("block", "accelerate"):
            # What the compiler recomputes for nothing is a plan, and accelerated steps have none.
            return predict_model(plan._replace(batch=batch)).peak.allocated
        return frontiers(batch).plans[0].peak

    most = largest_within(lambda n: MARGIN * as_it_is(n), plan.batch, budget)
    if most:
        yield FittingBatch(batch=most, peak_bytes=as_it_is(most))
    if plan.compile == "accelerate":
        return
    largest = largest_within(lambda n: MARGIN * frontiers(n).plans[-1].peak, max(most, 1), budget)
    for batch in sorted({plan.batch, largest}):
        if most < batch <= largest and (fitting := within(frontiers(batch), budget)) is not None:
            yield FittingBatch(batch=batch, peak_bytes=fitting.peak, blocks=fitting.words)
