"""Build a model from a user's function and check it before measuring."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import UsageError, in_one_line

if TYPE_CHECKING:
    import torch

Loss = Callable[[Any, Any], "torch.Tensor"]


class Built(NamedTuple):
    """A user's model, its batch function and its loss function."""

    model: torch.nn.Module
    make_batch: Callable[[int, torch.device], Any]
    loss: Loss | None


def load(name: str) -> Callable[[], Any]:
    """Import the function named `package.module:function`."""
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported: {in_one_line(error)}",
            "run from its folder or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {in_one_line(error)}"
        raise UsageError(f"{module} cannot be imported: {why}", "fix the module") from error
    for word in path.split("."):
        if not hasattr(target, word):
            raise UsageError(f"{module} has no {path}", "give --model package.module:function")
        target = getattr(target, word)
    if not callable(target):
        raise UsageError(f"{name} is a {type(target).__name__}", "it must be a function")
    return target  # type: ignore[no-any-return]


def build(name: str) -> Built:
    """Call the user's function and check what it returns."""
    import torch

    returned = load(name)()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise UsageError(
            f"{name} returned {_described(returned)}",
            "it must return (model, make_batch) or (model, make_batch, loss)",
        )
    model, make_batch, *rest = returned
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the model returned by {name} is {_described(model)}", "it must be an nn.Module"
        )
    for what, function in (("make_batch", make_batch), *(("loss", loss) for loss in rest)):
        if not callable(function):
            raise UsageError(
                f"the {what} returned by {name} is {_described(function)}", "it must be a function"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            f"the model of {name} has no trainable parameters",
            "return a model with parameters that require gradients",
        )
    return Built(model, make_batch, rest[0] if rest else None)


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model: a dictionary gives keywords, a tuple or list positional arguments. A cache of
    keys and values, which the loss does not depend on, is not created."""
    from stepscope.acceleration.losses import called, without_cache

    if isinstance(batch, tuple | list):
        _check_arguments(model, batch)
    with without_cache(model):
        return called(model, batch)


def _check_arguments(model: torch.nn.Module, batch: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*batch)
    except TypeError as error:
        raise UsageError(
            f"a batch of {len(batch)} elements is passed as {len(batch)} arguments, which the"
            f" model's forward{signature} does not accept: {error}",
            "make_batch must return the arguments of the model, and a dictionary for keywords;"
            " `loss(outputs, batch)` gets the same batch",
        ) from None


def loss_of(output: Any, batch: Any, loss: Loss | None, name: str) -> torch.Tensor:
    """Get the differentiable scalar loss from the output of the model."""
    import torch

    from stepscope.acceleration.losses import loss_in

    if loss is not None:
        value: Any = loss(output, batch)
    else:
        value = loss_in(output)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise UsageError(
            f"the model of {name} returned {_described(output)}, which is not a loss",
            "return a scalar, an object with a loss attribute or (loss, …), or return a third"
            " function, loss(output, batch), from the build function",
        )
    return value


def _described(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
