"""The training step of a user's model, for every study that accepts one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.acceleration.changes import blocks_of, checkpoint_blocks
from stepscope.analysis.predict.plan import Mode
from stepscope.model.config import precision
from stepscope.records.schema import Quantity, quantities
from stepscope.training.building import build, call, loss_of
from stepscope.training.case import CaseSkipped
from stepscope.training.subject import TrainingStep

if TYPE_CHECKING:
    import torch

    from stepscope.acceleration.fused_attention import FusedAttention
    from stepscope.acceleration.report import Report
    from stepscope.measure.device import Device


class UserModel(NamedTuple):
    """A user's model and its training settings."""

    name: str
    """`package.module:function` that builds the model."""
    batch: int
    dtype: str
    optimizer: str
    compile: str = "no"
    compile_mode: str = "default"
    fuse_attention: bool = False
    """Replace naive attention by one fused kernel."""
    checkpoint: bool = False
    """Checkpoint every entry of its ModuleLists."""
    mode: Mode = "train-step"


class UserStep(TrainingStep):
    """Training step of a user's model, eager until `compile` is called.

    The forward pass includes the loss, which the model may return itself.
    """

    def __init__(
        self, user: UserModel, device: Device, *, seed: int = 0, shares: TrainingStep | None = None
    ) -> None:
        import torch

        from stepscope.training.parts import make_optimizer
        from stepscope.training.shared_weights import adopt_moments, adopt_weights

        super().__init__(device, user.dtype, user.mode, seed=seed)
        self._user = user
        self._built = build(user.name)
        dtype = getattr(torch, precision(user.dtype).weights)
        self.model = self._built.model.to(device.torch_device, dtype)
        self.model.train()
        if shares is not None:
            adopt_weights(self.model, shares.model)
        if user.checkpoint and not checkpoint_blocks(self.model):
            raise CaseSkipped(f"the model of {user.name} has no ModuleList of blocks to checkpoint")
        self.optimizer = make_optimizer(user.optimizer, self.model)
        if shares is not None:
            adopt_moments(self.optimizer, shares.optimizer)
        self.next_batch()
        self._acceleration = self._use_fp8() if precision(user.dtype).fp8 else None

    def _use_fp8(self) -> Report:
        """Accelerate the model with FP8 linear layers. It is compared with the original now; a step
        in which every layer stays in bfloat16 is skipped."""
        from stepscope.acceleration.accelerate import accelerate
        from stepscope.acceleration.choice import PASSES
        from stepscope.kernels.fp8.recipe import unavailable

        if reason := unavailable(self.device.torch_device):
            raise CaseSkipped(reason)
        report = accelerate(
            self.model, self.optimizer, sample=self.batch, dtype="fp8", compile={"form": PASSES}
        )
        assert report.fp8 is not None
        reasons = list(report.fp8.decisions.values())
        if None not in reasons:
            why = reasons[0] if reasons else "the model calls no linear layer"
            raise CaseSkipped(f"no layer would run in FP8: {why}")
        return report

    def compile(self) -> None:
        """Compile the model and fuse its attention, according to its settings."""
        attention = self._fused_attention() if self._user.fuse_attention else None
        self.compile_model(self._user.compile, self._user.compile_mode, attention)
        if attention is not None and self._user.compile == "no":
            attention.replace()

    def _fused_attention(self) -> FusedAttention:
        """Find the attention of the model in one call, which draws no random numbers of a step."""
        import torch

        from stepscope.acceleration.fused_attention import FusedAttention

        attention = FusedAttention()
        device = self.device.torch_device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            self._autocast(),
            attention.watched(),
        ):
            call(self.model, self.batch)
        return attention

    def next_batch(self) -> None:
        """Draw another batch of the same size."""
        self.batch = self._built.make_batch(self._user.batch, self.device.torch_device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        import torch
        from torch.utils._pytree import tree_leaves

        return tuple(
            tensor for tensor in tree_leaves(self.batch) if isinstance(tensor, torch.Tensor)
        )

    def token_count(self) -> int | None:
        """Number of elements of the first two-dimensional integer input, or None."""
        sequences = (t for t in self.inputs if t.dim() == 2 and not t.is_floating_point())
        return next((tensor.numel() for tensor in sequences), None)

    def named_parts(self) -> AbstractContextManager[Any]:
        from stepscope.measure.modules import ModuleRanges

        return ModuleRanges([self.model]).entered()

    def quantities(self) -> tuple[Quantity, ...]:
        values = {
            "parameters": (sum(p.numel() for p in self.model.parameters()), "parameters"),
            "samples": (self._user.batch, "samples"),
            "blocks": (len(blocks_of(self.model)), "blocks"),
            "flops": (self.flops, "FLOP"),
        }
        return quantities(values)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one eager step, counted at the dispatcher, which does not see compiled kernels
        nor all of the fused ones."""
        import torch

        from stepscope.measure.flops import CountingFlops

        counting = CountingFlops()
        if self._acceleration is not None:
            self._acceleration.undo()
        with torch.compiler.set_stance("force_eager"), counting:
            self.run()
        self.reset()
        if self._acceleration is not None:
            self._acceleration = self._use_fp8()
        return counting.counted.total

    def _forward(self) -> None:
        from stepscope.torch_tools.ranges import named

        self._mark_graph_step()
        with named("forward"), self._autocast():
            output = call(self.model, self.batch)
            self.loss = loss_of(output, self.batch, self._built.loss, self._user.name)
