"""`stepscope.predict`: memory of a training step of any model, from a run on fake tensors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.train_step_arguments import require_valid
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_run import FakeStep, LossFunction, MemoryPrediction, StepOptions
from stepscope.planning.fake_step import Fakes
from stepscope.planning.forms import Compile, Form, predict_step
from stepscope.planning.ranks import Ranks, Sharding


def predict(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    dtype: torch.dtype | Literal["fp8"] | None = None,
    max_grad_norm: float | None = None,
    compile: Compile | None = None,
    ranks: int = 1,
    sharding: Sharding = "none",
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
    are taken as one kernel. "accelerate" is that of `accelerate(model, optimizer, compile=True)`
    and `TrainStep` as a CUDA graph, compiled with all passes; `dtype="fp8"` then runs its linear
    layers in FP8. `ranks` are data-parallel, each with a batch like this: under DDP, or
    with `sharding="full"` under FSDP2, `fully_shard` on each repeated block and on the model.
    """
    form = Form(compile, Ranks(ranks, sharding), dtype == "fp8")
    dtype = torch.bfloat16 if dtype == "fp8" else dtype
    require_valid({}, loss_fn, optimizer, max_grad_norm, dtype, None)
    form.require_valid()
    fakes = Fakes(line_of_code)
    with fakes.active():
        options = StepOptions(loss_fn, dtype, max_grad_norm)
        return predict_step(FakeStep.of(fakes, model, optimizer, batch, options), form)
