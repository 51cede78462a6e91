"""A run of a training step on fake tensors, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

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


class FakeStep(NamedTuple):
    """A training step of fake tensors, to be run within `fakes.active()`."""

    fakes: Fakes
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    options: StepOptions = StepOptions()

    @classmethod
    def of(
        cls, fakes: Fakes, model: nn.Module, optimizer: Optimizer, batch: Any, options: StepOptions
    ) -> Self:
        """Return a copy of a step."""
        return cls(fakes, *fakes.copy(model, optimizer), fakes.batch(batch), options)


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
    resident: int = 0
    """Bytes before the step."""
    is_graph: bool = False
    """Whether the step is a CUDA graph, whose pool has all but what is resident."""

    @property
    def peak(self) -> PhasePeak:
        return max(self.phases, key=lambda phase: phase.allocated)

    @property
    def graph_pool(self) -> int:
        """Bytes in the pool of the CUDA graph, which other work cannot use between steps."""
        return self.peak.allocated - self.resident if self.is_graph else 0

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
        if self.is_graph:
            lines.append(f"{bytes_(self.graph_pool, 4):>12}  of it in the pool of the CUDA graph")
        lines += [f"a value was read at {line} and taken as zero" for line in self.assumed]
        return "\n".join(lines)


def predict_fake(
    step: FakeStep,
    *,
    steps: int = 2,
    counted: Mapping[str, Iterable[Tensor]] | None = None,
    between: Callable[[str], None] = lambda _: None,
) -> MemoryPrediction:
    """Predict the memory of a step. The first of two steps creates the state of the optimizer.
    `between` is called at the start of each phase; `counted` has tensors besides those of model,
    optimizer and batch, by line."""
    use_cuda_defaults(step.optimizer)
    ledger, resident = PredictedLedger(), 0
    inputs = [leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, Tensor)]
    for _ in range(steps):
        ledger.forget_peaks()
        resident = 0
        watching = ledger.watching(step.model, step.optimizer)
        with CudaDtypes(), CudaOperators(), watching, InPlaceSums():
            for line, tensors in {INPUTS: inputs, **(counted or {})}.items():
                ledger.aside(ledger.count, tensors, line)

            def begin(phase: str) -> None:
                nonlocal resident
                between(phase)
                resident = resident or ledger.blocks.in_use + WORKSPACE
                ledger.begin(phase)

            run_step(step, begin)
            ledger.end()
    return MemoryPrediction(
        tuple(ledger.peaks),
        ledger.blocks.reserved + WORKSPACE,
        tuple(step.fakes.values.assumed),
        resident=resident,
    )


def run_step(step: FakeStep, begin: Callable[[str], None], *, update: bool = True) -> None:
    """Run a step; `begin` is called at the start of each phase. Without an update it leaves the
    gradients."""
    _, model, optimizer, batch, options = step
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
    if update:
        optimizer.step()
        optimizer.zero_grad()


def run_backward(loss: Tensor) -> None:
    """`loss.backward()` with the modes of torch functions, which apply to what a checkpointed
    segment computes again."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip
