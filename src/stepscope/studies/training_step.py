"""A training step that is built: model, optimizer and data, with its phases ready for a timer.

Loads without torch; building imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stepscope.attention.registry import implementation
from stepscope.model import cost
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.records.schema import Quantity
from stepscope.studies.base import CaseSkipped
from stepscope.studies.host_memory import refuse_beyond_host_memory
from stepscope.studies.workload import GRAPHS_OF_TORCH, Workload
from stepscope.studies.workload_flags import WITHIN_BACKWARD

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase
    from stepscope.studies.captured import CapturedStep


class TrainingStep:
    """A built model with its step as phases, ready for a timer.

    With `shares` it works on the weights and moments of another step of the same model. A workload
    with a model of somebody else gets an `OwnTrainingStep`.
    """

    def __new__(cls, workload: Workload, *_: Any, **__: Any) -> TrainingStep:
        if not workload.own:
            return super().__new__(cls)
        from stepscope.studies.own.training import OwnTrainingStep

        return super().__new__(OwnTrainingStep)

    def __getnewargs__(self) -> tuple[Workload]:
        """For copies of a step."""
        return (self.workload,)

    def __init__(
        self, workload: Workload, device: Device, *, seed: int = 0,
        shares: TrainingStep | None = None,
    ) -> None:  # fmt: skip
        import torch

        from stepscope.model.transformer import TransformerLM
        from stepscope.studies.shared_weights import adopt_moments, adopt_weights
        from stepscope.studies.step_parts import compile_model, make_optimizer

        self._refuse_what_cannot_fit(workload, device)
        self.workload = workload
        form = precision(workload.dtype)
        if form.compute == "float16" and workload.optimizer in WITHIN_BACKWARD:
            raise CaseSkipped("float16's loss scaling sees all gradients before one may be used")
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high" if form.compute == "tf32" else "highest")
        self.model: torch.nn.Module = TransformerLM(
            workload.model(),
            attention=implementation(workload.attention).function,
            device=device.torch_device if shares is None else "meta",
            dtype=getattr(torch, form.weights),
            fused=workload.fused,
            checkpoint=workload.stretches(),
            joined=workload.joined,
            keep=workload.kept(),
            narrow_stream=form.narrow_stream,
        )
        if shares is not None:
            adopt_weights(self.model, shares.model)
        compile_model(self.model, workload.compile, workload.compile_mode)
        # Scaling keeps float16 gradients from vanishing; the other formats do not need it. Its step
        # reads back whether a gradient overflowed, so there the host waits, as in real training.
        self.scaler = torch.amp.GradScaler(device.kind, enabled=form.compute == "float16")
        self.optimizer = make_optimizer(
            workload.optimizer, self.model, master=form.master, capturable=workload.graph
        )
        if shares is not None:
            adopt_moments(self.optimizer, shares.optimizer)
        shape = (workload.batch, workload.context)
        vocab = workload.model().vocab
        self.tokens = torch.randint(vocab, shape, device=device.torch_device)
        self.targets = torch.randint(vocab, shape, device=device.torch_device)
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: (
            torch.autocast(device.kind, getattr(torch, form.compute))
            if form.autocast
            else nullcontext()
        )
        self.logits: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self._device = device
        self._captured: CapturedStep | None = None

    @staticmethod
    def _refuse_what_cannot_fit(workload: Workload, device: Device) -> None:
        needed = cost.minimum_bytes(
            workload.model(), workload.batch, workload.context, precision(workload.dtype),
            workload.mode, workload.attention, device.kind,
            checkpointed=workload.checkpoint != NONE,
        )  # fmt: skip
        if workload.fuses_loss:
            # Counted above as if all logits were there.
            needed -= workload.batch * workload.context * workload.model().vocab * 4
        refuse_beyond_host_memory(needed, device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.targets

    def quantities(self) -> tuple[Quantity, ...]:
        """What the step is made of, before it is measured."""
        return self.workload.quantities()

    def named_parts(self) -> AbstractContextManager[Any]:
        """For a trace: ranges around the parts of a model that has none of its own."""
        return nullcontext()

    def phases(self) -> tuple[Phase, ...]:
        """One after the other they are a step; a captured step has one."""
        from stepscope.measure.timer import Phase

        if not self.workload.graph:
            return self.eager_phases()
        if self._captured is None:
            from stepscope.studies.captured import CapturedStep

            self._captured = CapturedStep(self, self._device)
        return (Phase("replay", self._captured.replay),)

    def eager_phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        forward = Phase("forward", self._forward)
        loss = () if self.workload.fuses_loss else (Phase("loss", self._loss),)
        backward = (*loss, Phase("backward", self._backward))
        return {
            "forward": (forward,),
            "forward-backward": (forward, *backward),
            "train-step": (forward, *backward, Phase("optimizer", self._optimize)),
        }[self.workload.mode]

    def reset(self) -> None:
        """Let go of what the step before left, outside of any sample."""
        if self._captured is not None:
            # What a graph reads and writes belongs to it.
            return
        self.logits = self.loss = None
        if self.workload.mode == "forward-backward":
            self.optimizer.zero_grad(set_to_none=True)

    def forget_graph(self) -> None:
        """Keep the last step's values without what autograd knows of how they came about."""
        self.logits = None if self.logits is None else self.logits.detach()
        self.loss = None if self.loss is None else self.loss.detach()

    def gradients_missing(self) -> int:
        """Parameters that a backward does not reach."""
        if self._captured is not None:
            return self._captured.gradients_missing
        self.reset()
        self._forward()
        if not self.workload.fuses_loss:
            self._loss()
        self._backward()
        missing = self.without_gradient()
        self.optimizer.zero_grad(set_to_none=True)
        self.reset()
        return missing

    def without_gradient(self) -> int:
        """Parameters that the backward before did not reach."""
        reached = getattr(self.optimizer, "updated", None)
        if reached is not None and self.workload.mode == "train-step":
            # It lets go of a gradient once it has used it.
            self.optimizer.step()
            return sum(1 for _ in self.model.parameters()) - int(reached)
        return sum(p.grad is None for p in self.model.parameters())

    def _forward(self) -> None:
        from stepscope.ranges import named

        self._mark_graph_step()
        with named("forward"), self._autocast(), self._products():
            if self.workload.fuses_loss:
                self.loss = self.model(self.tokens, self.targets)
            else:
                self.logits = self.model(self.tokens)

    def _mark_graph_step(self) -> None:
        if self.workload.compile != "no" and self.workload.compile_mode in GRAPHS_OF_TORCH:
            import torch

            # What the step before left may be overwritten now.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _loss(self) -> None:
        from stepscope.model.loss import cross_entropy

        assert self.logits is not None
        self.loss = cross_entropy(self.logits, self.targets)

    def _backward(self) -> None:
        from stepscope.ranges import named

        assert self.loss is not None
        with named("backward"), self._listening(), self._products():
            self.scaler.scale(self.loss).backward()  # type: ignore[no-untyped-call]

    def _products(self) -> AbstractContextManager[None]:
        if not self.workload.searched:
            return nullcontext()
        from stepscope.model.kernels.search import searched_products

        return searched_products()

    def _listening(self) -> AbstractContextManager[None]:
        """Where the optimizer works in the backward, it does in this step's alone."""
        attached = getattr(self.optimizer, "attached", None)
        if attached is None or self.workload.mode != "train-step":
            return nullcontext()
        made: AbstractContextManager[None] = attached()
        return made

    def follow_weights(self) -> None:
        """Take over what another step did to shared weights; a step alone has nothing to follow."""
        self.model.copies.refresh()  # type: ignore[union-attr,operator]

    def _optimize(self) -> None:
        from stepscope.ranges import named

        with named("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
