"""`stepscope.predict`: memory of a training step of any model, from a run on fake tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.train_step_arguments import require_valid
from stepscope.measure.ledger import line_of_code
from stepscope.planning.compiled_step import predict_compiled
from stepscope.planning.fake_run import LossFunction, MemoryPrediction, StepOptions, predict_fake
from stepscope.planning.fake_step import Fakes


def predict(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    compile: Literal["model", "blocks"] | None = None,
) -> MemoryPrediction:
    """Predict the memory of a training step on a GPU, without running it.

        with torch.device("meta"):
            model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        print(stepscope.predict(model, optimizer, batch, dtype=torch.bfloat16))

    `batch`, `loss_fn`, `dtype` and `max_grad_norm` are those of `TrainStep`. The step runs twice on
    fake tensors, in eager mode, with the operators of CUDA and the blocks of its caching allocator.
    The model may be on any device, also on "meta"; it is copied and does not change.

    `compile="model"` estimates the step of `torch.compile(model)`, "blocks" that of a model whose
    repeated blocks are compiled: torch's partitioner decides what is saved, and elementwise chains
    are taken as one kernel.
    """
    require_valid({}, loss_fn, optimizer, max_grad_norm, dtype, None)
    fakes = Fakes(line_of_code)
    with fakes.active():
        fake_model, fake_optimizer = fakes.copy(model, optimizer)
        step = (fake_model, fake_optimizer, fakes.batch(batch))
        options = StepOptions(loss_fn, dtype, max_grad_norm)
        if compile is not None:
            return predict_compiled(fakes, *step, options, whole=compile == "model")
        return predict_fake(fakes, *step, options)
