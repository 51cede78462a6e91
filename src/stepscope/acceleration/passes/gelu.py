"""GELU in fewer instructions.

    gelu(x)   ->   x (1 + erf(x / √2)) / 2, with erfc by its formula in Abramowitz and Stegun

erf takes a GPU 44 instructions, which limits kernels on 16-bit activations; the formula takes 21
and shares its exponential with the gradient. Activations in float32, and those on a CPU, keep erf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from stepscope.acceleration.passes.matching import (
    Applied,
    added,
    argument,
    calls_of,
    line_of,
    value_of,
)

aten = torch.ops.aten
NAME = "GELU"
_SLOPE = 0.3275911 / math.sqrt(2)
_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Of formula 7.1.26 for the complementary error function: its error is below 1.5e-7, where bfloat16
and float16 round at 4e-3 and 5e-4."""


def use_formula(graph: Graph, *, on_cpu: bool = False) -> list[Applied]:
    """Replace the GELUs of a graph."""
    outcomes = []
    for node in calls_of(graph, aten.gelu.default):
        x = value_of(node.args[0])
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        if argument(node, 1, "approximate", "none") != "none" or not is_half:
            continue
        if x.device.type == "cpu" and not on_cpu:
            continue
        _register()
        with graph.inserting_before(node):
            new = added(graph, gelu, node.args[0])
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        outcomes.append(Applied(NAME, "an activation", line_of(new)))
    return outcomes


def _normal(x: Tensor, bell: Tensor) -> Tensor:
    """Return the cumulative distribution of the normal distribution; `bell` is exp(-x²/2)."""
    t = 1 / (1 + _SLOPE * x.abs())
    polynomial = torch.zeros_like(t)
    for coefficient in reversed(_COEFFICIENTS):
        polynomial = (polynomial + coefficient) * t
    tail = 0.5 * polynomial * bell
    return torch.where(x < 0, tail, 1 - tail)


def _gelu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * _normal(wide, torch.exp(-0.5 * wide * wide))).to(x.dtype)


def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    wide = x.float()
    bell = torch.exp(-0.5 * wide * wide)
    slope = _normal(wide, bell) + wide * bell * (1 / math.sqrt(2 * math.pi))
    return (gradient.float() * slope).to(x.dtype)


_library: Any = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("gelu(Tensor x) -> Tensor")
_library.define("gelu_backward(Tensor gradient, Tensor x) -> Tensor")
gelu: Any = torch.ops.stepscope.gelu.default
_backward: Any = torch.ops.stepscope.gelu_backward.default
_FORMULAS: dict[Any, Callable[..., Tensor]] = {gelu: _gelu, _backward: _gelu_backward}
for _operator, _formula in _FORMULAS.items():
    _library.impl(_operator, _formula, "CompositeExplicitAutograd")


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


torch.library.register_autograd(
    "stepscope::gelu",
    lambda ctx, gradient: _backward(gradient, *ctx.saved_tensors),
    setup_context=_save,
    lib=_library,
)


def _register() -> None:
    """Let Inductor see the formulas instead of calling the operators."""
    from stepscope.acceleration.torch_internals import add_decompositions

    add_decompositions(_FORMULAS)
