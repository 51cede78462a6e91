"""Optimizers in a CUDA graph: hyperparameters stay changeable, or a change is detected.

A graph has the values that Python passed to its kernels. What may change from step to step must be
in device memory, or the graph is valid for one value only:

- optimizers with `prepare()` and `refresh()`, such as `FusedAdamW(capturable=True)`, keep all
  hyperparameters on the device;
- torch's Adam and AdamW are made capturable: step counts move to the device, and during a capture
  the learning rate is a tensor, into which `refresh` copies the float of the group;
- all others are constants of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stepscope.optim.in_backward import InBackwardAdamW


class OptimizerControl:
    """An optimizer whose hyperparameters are constants of a graph."""

    changeable = False
    """True if the learning rate may change from replay to replay."""
    prepares = False
    """True if `prepare` has to run between the captures of the backward and of the update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def begin(self) -> None:
        """Make the optimizer capturable."""

    def revert(self) -> None:
        """Undo the last `begin`."""

    def abandon(self) -> None:
        """Forget a step whose capture failed: nothing of it has run."""

    def prepare(self) -> None:
        """Create what the update needs, for the gradients at their current addresses."""

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Use device tensors for what may change, while the step is captured."""
        yield

    def refresh(self) -> None:
        """Copy changed hyperparameters to the device, before a replay."""

    def constants(self) -> list[Any]:
        """Return the hyperparameters that are constants of a graph, per group."""
        return [
            [(name, _constant(value)) for name, value in group.items() if self._is_constant(name)]
            for group in self.optimizer.param_groups
        ]

    def _is_constant(self, name: str) -> bool:
        return name not in ("params", "initial_lr")


class RefreshedControl(OptimizerControl):
    """An optimizer with `prepare()` and `refresh()`."""

    changeable = True

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        # It updates within the backward, so that there is nothing to cut off.
        return not isinstance(self.optimizer, InBackwardAdamW)

    def abandon(self) -> None:
        if isinstance(self.optimizer, InBackwardAdamW):
            self.optimizer.abandon_step()

    def prepare(self) -> None:
        self.optimizer.prepare()  # type: ignore[attr-defined]

    def refresh(self) -> None:
        self.optimizer.refresh()  # type: ignore[attr-defined]

    def constants(self) -> list[Any]:
        return []


class AdamControl(OptimizerControl):
    """torch's Adam and AdamW, with a learning rate per group on the device."""

    changeable = True

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._rates: list[Tensor] = []
        self._sent: list[float] = []
        self._undo = ExitStack()

    def begin(self) -> None:
        self._undo = ExitStack()
        for group in self.optimizer.param_groups:
            self._undo.callback(group.__setitem__, "capturable", group["capturable"])
            group["capturable"] = True
            for parameter in group["params"]:
                self._move_count(parameter)
        # An eager step between two replays is intended.
        self.optimizer._warned_capturable_if_run_uncaptured = True
        # Before the capture, which must not create or fill the learning rates.
        self.refresh()

    def _move_count(self, parameter: Tensor) -> None:
        state = self.optimizer.state.get(parameter, {})
        count = state.get("step")
        if isinstance(count, Tensor) and count.device != parameter.device:
            self._undo.callback(state.__setitem__, "step", count)
            state["step"] = count.to(parameter.device, torch.float32)

    def revert(self) -> None:
        self._undo.close()

    @contextmanager
    def captured(self) -> Iterator[None]:
        floats = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(self.optimizer.param_groups, floats, strict=True):
                group["lr"] = value

    def refresh(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            # A learning rate that is a tensor already is read by the graph itself.
            value = 0.0 if isinstance(group["lr"], Tensor) else float(group["lr"])
            if number == len(self._rates):
                device = next((one.device for one in group["params"]), None)
                self._rates.append(torch.full((), value, dtype=torch.float32, device=device))
                self._sent.append(value)
            elif value != self._sent[number]:
                self._rates[number].fill_(value)
                self._sent[number] = value

    def _is_constant(self, name: str) -> bool:
        return super()._is_constant(name) and name != "lr"

    def constants(self) -> list[Any]:
        tensors = [
            _constant(group["lr"]) if isinstance(group["lr"], Tensor) else None
            for group in self.optimizer.param_groups
        ]
        return [*super().constants(), tensors]


def control_of(optimizer: Optimizer) -> OptimizerControl:
    methods = (getattr(optimizer, name, None) for name in ("prepare", "refresh"))
    if all(map(callable, methods)):
        return RefreshedControl(optimizer)
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return AdamControl(optimizer)
    return OptimizerControl(optimizer)


@contextmanager
def watched_steps(
    optimizers: Sequence[Optimizer], act: Callable[[Optimizer], None]
) -> Iterator[None]:
    """Call `act(optimizer)` before every `step()` of any optimizer within the context.

    Known optimizers are wrapped on the instance, because a patched `step` does not run torch's
    hooks; the hook of all optimizers finds the others.
    """
    wrapped: list[Optimizer] = []

    def before(optimizer: Optimizer, *_: Any) -> None:
        if not any(one is optimizer for one in wrapped):
            act(optimizer)

    with ExitStack() as undo:
        undo.callback(register_optimizer_step_pre_hook(before).remove)
        for optimizer in optimizers:
            undo.enter_context(_wrapped_step(optimizer, act))
            wrapped.append(optimizer)
        yield


@contextmanager
def _wrapped_step(optimizer: Optimizer, act: Callable[[Optimizer], None]) -> Iterator[None]:
    plain, own = optimizer.step, "step" in vars(optimizer)

    # Schedulers mark the step, and warn if it has lost the mark.
    @functools.wraps(plain)
    def step(*args: Any, **kwargs: Any) -> Any:
        act(optimizer)
        return plain(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            optimizer.step = plain  # type: ignore[method-assign]
        else:
            del optimizer.step


def _constant(value: Any) -> Any:
    """Return what is constant of a hyperparameter: the address of a tensor, else the value."""
    return value.data_ptr() if isinstance(value, Tensor) else value
