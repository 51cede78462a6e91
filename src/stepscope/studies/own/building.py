"""A model from a function of the user's, checked before anything is measured."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import UsageError, in_one_line

if TYPE_CHECKING:
    import torch

Loss = Callable[[Any, Any], "torch.Tensor"]


class Built(NamedTuple):
    model: torch.nn.Module
    make_batch: Callable[[int, torch.device], Any]
    loss: Loss | None


def load(name: str) -> Callable[[], Any]:
    """The function that `package.module:function` names."""
    module, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported: {in_one_line(error)}",
            "run from its folder, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {in_one_line(error)}"
        raise UsageError(f"{module} cannot be imported: {why}", "correct the module") from error
    for word in path.split("."):
        if not hasattr(found, word):
            raise UsageError(f"{module} has no {path}", "give --model package.module:function")
        found = getattr(found, word)
    if not callable(found):
        raise UsageError(f"{name} is a {type(found).__name__}", "it must be a function")
    return found  # type: ignore[no-any-return]


def build(name: str) -> Built:
    import torch

    made = load(name)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(
            f"{name} returned {_described(made)}",
            "it must return (model, make_batch) or (model, make_batch, loss)",
        )
    model, make_batch, *rest = made
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the model that {name} returned is {_described(model)}", "it must be an nn.Module"
        )
    for what, function in (("make_batch", make_batch), *(("loss", one) for one in rest)):
        if not callable(function):
            raise UsageError(
                f"the {what} that {name} returned is {_described(function)}",
                "it must be a function",
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"the model of {name} has no parameter to train", "build one that has")
    return Built(model, make_batch, rest[0] if rest else None)


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Keywords from a dictionary, several arguments from a tuple or list, one from the rest."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        _check_arguments(model, batch)
        return model(*batch)
    return model(batch)


def _check_arguments(model: torch.nn.Module, batch: Sequence[Any]) -> None:
    try:
        taken = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return
    try:
        taken.bind(*batch)
    except TypeError as error:
        raise UsageError(
            f"a batch of {len(batch)} parts is {len(batch)} arguments, which the model's"
            f" forward{taken} does not take: {error}",
            "let make_batch return what the model is called with; `loss(outputs, batch)` gets the"
            " same, and a dictionary becomes keywords",
        ) from None


def loss_of(output: Any, batch: Any, loss: Loss | None, name: str) -> torch.Tensor:
    """A scalar that can be differentiated, from whatever the model returns."""
    import torch

    if loss is not None:
        found: Any = loss(output, batch)
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    else:
        found = output
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        raise UsageError(
            f"the model of {name} returned {_described(output)}, which gives no loss",
            "return a scalar, something with a loss, or (loss, …); or give build a third function,"
            " loss(output, batch)",
        )
    return found


def _described(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
