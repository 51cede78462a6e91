"""A step of a program's own loop, from the first call of its model to `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from stepscope.acceleration.losses import without_cache
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_run import StepOptions, run_backward
from stepscope.planning.fake_step import Fakes
from stepscope.planning.loss_tape import LossTape


class Loop:
    """The code of a loop: in place of its model, or a part of it, `call` is called, and `end` with
    the loss."""

    def __init__(self, model: nn.Module, parameters: Iterable[tuple[str, Tensor]], **more: Any):
        self._real = {id(part): name for name, part in model.named_modules(remove_duplicate=False)}
        self._tape = LossTape({id(p): name for name, p in parameters}, **more)
        self._active = ExitStack()
        self.dtype: torch.dtype | None = None
        """That of autocast around the model."""

    def has(self, module: nn.Module) -> bool:
        return id(module) in self._real

    @property
    def batch(self) -> list[Tensor]:
        return self._tape.given

    @property
    def loss_fn(self) -> Callable[[nn.Module, list[Tensor]], Tensor]:
        """The loss as `TrainStep` takes it, with `batch` for its batch."""

        def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
            return self._tape.replayed(model, batch)

        return loss

    def _note_autocast(self, module: nn.Module) -> None:
        device = next((p.device.type for p in module.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self.dtype = torch.get_autocast_dtype(device)


class FakeLoop(Loop):
    """Runs it on fake tensors from the first call to `end`. No memory of a device is needed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.fakes = Fakes(line_of_code)
        with self.fakes.active():
            self.model, self.optimizer = self.fakes.copy(model, optimizer)
        for name, parameter in model.named_parameters():
            self.fakes.replace(parameter, self.model.get_parameter(name))
        super().__init__(model, self.model.named_parameters(), converted=self.fakes.converted)
        self._began = False

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the copy of a module."""
        self._note_autocast(module)
        name = self._real[id(module)]
        if not self._began:
            self._began = True
            self._active.enter_context(self.fakes.active())
            self._active.enter_context(self._tape)
        try:
            with without_cache(self.model):
                return self._tape.call(name, self.model.get_submodule(name), args, kwargs)
        except BaseException:
            self._active.close()
            raise

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
    def options(self) -> StepOptions:
        """The step as that of a `TrainStep`; within `fakes.active()`."""
        return options_of(self, self.model, self.batch)


class RealLoop(Loop):
    """Watches a step of the program itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model.named_parameters())
        self._loss: Tensor | None = None

    def call(
        self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a module."""
        if not self._active._exit_callbacks:  # type: ignore[attr-defined]
            self._active.enter_context(self._tape)
        self._note_autocast(module)
        return self._tape.call(self._real[id(module)], partial(self._alone, original), args, kwargs)

    def begin_backward(self, loss: Any) -> None:
        self._active.close()
        self._loss = loss if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def end(self) -> None:
        """After the backward pass."""
        if self._loss is None:
            raise UsageError("the backward pass does not start from one number", "use one loss")
        loss, self._loss = self._loss, None
        self._tape.end(loss)

    def _alone(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compiled code is compiled again within a mode."""
        if _get_current_function_mode() is not self._tape:  # type: ignore[no-untyped-call]
            return original(*args, **kwargs)
        with _pop_mode_temporarily():
            return original(*args, **kwargs)


def options_of(loop: Loop, model: nn.Module, batch: list[Tensor]) -> StepOptions:
    """Return the options of a step of fake tensors. Libraries may enter autocast within the
    model."""
    within: list[torch.dtype] = []

    def entered(*_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            within.append(torch.get_autocast_dtype("cpu"))

    if loop.dtype is None:
        hooks = [part.register_forward_pre_hook(entered) for part in model.modules()]
        with torch.no_grad():
            loop.loss_fn(model, batch)
        for hook in hooks:
            hook.remove()
    return StepOptions(loop.loss_fn, loop.dtype or next(iter(within), None))
