"""Trains one rung for a few hundred steps, to see that no gain is bought with a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, Measurement
from stepscope.studies.step.text import entropy, sequences
from stepscope.studies.transformer_step import TransformerStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

LEARNING_RATE = 3e-4


def measure_loss(config: dict[str, Any], bench: Bench) -> Measurement:
    import torch

    workload = msgspec.convert(config, Workload)
    seed, steps = config["seed"], config["steps"]
    step = TransformerStep(workload, bench.device, seed=seed)
    for group in step.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    rows = sequences(
        steps * workload.batch, workload.context + 1, workload.model().vocab, seed, config["words"]
    )
    text = torch.from_numpy(rows).view(steps, workload.batch, -1)
    _capture(step)
    losses = torch.empty(steps, device=bench.device.torch_device)
    for number, batch in enumerate(text):
        step.reset()
        step.tokens.copy_(batch[:, :-1])
        step.targets.copy_(batch[:, 1:])
        step.run_phases()
        assert step.loss is not None
        losses[number].copy_(step.loss.detach())
        if number % 10 == 9:
            bench.progress(number + 1, steps, "steps of training")
    values = tuple(losses.tolist())
    return Measurement(
        series=(Series(name="loss", unit="nats", values=values),),
        quantities=(
            *workload.quantities(),
            Quantity(name="entropy", value=entropy(), unit="nats"),
        ),
    )


def _capture(step: TransformerStep) -> None:
    """Capture the step now, where it is a graph, and undo the steps that this takes."""
    if step.workload.graph:
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        step.phases()
        begin_again(step, before)


def begin_again(step: TransformerStep, weights: Sequence[Tensor]) -> None:
    """As if no step had been made since those weights, where all tensors lie: a graph has their
    addresses."""
    import torch

    from stepscope.optim.fused import MASTER

    with torch.no_grad():
        for parameter, held in zip(step.model.parameters(), weights, strict=True):
            parameter.copy_(held)
        for owner, state in step.optimizer.state.items():
            for name, tensor in state.items():
                if name == MASTER:
                    tensor.copy_(owner)
                else:
                    tensor.zero_()
    step.follow_weights()
