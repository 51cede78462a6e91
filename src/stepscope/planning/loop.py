"""A step of a program's own loop on fake tensors, from the call of its model to `backward()`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.train_step import without_cache
from stepscope.measure.ledger import line_of_code
from stepscope.planning.fake_step import Fakes
from stepscope.planning.loss_tape import LossTape
from stepscope.planning.predict import StepOptions


class LoopBatch(NamedTuple):
    """What a loop gives to its model, and to the functions of its loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]


class FakeLoop:
    """Runs the code of a loop on fake tensors: its model is called with `call`, and `end` is called
    with the loss. No memory of a device is needed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.fakes = Fakes(line_of_code)
        self._active = ExitStack()
        self._enter()
        self.model, self.optimizer = self.fakes.copy(model, optimizer)
        self._dtype: torch.dtype | None = None
        self._exit()

    def call(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the copy of the model. The loop runs on fake tensors until `end`."""
        if torch.is_autocast_enabled(device):
            self._dtype = torch.get_autocast_dtype(device)
        self._enter()
        try:
            self._arguments = self.fakes.batch((args, kwargs))
            args, kwargs = self._arguments
            handles = [
                part.register_forward_pre_hook(self._within) for part in self.model.modules()
            ]
            with without_cache(self.model):
                output = self.model(*args, **kwargs)
            for handle in handles:
                handle.remove()
        except BaseException:
            self._exit()
            raise
        self._tape = self._active.enter_context(LossTape(output, self.fakes.converted))
        return output

    def end(self, loss: Any) -> None:
        """End the step, before its backward pass."""
        self._exit()
        self._tape.end(loss)

    @property
    def batch(self) -> LoopBatch:
        return LoopBatch(*self._arguments, self._tape.given)

    @property
    def options(self) -> StepOptions:
        """The step as that of a `TrainStep`, with a batch of `LoopBatch`."""

        def loss(model: nn.Module, batch: LoopBatch) -> Tensor:
            with without_cache(model):
                output = model(*batch.args, **batch.kwargs)
            return self._tape.replayed(output, batch.given)

        return StepOptions(loss, self._dtype)

    def _within(self, *_: Any) -> None:
        if torch.is_autocast_enabled("cpu"):
            # Libraries enter autocast within the model.
            self._dtype = torch.get_autocast_dtype("cpu")

    def _enter(self) -> None:
        self._active.enter_context(self.fakes.active())

    def _exit(self) -> None:
        self._active.close()
