"""Memory of the training step of a user's model, predicted on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from stepscope.analysis.predict.fit import within
from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.plans import Frontier, Plan
from stepscope.training.building import build, call, loss_of

if TYPE_CHECKING:
    import torch

    from stepscope.planning.fake_run import MemoryPrediction, StepOptions
    from stepscope.planning.fake_step import Fakes


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


class _FakeStep(NamedTuple):
    """A step of fake tensors."""

    fakes: Fakes
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    options: StepOptions


@contextmanager
def _fake_step(plan: ModelPlan) -> Iterator[_FakeStep]:
    import torch

    from stepscope.acceleration.changes import checkpoint_blocks
    from stepscope.measure.ledger import line_of_code
    from stepscope.planning.fake_run import StepOptions
    from stepscope.planning.fake_step import Fakes
    from stepscope.training.parts import make_optimizer

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
            raise UsageError(
                f"the model of {plan.model} has no ModuleList of blocks to checkpoint",
                "leave --checkpoint out",
            )
        yield _FakeStep(
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
    from stepscope.planning.fake_run import predict_fake

    with _fake_step(plan) as step:
        return predict_fake(*step)


def frontier_of(plan: ModelPlan, ranks: int, sharding: Literal["none", "full"]) -> Frontier:
    """Build the model with fake tensors and predict all plans of its step."""
    from stepscope.planning.application import described
    from stepscope.planning.operators import known_rates
    from stepscope.planning.plans import plans_of
    from stepscope.planning.ranks import Ranks

    with _fake_step(plan) as step:
        rates, among = known_rates(), Ranks(ranks, sharding)
        among.require_valid()
        plans = tuple(map(described, plans_of(*step[1:], rates, among)))
    return Frontier(plans=plans, device=rates.device, ranks=ranks, sharding=sharding)


def plans_that_fit(plan: ModelPlan, budget: int) -> Iterator[tuple[ModelPlan, Plan]]:
    """The largest batch that fits, halved from that of the plan: with the fastest plan of its
    blocks, and as the model is."""
    batch, is_first = plan.batch, True
    while batch:
        candidate = plan._replace(batch=batch)
        fitting = within(frontier_of(candidate, 1, "none"), budget)
        is_plain = fitting is not None and fitting.is_plain
        if fitting is not None and (is_first or is_plain):
            yield candidate, fitting
            is_first = False
        if is_plain:
            return
        batch //= 2
