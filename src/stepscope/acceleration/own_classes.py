"""Layers of a user's own class that compute what a layer of torch does from a `weight` of the same
shape: the forward of the class runs once on small parameters.

A module with buffers, other parameters or numbers of its own is not compared: its forward may read
them, and they may change later.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.forward_registry import own_forward

_ROWS, _COLUMNS = 5, 3
_Comparison = Callable[[nn.Module], bool]


CONTAINERS = (list, dict, set)


def copy_with(module: nn.Module, **registries: dict[str, Any]) -> nn.Module:
    """Return a module in training with the attributes of this one, and other parts or parameters
    (`_modules`, `_parameters`). Containers are copied: its forward may append to them."""
    copy = nn.Module.__new__(type(module))
    for name, value in vars(module).items():
        copy.__dict__[name] = value.copy() if type(value) in CONTAINERS else value
    copy.__dict__.update(registries, training=True)
    return copy


def _once(compare: _Comparison) -> _Comparison:
    """Keep the result for each module."""
    known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(compare)
    def compared(module: nn.Module) -> bool:
        if module not in known:
            known[module] = compare(module)
        return known[module]

    return compared


@_once
@torch.no_grad()
def computes_linear(module: nn.Module) -> bool:
    """Return whether the forward of a module is that of `nn.Linear`, in its dtypes."""
    small = _small(module, {"weight", "bias"})
    if small is None:
        return False
    x = torch.linspace(-1.0, 1.0, 8 * _COLUMNS, device="cpu").view(2, 4, _COLUMNS)
    weight, bias = (small._parameters.get(name) for name in ("weight", "bias"))
    assert weight is not None
    expected = nn.functional.linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = _output(small, x)
    if not _equal(_output(small, x), expected) or narrow is None:
        return False
    # An input of another dtype than the weight is an error.
    return narrow.dtype == torch.bfloat16 and _output(small, x.to(torch.bfloat16)) is None


@_once
@torch.no_grad()
def computes_embedding(module: nn.Module) -> bool:
    """Return whether the forward of a module returns the rows of its weight."""
    small = _small(module, {"weight"})
    if small is None:
        return False
    tokens = torch.tensor([[0, 4, 2], [4, 4, 1]], device="cpu")
    weight = small._parameters["weight"]
    assert weight is not None
    return _equal(_output(small, tokens), weight[tokens])


def embeddings(model: nn.Module) -> list[Any]:
    """Return the embeddings of a model, of torch's class or the user's."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) or computes_embedding(module)
    ]


def _small(module: nn.Module, names: set[str]) -> nn.Module | None:
    """Return a copy with small parameters; None if the module has others or may read numbers."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 2 or not parameters.keys() <= names:
        return None
    if any(type(one) is not nn.Parameter for one in parameters.values()):
        return None
    numbers = any(type(value) is float for value in vars(module).values())
    if not weight.is_floating_point() or module._modules or module._buffers or numbers:
        return None
    if own_forward(module) is not None or type(module).__module__.startswith("torch."):
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = {"weight": (_ROWS, _COLUMNS), "bias": (_ROWS,)}
    drawn = {
        name: nn.Parameter(torch.randn(sizes[name], generator=generator, device="cpu"))
        for name in parameters
    }
    return copy_with(module, _parameters=module._parameters | drawn)


def _output(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output; None if it is no tensor, or raises."""
    try:
        out = type(module).forward(module, x)
    except Exception:
        # It is a function of something else.
        return None
    return out if isinstance(out, Tensor) else None


def _equal(actual: Tensor | None, expected: Tensor) -> bool:
    return (
        actual is not None
        and actual.shape == expected.shape
        and actual.dtype == expected.dtype
        and torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    )
