"""The subject of a measurement: a step that is built and ready for the instruments.

`Subject` is any step that consists of phases. `TrainingStep` is the step of a model with an
optimizer and has what its two subclasses share; `factory.make_step` builds one. Loads without
torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stepscope.acceleration.changes import compile_own
from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.model.config import precision
from stepscope.training.case import CaseSkipped
from stepscope.training.flags import GRAPHS_OF_TORCH

if TYPE_CHECKING:
    import torch

    from stepscope.acceleration.fused_attention import FusedAttention
    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.records.schema import Quantity


class Subject(ABC):
    """A repeatable step: its phases, and what to free between two steps."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """The parts of a step, in order."""

    @abstractmethod
    def reset(self) -> None:
        """Free what the last step left; never part of a sample."""

    def run(self) -> None:
        """Run a full step, starting with a reset."""
        self.reset()
        self.run_phases()

    def run_phases(self) -> None:
        """Run a full step, for a caller that resets outside the measurement."""
        run_in_order(self.phases())


def run_in_order(phases: Iterable[Phase]) -> None:
    for phase in phases:
        phase.run()


class TrainingStep(Subject):
    """Model, optimizer and batch, with forward, backward and update as phases."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, device: Device, dtype: str, mode: Mode, *, seed: int = 0) -> None:
        import torch

        self.device = device
        self.mode: Mode = mode
        self._precision = precision(dtype)
        torch.manual_seed(seed)
        self.set_matmul_precision()
        # Loss scaling keeps float16 gradients from underflowing; other dtypes do not need it. Its
        # step reads back whether a gradient overflowed, so the CPU waits, as in real training.
        scaled = self._precision.compute == "float16"
        self.scaler = torch.amp.GradScaler(device.kind, enabled=scaled)
        self.loss: torch.Tensor | None = None
        self._replayed_by_torch = False

    @property
    @abstractmethod
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the batch."""

    @abstractmethod
    def quantities(self) -> tuple[Quantity, ...]:
        """Size and FLOPs of the step. May run a step: read peaks first."""

    @abstractmethod
    def token_count(self) -> int | None:
        """Tokens of a batch; None if its data are not tokens."""

    @abstractmethod
    def _forward(self) -> None:
        """Set `loss`, or the logits from which the loss phase computes it."""

    def set_matmul_precision(self) -> None:
        """Set the precision of float32 matmuls: a global that another step may have changed."""
        import torch

        fast = self._precision.compute == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")

    def compile_model(self, how: str, mode: str, attention: FusedAttention | None = None) -> None:
        if how == "no":
            return
        if not compile_own(self.model, how, attention, mode):
            raise CaseSkipped("the model has no ModuleList of blocks to compile")
        self._replayed_by_torch = mode in GRAPHS_OF_TORCH

    def named_parts(self) -> AbstractContextManager[Any]:
        """For a trace: ranges around the parts of a model that has no ranges."""
        return nullcontext()

    def phases(self) -> tuple[Phase, ...]:
        return self.eager_phases()

    def eager_phases(self) -> tuple[Phase, ...]:
        """The phases of the step's mode, each launched from the CPU."""
        from stepscope.measure.timer import Phase

        backward = (*self._loss_phases(), Phase("backward", self._backward))
        parts = (Phase("forward", self._forward),), backward, (Phase("optimizer", self._optimize),)
        return sum(parts[: 1 + MODES.index(self.mode)], ())

    def passes(self) -> tuple[Phase, ...]:
        """All phases before the optimizer."""
        return tuple(phase for phase in self.eager_phases() if phase.name != "optimizer")

    def reset(self) -> None:
        self.loss = None
        if self.mode == "forward-backward":
            self.optimizer.zero_grad(set_to_none=True)

    def gradients_missing(self) -> int:
        """Number of trainable parameters that a backward pass does not reach."""
        self.reset()
        run_in_order(self.passes())
        missing = self.without_gradient()
        self.optimizer.zero_grad(set_to_none=True)
        self.reset()
        return missing

    def without_gradient(self) -> int:
        """Number of trainable parameters that the last backward did not reach."""
        return sum(p.requires_grad and p.grad is None for p in self.model.parameters())

    def _loss_phases(self) -> tuple[Phase, ...]:
        """The loss phase; empty where the forward pass computes the loss."""
        return ()

    def _mark_graph_step(self) -> None:
        if self._replayed_by_torch:
            import torch

            # CUDA graphs of torch.compile may overwrite the outputs of the last step from here on.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _autocast(self) -> AbstractContextManager[Any]:
        import torch

        if not self._precision.autocast:
            return nullcontext()
        return torch.autocast(self.device.kind, getattr(torch, self._precision.compute))

    def _around_backward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _backward(self) -> None:
        from stepscope.torch_tools.ranges import named

        assert self.loss is not None
        with named("backward"), self._around_backward():
            self.scaler.scale(self.loss).backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        from stepscope.torch_tools.ranges import named

        with named("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
