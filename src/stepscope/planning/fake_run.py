"""A run of a training step on fake tensors, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from stepscope.acceleration.losses import loss_of, without_cache
from stepscope.acceleration.micro_batches import micro_batches
from stepscope.planning.cuda_operators import (
    CudaDtypes,
    CudaOperators,
    InPlaceSums,
    use_cuda_defaults,
)
from stepscope.planning.fake_step import Fakes
from stepscope.planning.simulated_bytes import WORKSPACE, PredictedLedger
from stepscope.records.memory import INPUTS, PhasePeak, kind_of
from stepscope.report.format import bytes_

SIMULATED = 2
"""Micro-batches of a step that are run."""
LossFunction = Callable[[nn.Module, Any], Tensor]


class StepOptions(NamedTuple):
    """Arguments of `TrainStep` that a step on fake tensors depends on."""

    loss_fn: LossFunction | None = None
    dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    micro_batches: int = 1
    """Parts of the batch whose gradients are added up before the update."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Memory of the second step of a training, which has the state of the optimizer."""

    phases: tuple[PhasePeak, ...]
    """Bytes at the peak of forward, backward and optimizer, by line."""
    reserved: int
    """Bytes that the caching allocator has reserved."""
    assumed: tuple[str, ...] = ()
    """Lines of code that read a value which is not known; it was taken as zero."""
    is_estimate: bool = False
    """Whether kernels of the compiler were assumed."""

    @property
    def peak(self) -> PhasePeak:
        return max(self.phases, key=lambda phase: phase.allocated)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by kind, the largest first."""
        sizes: dict[str, int] = {}
        for line, size in self.peak.lines.items():
            sizes[kind_of(line)] = sizes.get(kind_of(line), 0) + size
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        peak = self.peak
        word = "estimated" if self.is_estimate else "predicted"
        lines = [f"{word} peak: {bytes_(peak.allocated, 4)}, in the {peak.phase} phase"]
        lines += [f"{bytes_(size, 4):>12}  {kind}" for kind, size in self.kinds.items() if size]
        lines += [f"a value was read at {line} and taken as zero" for line in self.assumed]
        return "\n".join(lines)


def predict_fake(
    fakes: Fakes,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    *,
    steps: int = 2,
    between: Callable[[], None] = lambda: None,
) -> MemoryPrediction:
    """Predict the memory of a step of fake tensors, within `fakes.active()`. The first of two steps
    creates the state of the optimizer. `between` is called at the start of each phase."""
    use_cuda_defaults(optimizer)
    ledger = PredictedLedger()
    ledger.count((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), INPUTS)
    for _ in range(steps):
        ledger.forget_peaks()
        with CudaDtypes(), CudaOperators(), ledger.watching(model, optimizer), InPlaceSums():

            def begin(phase: str) -> None:
                between()
                ledger.begin(phase)

            run_step(model, optimizer, batch, options, begin)
            ledger.end()
    return MemoryPrediction(
        tuple(ledger.peaks), ledger.blocks.reserved + WORKSPACE, tuple(fakes.values.assumed)
    )


def run_step(
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    options: StepOptions,
    begin: Callable[[str], None],
) -> None:
    """Run a step of fake tensors, or a part without update; `begin` is called at the start of each
    phase."""
    dtype, loss_fn = options.dtype, options.loss_fn
    # The second part has the gradients of the first one, as all later ones have.
    for part in micro_batches(batch, options.micro_batches)[:SIMULATED]:
        begin("forward")
        autocast = torch.autocast("cpu", dtype) if dtype is not None else nullcontext()
        with without_cache(model), autocast:
            loss = loss_of(model, part) if loss_fn is None else loss_fn(model, part)
        if options.micro_batches > 1:
            loss = loss / options.micro_batches
        begin("backward")
        run_backward(loss)
        del loss
    begin("optimizer")
    if options.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm, foreach=True)
    if optimizer is not None:
        optimizer.step()
    (model if optimizer is None else optimizer).zero_grad()


def run_backward(loss: Tensor) -> None:
    """`loss.backward()` with the modes of torch functions, which apply to what a checkpointed
    segment computes again."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
