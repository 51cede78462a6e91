"""The training step of a model of one's own, as phases for the instruments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stepscope.model.config import precision
from stepscope.studies.base import CaseSkipped
from stepscope.studies.own import OwnCase
from stepscope.studies.own.building import Built, build, call, loss_of
from stepscope.studies.own.changing import checkpoint_blocks, compile_own, one_kernel_attention

if TYPE_CHECKING:
    import torch

    from stepscope.measure.device import Device
    from stepscope.measure.timer import Phase


class OwnStep:
    """Built once; every phase is a closure without arguments."""

    def __init__(self, case: OwnCase, device: Device, *, seed: int = 0) -> None:
        import torch

        form = precision(case.dtype)
        torch.manual_seed(seed)
        self.case = case
        self.use_format()
        self.device = device
        self.attention = one_kernel_attention() if case.attention == "fused" else None
        self.built: Built = build(case.model)
        self.model = self.built.model.to(device.torch_device, getattr(torch, form.weights))
        self.model.train()
        if case.checkpoint == "blocks" and not checkpoint_blocks(self.model):
            raise CaseSkipped(f"the model of {case.model} has no ModuleList of blocks")
        self._compiled = False
        self.optimizer = make_own_optimizer(case.optimizer, self.model)
        self.scaler = torch.amp.GradScaler(device.kind, enabled=form.compute == "float16")
        self.batch = self.built.make_batch(case.batch, device.torch_device)
        self.loss: torch.Tensor | None = None
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: (
            torch.autocast(device.kind, getattr(torch, form.compute))
            if form.autocast
            else nullcontext()
        )

    def use_format(self) -> None:
        """The format of float32 products is a setting of the whole process."""
        import torch

        fast = precision(self.case.dtype).compute == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")

    def compile(self) -> None:
        """As the case asks for it. Until then the step is eager, and its FLOPs can be counted."""
        if self.case.compile == "no":
            return
        if self.attention is not None:
            # Shows what masks its attention has, which the compiler cannot see.
            self._forward()
            self.reset()
        compile_own(self.model, self.case.compile, self.attention)
        self._compiled = True

    def phases(self) -> tuple[Phase, ...]:
        from stepscope.measure.timer import Phase

        return (
            Phase("forward", self._forward),
            Phase("backward", self._backward),
            Phase("optimizer", self._optimize),
        )

    def run(self) -> None:
        for phase in self.phases():
            phase.run()

    def tokens(self) -> int | None:
        """Positions of its sequences: of the first input with numbers of tokens in two dimensions;
        None where there is none."""
        import torch
        from torch.utils._pytree import tree_leaves

        for one in tree_leaves(self.batch):
            if isinstance(one, torch.Tensor) and one.dim() == 2 and not one.is_floating_point():
                return one.numel()
        return None

    def next_batch(self) -> None:
        """Other data of the same kind."""
        self.batch = self.built.make_batch(self.case.batch, self.device.torch_device)

    def reset(self) -> None:
        self.loss = None

    def _forward(self) -> None:
        from stepscope.ranges import named

        eager = None if self._compiled else self.attention
        if eager is None and self.case.compile == "graphs":
            import torch

            # What the step before left may be overwritten now.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with named("forward"), self._autocast():
            with eager or nullcontext():
                output = call(self.model, self.batch)
            self.loss = loss_of(output, self.batch, self.built.loss, self.case.model)

    def _backward(self) -> None:
        from stepscope.ranges import named

        assert self.loss is not None
        with named("backward"):
            self.scaler.scale(self.loss).backward()  # type: ignore[no-untyped-call]

    def _optimize(self) -> None:
        from stepscope.ranges import named

        with named("optimizer"):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)


def make_own_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    if name.startswith("sgd"):
        fused = name == "sgd-fused"
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=fused or None)
    ways: dict[str, dict[str, bool]] = {
        "adamw": {},
        "adamw-loop": {"foreach": False},
        "adamw-fused": {"fused": True},
    }
    return torch.optim.AdamW(parameters, lr=1e-4, **ways[name])  # type: ignore[arg-type]
