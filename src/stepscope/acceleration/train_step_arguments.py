"""Checks of the arguments of `TrainStep`, and what its plan of an update depends on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.errors import UsageError

Lever = Literal["micro-batches", "host-states"]
LEVERS: tuple[Lever, ...] = ("micro-batches", "host-states")
"""Changes of a plan that need permission: parts of a batch whose gradients are added up, which are
the same for a loss that is a mean of equally many terms, and optimizer states in host memory."""
DTYPES = (torch.bfloat16, torch.float16)
"""Of autocast."""


class Fitted(Protocol):
    """A plan that `stepscope.fit` has applied."""

    @property
    def plan(self) -> Any: ...

    def undo(self) -> None: ...


def require_valid(
    counts: Mapping[str, Any],
    loss_fn: Any,
    optimizer: Any,
    max_grad_norm: Any,
    dtype: Any,
    scheduler: Any,
) -> None:
    """Raise a `UsageError` that says what to pass instead."""
    for name, count in counts.items():
        if not _is_number(count, Integral) or count < 1:
            raise UsageError(f"{name}={count!r} is invalid", "use an integer, 1 or more")
    if max_grad_norm is not None and not (_is_number(max_grad_norm, Real) and max_grad_norm > 0):
        raise UsageError(
            f"max_grad_norm={max_grad_norm!r} is invalid",
            "use a positive number, or None for gradients that are not clipped",
        )
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            f"dtype={dtype!r} is not one of autocast",
            "use torch.bfloat16, torch.float16, or None; FP8 is an option of stepscope.accelerate",
        )
    _require_loss_function(loss_fn)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS runs the model several times in a step, through a closure",
            "keep your loop for it, or use an optimizer whose step() takes no closure",
        )
    _require_scheduler(scheduler)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value == value


def _require_loss_function(loss_fn: Any) -> None:
    if isinstance(loss_fn, nn.modules.loss._Loss):
        name = type(loss_fn).__name__
        raise UsageError(
            f"loss_fn={name}() takes outputs and targets, not the model and the batch",
            f"use loss_fn=lambda model, batch: {name}()(model(batch[0]), batch[1])",
        )
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f"loss_fn={loss_fn!r} is not a function",
            "use loss_fn=lambda model, batch: …",
        )


def _require_scheduler(scheduler: Any) -> None:
    """Raise if `scheduler.step()` cannot be called without arguments after each update."""
    if scheduler is None:
        return
    name, step = type(scheduler).__name__, getattr(scheduler, "step", None)
    if not callable(step):
        raise UsageError(f"scheduler={name} has no step()", "use one of torch.optim.lr_scheduler")
    try:
        inspect.signature(step).bind()
    except TypeError as error:
        raise UsageError(
            f"{name}.step() cannot be called after each update: {error}",
            "leave scheduler= out, and call its step() yourself, such as after each validation",
        ) from error
    except ValueError:
        # Not every callable has a signature.
        return


class Plan(NamedTuple):
    """What decides where and how parameters are updated."""

    groups: list[tuple[int, list[int]]]
    init_group: Any
    """Method of a fused update."""
    step: Any
    """True for a `step` that a scheduler has wrapped, None for that of the class."""
    hooks: int


def plan_of(optimizer: Optimizer) -> Plan:
    attributes = vars(optimizer)
    step = attributes.get("step")
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return Plan(
        [(id(group), [*map(id, group["params"])]) for group in optimizer.param_groups],
        attributes.get("_init_group"),
        getattr(step, "_wrapped_by_lr_sched", False) or step,
        sum(len(attributes.get(name, ())) for name in hooks),
    )
