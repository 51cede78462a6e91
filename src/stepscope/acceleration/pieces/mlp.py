"""MLPs as one operation: two linear layers with an activation between them, or a gated MLP,
down(activation(gate x) · up x), with gate and up as one matmul; some have them in one layer.

A module whose linear layers have matching shapes is compared with these formulas in float32, in
small, with every activation and every order of its layers. Dropout of the output is recognized by
the same random numbers. The layers may be `nn.Linear` or, in pairs, the `Conv1D` of transformers,
which stores its weight transposed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    bias_of,
    drops,
    has_hooks,
    is_linear,
    is_transposed,
)
from stepscope.kernels.activation import PLAIN
from stepscope.kernels.activation_policy import NORMS
from stepscope.kernels.feed_forward import mlp
from stepscope.kernels.weight_copies import WeightCopies

GATED, PLAIN_MLP = "gated MLP", "MLP"
_TOLERANCE = 1e-5
_SMALL = {"width": 8, "hidden": 16, "out": 12}


class Names(NamedTuple):
    """Attributes of the layers: the first one, or gate and up; and the last."""

    first: tuple[str, ...]
    second: str
    packed: bool = False
    """Whether the first layer has gate and up, one after the other."""

    @property
    def is_gated(self) -> bool:
        return self.packed or len(self.first) == 2

    @property
    def piece(self) -> str:
        return GATED if self.is_gated else PLAIN_MLP


class Match(NamedTuple):
    """The roles of the layers of a module, and the activation between them."""

    names: Names
    activation: str
    dropout: str = ""
    """Attribute of the dropout of the output, if there is one."""


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        candidates = list(_candidates(module))
        if not candidates:
            continue
        piece = candidates[0].piece
        match = _refused(module) or _match(module, candidates)
        if isinstance(match, Match):
            fused = _Mlp(match, module, copies)
            replacements.append(Replacement(piece, name, module, fused.forward, fused.declines))
        elif match or piece == GATED:
            # Not every pair of linear layers is meant to be an MLP.
            left.append(Left(piece, name, match or "it computes something else"))
    return replacements, left


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: child
        for name, child in module.named_children()
        if is_linear(child) or is_transposed(child)
    }


def _candidates(module: nn.Module) -> Iterator[Names]:
    """Yield the possible roles of two or three linear layers whose shapes fit an MLP."""
    layers = _layers(module)
    if len({id(child) for child in layers.values()}) != len(layers) or len(layers) not in (2, 3):
        return
    if len({is_transposed(child) for child in layers.values()}) != 1:
        return
    others = (child for name, child in module.named_children() if name not in layers)
    if any(True for child in others for _ in child.parameters()):
        return
    shapes = {name: _shape(child) for name, child in layers.items()}
    for *first, second in permutations(layers):
        same = len({shapes[name] for name in first}) == 1
        rows, columns = shapes[first[0]]
        packed = len(first) == 1 and rows == 2 * shapes[second][1]
        names = Names(tuple(first), second, packed)
        hidden = rows // 2 if packed else rows
        # A gated MLP returns what it gets; with equal sizes, three layers are rather an attention.
        back = not names.is_gated or (shapes[second][0] == columns and hidden != columns)
        if same and shapes[second][1] == hidden and back:
            yield names


def _shape(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs of a layer."""
    rows, columns = layer.weight.shape
    return (columns, rows) if is_transposed(layer) else (rows, columns)


@torch.no_grad()
def activation_name(function: Any) -> str | None:
    """Return the name of the activation that a function or module without parameters computes; None
    if it is another one."""
    x = torch.linspace(-4.0, 4.0, 64)
    try:
        actual = function(x)
    except Exception:
        # It is not a function of one tensor.
        return None
    equal = (name for name, plain in PLAIN.items() if torch.allclose(actual, plain(x), 1e-5, 1e-6))
    return next(equal, None)


def _refused(module: nn.Module) -> str:
    layers = _layers(module).values()
    if has_hooks(module) or any(map(has_hooks, module.children())):
        return "it has hooks"
    if any(map(is_transposed, layers)) and len(layers) == 3:
        return "its weights are stored transposed"
    if len({bias_of(layer) is None for layer in [*layers][:2]}) != 1 and len(layers) == 3:
        return "only some of its layers have a bias"
    return ""


@torch.no_grad()
def _match(module: nn.Module, candidates: list[Names]) -> Match | str:
    """Return the formula that the module computes in float32, or why it is left; an empty string if
    it is no MLP."""
    generator = torch.Generator().manual_seed(0)
    for names in candidates:
        small = _small(module, names, generator)
        x = torch.randn(2, 3, _SMALL["width"], generator=generator)
        try:
            actual = small(x)
        except Exception:
            # It is not a function of one tensor.
            continue
        first = torch.cat([_linear(getattr(small, name), x) for name in names.first], dim=-1)
        gate, *up = first.chunk(2, dim=-1) if names.is_gated else (first,)
        for activation, function in PLAIN.items():
            hidden = function(gate) * up[0] if up else function(gate)
            expected = _linear(getattr(small, names.second), hidden)
            if not isinstance(actual, Tensor) or actual.shape != expected.shape:
                break
            if _equal(actual, expected):
                match = _with_dropout(small, Match(names, activation), x, expected)
                return match or "it has dropout before its last layer"
    return ""


def _with_dropout(small: Any, match: Match, x: Tensor, expected: Tensor) -> Match | None:
    """Return the match with the dropout of the output that explains what the module returns in
    training, from the same random numbers."""
    small.train()
    trained = _seeded(small, x)
    if _equal(trained, expected):
        return match
    for name, child in small.named_children():
        if isinstance(child, nn.Dropout) and _equal(trained, _seeded(child, expected.clone())):
            return match._replace(dropout=name)
    return None


def _seeded(module: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        out: Tensor = module(x)
    return out


def _equal(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).norm() <= _TOLERANCE * expected.norm())


def _small(module: nn.Module, names: Names, generator: torch.Generator) -> Any:
    """Return a copy with smaller layers: the formula does not depend on the sizes."""
    small: Any = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    rows, columns = _shape(getattr(module, names.second))
    out = "width" if rows == _shape(getattr(module, names.first[0]))[1] else "out"
    for name in (*names.first, names.second):
        child = getattr(small, name)
        sizes = ("hidden", "width") if name in names.first else (out, "hidden")
        rows, columns = (_SMALL[size] for size in sizes)
        rows *= 2 if names.packed and name in names.first else 1
        weight = 0.5 * torch.randn(rows, columns, generator=generator)
        if is_transposed(child):
            weight, child.nf = weight.T.contiguous(), rows
        child.weight = nn.Parameter(weight)
        if bias_of(child) is not None:
            child.bias = nn.Parameter(torch.randn(rows, generator=generator))
    return small.cpu().eval()


def _linear(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight.T if is_transposed(layer) else layer.weight
    return functional.linear(x, weight, bias_of(layer))


class _Mlp:
    """The fused forward of one MLP."""

    def __init__(self, match: Match, module: nn.Module, copies: WeightCopies) -> None:
        self._match, self._copies = match, copies
        self._names = (*match.names.first, match.names.second)
        layers = [getattr(module, name) for name in self._names]
        self._kinds = [type(layer) for layer in layers]
        self._weights = [layer.weight for layer in layers]
        self._transposed = is_transposed(layers[-1])

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs: other layers (an adapter), other parameters (sharded),
        later hooks or dropout."""
        layers = [getattr(module, name) for name in self._names]
        if not all(
            type(layer) is kind and layer.weight is weight and not has_hooks(layer)
            for layer, kind, weight in zip(layers, self._kinds, self._weights, strict=True)
        ):
            return "its layers were exchanged or have hooks"
        if any(
            drops(child) and (module.training or child.training)
            for name, child in module.named_children()
            if name != self._match.dropout
        ):
            return "it has another dropout than before"
        if len({weight.dtype for weight in self._weights}) != 1:
            return "its weights have several dtypes"
        return "it is called with other arguments than a tensor" if len(args) != 1 or kwargs else ""

    def forward(self, module: Any, x: Tensor) -> Tensor:
        *first, last = (getattr(module, name) for name in self._names)
        out = mlp(
            x,
            tuple(layer.weight for layer in first),
            last.weight,
            self._copies,
            activation=self._match.activation,
            biases=[bias for bias in map(bias_of, first) if bias is not None],
            out_bias=bias_of(last),
            transposed=self._transposed,
            packed=self._match.names.packed,
            policy=NORMS,
        )
        if not self._match.dropout:
            return out
        dropout = getattr(module, self._match.dropout)
        # Autograd does not let a view of the operation's output change in place.
        return dropout(out.clone() if dropout.inplace else out)  # type: ignore[no-any-return]
