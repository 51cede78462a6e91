"""A step of a program's own loop, from the first call of its model to `backward()`, on fake
tensors."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.train_step import without_cache
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_step import Fakes
from stepscope.planning.loss_tape import LossTape
from stepscope.planning.predict import StepOptions, run_backward


class FakeLoop:
    """Runs the code of a loop on fake tensors: in place of its model, or a part of it, `call` is
    called, and `end` with the loss. No memory of a device is needed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.fakes = Fakes(line_of_code)
        self._real = {id(part): name for name, part in model.named_modules(remove_duplicate=False)}
        with self.fakes.active():
            self.model, self.optimizer = self.fakes.copy(model, optimizer)
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        for name, parameter in model.named_parameters():
            self.fakes.replace(parameter, self.model.get_parameter(name))
        self._tape = LossTape(self._names, self.fakes.converted)
        self._dtype: torch.dtype | None = None
        self._active = ExitStack()
        self.began = False
        """Whether the model was called."""

    def has(self, module: nn.Module) -> bool:
        return id(module) in self._real

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the copy of a module. The loop runs on fake tensors from the first call to `end`."""
        device = next((p.device.type for p in module.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self._dtype = torch.get_autocast_dtype(device)
        name = self._real[id(module)]
        part = self.model.get_submodule(name)
        hooks = [one.register_forward_pre_hook(self._entered) for one in part.modules()]
        try:
            if not self.began:
                self.began = True
                self._active.enter_context(self.fakes.active())
                self._active.enter_context(self._tape)
            with without_cache(self.model):
                return self._tape.call(name, part, args, kwargs)
        except BaseException:
            self._active.close()
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def end(self, loss: Any) -> None:
        """End the step, in place of its backward pass."""
        self._active.close()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("the backward pass does not start from one number", "use one loss")
        if loss.requires_grad:
            with self.fakes.active():
                # What is saved for it is no variable of the loop.
                run_backward(loss)
        self.model.zero_grad()
        self._tape.end(loss)

    @property
    def batch(self) -> list[Tensor]:
        return self._tape.given

    @property
    def options(self) -> StepOptions:
        """The step as that of a `TrainStep`, with `batch` for its batch."""

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            with without_cache(model):
                return self._tape.replayed(model, batch)

        return StepOptions(loss, self._dtype)

    def _entered(self, *_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            # Libraries enter autocast within the model.
            self._dtype = torch.get_autocast_dtype("cpu")
