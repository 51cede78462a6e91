"""A training step of somebody else's model, for the studies of training steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.records.schema import Quantity, quantities
from stepscope.studies.base import CaseSkipped
from stepscope.studies.own.building import build, call, loss_of
from stepscope.studies.own.changing import blocks_of, checkpoint_blocks
from stepscope.studies.training_step import TrainingStep
from stepscope.studies.workload import Workload

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase


class OwnTrainingStep(TrainingStep):
    """The loss is part of the forward: a model may return it."""

    def __init__(
        self, workload: Workload, device: Device, *, seed: int = 0,
        shares: TrainingStep | None = None,
    ) -> None:  # fmt: skip
        import torch

        from stepscope.studies.shared_weights import adopt_moments, adopt_weights
        from stepscope.studies.step_parts import make_optimizer

        self.workload = workload
        form = precision(workload.dtype)
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high" if form.compute == "tf32" else "highest")
        built = build(workload.own)
        self._built = built
        self.model = built.model.to(device.torch_device, getattr(torch, form.weights))
        self.model.train()
        if shares is not None:
            adopt_weights(self.model, shares.model)
        if workload.checkpoint != NONE and not checkpoint_blocks(self.model):
            raise CaseSkipped(f"{workload.own} has no ModuleList of blocks to checkpoint")
        self._compile()
        self.scaler = torch.amp.GradScaler(device.kind, enabled=form.compute == "float16")
        self.optimizer = make_optimizer(workload.optimizer, self.model)
        if shares is not None:
            adopt_moments(self.optimizer, shares.optimizer)
        self.batch = built.make_batch(workload.batch, device.torch_device)
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: (
            torch.autocast(device.kind, getattr(torch, form.compute))
            if form.autocast
            else nullcontext()
        )
        self.logits = self.loss = None
        self._device = device
        self._captured = None

    def _compile(self) -> None:
        how, mode = self.workload.compile, self.workload.compile_mode
        if how == "no":
            return
        blocks = blocks_of(self.model)
        if how == "block" and not blocks:
            raise CaseSkipped(f"{self.workload.own} has no ModuleList of blocks to compile")
        for module in blocks if how == "block" else [self.model]:
            module.compile(mode=mode)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        import torch
        from torch.utils._pytree import tree_leaves

        return tuple(one for one in tree_leaves(self.batch) if isinstance(one, torch.Tensor))

    def named_parts(self) -> AbstractContextManager[Any]:
        from stepscope.measure.modules import ModuleRanges

        return ModuleRanges([self.model]).entered()

    def quantities(self) -> tuple[Quantity, ...]:
        """FLOPs are counted at the dispatcher in one eager step of a copy without compiling."""
        import msgspec

        from stepscope.measure.flops import CountingFlops

        found = {
            "parameters": (sum(p.numel() for p in self.model.parameters()), "parameters"),
            "samples": (self.workload.batch, "samples"),
            "blocks": (len(blocks_of(self.model)), "blocks"),
        }
        counting = CountingFlops()
        # Nothing that a checkpointed stretch runs again counts, and compiled kernels are not seen.
        plain = msgspec.structs.replace(self.workload, compile="no", checkpoint=NONE)
        step = TrainingStep(plain, self._device)
        with counting:
            for phase in step.eager_phases():
                phase.run()
        found["flops"] = (counting.counted.total, "FLOP")
        return quantities(found)

    def eager_phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        phases = (
            Phase("forward", self._forward),
            Phase("backward", self._backward),
            Phase("optimizer", self._optimize),
        )
        return phases[: {"forward": 1, "forward-backward": 2, "train-step": 3}[self.workload.mode]]

    def gradients_missing(self) -> int:
        self.reset()
        self._forward()
        self._backward()
        missing = sum(p.requires_grad and p.grad is None for p in self.model.parameters())
        self.optimizer.zero_grad(set_to_none=True)
        self.reset()
        return missing

    def _forward(self) -> None:
        from stepscope.ranges import named

        self._mark_graph_step()
        with named("forward"), self._autocast():
            output = call(self.model, self.batch)
            self.loss = loss_of(output, self.batch, self._built.loss, self.workload.own)
