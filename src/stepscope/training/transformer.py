"""The training step of the built-in Transformer. Loads without torch; building imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from stepscope.analysis.predict.plan import WITHIN_BACKWARD
from stepscope.model.config import precision
from stepscope.records.schema import Quantity
from stepscope.training.case import CaseSkipped
from stepscope.training.host_memory import refuse_beyond_host_memory
from stepscope.training.plans import prediction_for
from stepscope.training.subject import TrainingStep
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.training.captured import CapturedStep


class TransformerStep(TrainingStep):
    """A step of `TransformerLM`; with `shares` it uses the weights and moments of another step."""

    def __init__(
        self,
        workload: Workload,
        device: Device,
        *,
        seed: int = 0,
        shares: TrainingStep | None = None,
    ) -> None:
        import torch

        from stepscope.attention.api import attention_with
        from stepscope.model.transformer import TransformerLM
        from stepscope.training.parts import make_optimizer
        from stepscope.training.shared_weights import adopt_moments, adopt_weights

        self._refuse_what_cannot_fit(workload, device)
        self.workload = workload
        policy = precision(workload.dtype)
        if policy.compute == "float16" and workload.optimizer in WITHIN_BACKWARD:
            raise CaseSkipped("float16 loss scaling needs all gradients before any of them is used")
        super().__init__(device, workload.dtype, workload.mode, seed=seed)
        config = workload.model()
        self.model = TransformerLM(
            config,
            attention=attention_with(workload.attention),
            device=device.torch_device if shares is None else "meta",
            dtype=getattr(torch, policy.weights),
            fused=workload.fused,
            checkpoint=workload.segment_sizes(),
            fused_projections=workload.fused_projections,
            activation_policy=workload.kept(),
            narrow_stream=policy.narrow_stream,
        )
        if shares is not None:
            adopt_weights(self.model, shares.model)
        if policy.fp8:
            self._use_fp8()
        self.compile_model(workload.compile, workload.compile_mode)
        self.optimizer = make_optimizer(
            workload.optimizer, self.model, master=policy.master, capturable=workload.graph
        )
        if shares is not None:
            adopt_moments(self.optimizer, shares.optimizer)
        shape = (workload.batch, workload.context)
        self.tokens = torch.randint(config.vocab, shape, device=device.torch_device)
        self.targets = torch.randint(config.vocab, shape, device=device.torch_device)
        self.logits: torch.Tensor | None = None
        self._captured: CapturedStep | None = None

    def _use_fp8(self) -> None:
        """Let the model choose its FP8 layers. Skip a step in which every layer would stay in
        bfloat16: its time would be that of another dtype."""
        from torch import nn

        from stepscope.kernels.fp8.layers import Fp8Layers
        from stepscope.kernels.fp8.recipe import unavailable

        if reason := unavailable(self.device.torch_device):
            raise CaseSkipped(reason)
        layers = Fp8Layers()
        self.model.set_fp8(layers)  # type: ignore[operator]
        groups: dict[torch.Size, list[torch.Tensor]] = {}
        for module in self.model.blocks[0].modules():  # type: ignore[index,union-attr]
            if isinstance(module, nn.Linear):
                groups.setdefault(module.weight.shape, []).append(module.weight)
        tokens = self.workload.batch * self.workload.context
        reasons = [layers.refused(tuple(weights), tokens) for weights in groups.values()]
        if None not in reasons:
            raise CaseSkipped(f"no layer would run in FP8: {reasons[0]}")

    @staticmethod
    def _refuse_what_cannot_fit(workload: Workload, device: Device) -> None:
        if device.kind == "cpu":
            eager = msgspec.structs.replace(workload, compile="no", compile_mode="default")
            predicted = prediction_for(eager, "cpu")
            if predicted is not None:
                refuse_beyond_host_memory(predicted.peak.allocated, device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.targets

    def quantities(self) -> tuple[Quantity, ...]:
        return self.workload.quantities()

    def token_count(self) -> int:
        return self.workload.batch * self.workload.context

    def phases(self) -> tuple[Phase, ...]:
        """The phases of the step; a captured step has a single one."""
        from stepscope.measure.timer import Phase

        if not self.workload.graph:
            return self.eager_phases()
        if self._captured is None:
            from stepscope.training.captured import CapturedStep

            self._captured = CapturedStep(self, self.workload)
            self._forget_graph()
        return (Phase("replay", self._captured.replay),)

    def reset(self) -> None:
        # A graph owns the tensors that it reads and writes.
        if self._captured is None:
            self.logits = None
            super().reset()

    def _forget_graph(self) -> None:
        """Detach the last step's outputs from their autograd graph, keeping their values."""
        self.logits = None if self.logits is None else self.logits.detach()
        self.loss = None if self.loss is None else self.loss.detach()

    def gradients_missing(self) -> int:
        if self._captured is not None:
            return self._captured.gradients_missing
        return super().gradients_missing()

    def without_gradient(self) -> int:
        reached = getattr(self.optimizer, "updated", None)
        if reached is not None and self.mode == "train-step":
            # The optimizer frees a gradient once it has used it.
            self.optimizer.step()
            return sum(1 for _ in self.model.parameters()) - int(reached)
        # Nothing here is frozen, so every parameter without a gradient counts.
        return sum(p.grad is None for p in self.model.parameters())

    def _forward(self) -> None:
        from stepscope.torch_tools.ranges import named

        self._mark_graph_step()
        with named("forward"), self._autocast(), self._autotuned():
            if self.workload.fuses_loss:
                self.loss = self.model(self.tokens, self.targets)
            else:
                self.logits = self.model(self.tokens)

    def _loss_phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        return () if self.workload.fuses_loss else (Phase("loss", self._loss),)

    def _loss(self) -> None:
        from stepscope.model.loss import cross_entropy

        assert self.logits is not None
        self.loss = cross_entropy(self.logits, self.targets)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        with self._optimizer_attached(), self._autotuned():
            yield

    def _optimizer_attached(self) -> AbstractContextManager[None]:
        """Attach an optimizer-in-backward for the duration of this step's backward."""
        attached = getattr(self.optimizer, "attached", None)
        if attached is None or self.mode != "train-step":
            return nullcontext()
        context: AbstractContextManager[None] = attached()
        return context

    def _autotuned(self) -> AbstractContextManager[None]:
        if not self.workload.autotune_gemms:
            return nullcontext()
        from stepscope.kernels.autotune import autotuned_matmuls

        return autotuned_matmuls()

    def follow_weights(self) -> None:
        """Refresh copies of shared weights after another step; no effect on a step alone."""
        self.model.copies.refresh()  # type: ignore[union-attr,operator]
