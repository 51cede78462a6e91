"""Self-attention without rotary positions: Q, K and V as one matmul, heads as views of it, one
gradient of all three, and the fastest attention kernel.

A module whose linear layers have matching shapes (one that returns q, k and v, or three; and the
output projection, or none) is compared with these formulas in float32 on a small input with random
weights: with every number of heads and order of q, k and v, causal or not. The layers may be
`nn.Linear` or the `Conv1D` of transformers. Dropout is recognized by the same random numbers, and
stays that of torch. Calls with other arguments than the input (such as rotary positions of timm)
run the original, and the report says so; masks and empty caches of Hugging Face models are passed
to the attention function that the model's configuration names.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.pieces.attention import PIECE, attention_function
from stepscope.acceleration.pieces.mask_rules import rules_of
from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    bias_of,
    drops,
    has_hooks,
    is_linear,
    is_transposed,
    settings_of,
)
from stepscope.attention import attention
from stepscope.attention.packed import split_heads
from stepscope.attention.rules import ScoreRules
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.qkv import projected_heads
from stepscope.kernels.weight_copies import WeightCopies

_TOLERANCE = 1e-5
_BATCH, _LENGTH, _SEED = 2, 7, 0
_MASKS = ("attention_mask", "attn_mask")
_CACHES = ("past_key_values", "layer_past")
_WITHOUT_EFFECT = ("use_cache", "cache_position", "position_ids", "num_items_in_batch")
"""Arguments of Hugging Face models that self-attention without rotary positions does not read."""
_WINDOWS = ("window", "sliding", "local", "chunk")


class Names(NamedTuple):
    """Attributes of the layers: one that returns q, k and v, or three; and the last, if any."""

    projections: tuple[str, ...]
    output: str | None

    @property
    def all(self) -> tuple[str, ...]:
        return self.projections if self.output is None else (*self.projections, self.output)


class Match(NamedTuple):
    """What a module computes."""

    names: Names
    heads: int
    by_head: bool
    causal: bool
    scale: float
    nones: int | None
    """Length of the tuple that it returns, without the output; None if it returns a tensor."""
    dropout: float = 0.0
    """Of the attention weights in training."""
    output_dropout: float = 0.0


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    known: dict[Any, Match | str] = {}
    for name, module in model.named_modules():
        candidates = list(_candidates(module))
        if not candidates:
            continue
        if any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, "it has hooks"))
            continue
        key = _structure(module)
        if key not in known:
            known[key] = _match(module, candidates)
        match = known[key]
        if isinstance(match, Match):
            fused = _Attention(module, match, copies)
            replacements.append(Replacement(PIECE, name, module, fused.forward, fused.declines))
        elif match:
            left.append(Left(PIECE, name, match))
    return replacements, left


def _layers(module: nn.Module) -> dict[str, Any]:
    return {
        name: child
        for name, child in module.named_children()
        if is_linear(child) or is_transposed(child)
    }


def _shape(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs of a layer."""
    rows, columns = layer.weight.shape
    return (columns, rows) if is_transposed(layer) else (rows, columns)


def _candidates(module: nn.Module) -> Iterator[Names]:
    """Yield the possible roles of linear layers whose shapes fit an attention and which have all
    parameters of the module."""
    layers = _layers(module)
    if not 1 <= len(layers) <= 4 or len({id(child) for child in layers.values()}) != len(layers):
        return
    owned = {id(p) for layer in layers.values() for p in layer.parameters()}
    if any(id(p) not in owned for p in module.parameters()):
        return
    if len({is_transposed(child) for child in layers.values()}) != 1:
        return
    shapes = {name: _shape(child) for name, child in layers.items()}
    packed = len(layers) < 3
    for order in permutations(layers):
        projections, output = order[: 1 if packed else 3], order[1 if packed else 3 :]
        rows, columns = shapes[projections[0]]
        width, rest = divmod(rows, 3) if packed else (rows, 0)
        if packed and not output and width != columns:
            # Any layer could be one that returns q, k and v.
            continue
        same = len({shapes[name] for name in projections}) == 1
        with_bias = len({bias_of(layers[name]) is None for name in projections}) == 1
        transposed = is_transposed(layers[projections[0]]) and not packed
        fits = all(shapes[name][1] == width for name in output)
        if not rest and same and with_bias and fits and not transposed:
            yield Names(tuple(projections), output[0] if output else None)


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the settings of a module, and the name of its attention function."""
    config = getattr(module, "config", None)
    return settings_of(module) | {
        "_attn_implementation": getattr(config, "_attn_implementation", None)
    }


def _structure(module: nn.Module) -> Any:
    """Return what tells apart modules that compute something else."""
    shapes = tuple((name, _shape(child)) for name, child in _layers(module).items())
    biases = tuple(bias_of(child) is None for child in _layers(module).values())
    buffers = tuple((name, tuple(b.shape), _is_causal(b)) for name, b in module.named_buffers())
    settings = tuple(sorted((name, repr(value)) for name, value in _settings(module).items()))
    return type(module), shapes, biases, _dropouts(module), buffers, settings


def _dropouts(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """Return the names and probabilities of the dropouts within a module."""
    return tuple(
        (name, float(getattr(child, "p", 1.0)))
        for name, child in module.named_children()
        if drops(child)
    )


def _is_causal(buffer: Tensor) -> bool:
    """Return whether a square buffer shows all keys up to each query and no others."""
    if buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2] or buffer.is_meta:
        return False
    mask = buffer.detach().reshape(-1, *buffer.shape[-2:])[0] != 0
    return torch.equal(mask, torch.ones_like(mask).tril())


def _limited(module: nn.Module) -> str:
    """Return why a short input does not show what the module computes of a long one."""
    for name, value in _settings(module).items():
        if value and any(word in name.lower() for word in _WINDOWS):
            return f"it has a {name}"
    for name, buffer in module.named_buffers():
        is_square = buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] > 1
        if is_square and not _is_causal(buffer):
            return f"its buffer {name} is not a causal mask"
    return ""


@torch.no_grad()
def _match(module: nn.Module, candidates: list[Names]) -> Match | str:
    """Return the formula that the module computes in float32, or why it is left; an empty string if
    it is no attention."""
    generator = torch.Generator().manual_seed(0)
    width = _shape(getattr(module, candidates[0].projections[0]))[1]
    x = torch.randn(_BATCH, _LENGTH, width, generator=generator)
    try:
        small = _with_random_weights(module, candidates[0], generator)
        actual, trained = (_run(small, x, training) for training in (False, True))
    except Exception:
        # It is not a function of one tensor, or does not run on a CPU.
        return ""
    out = actual[0] if isinstance(actual, tuple) and actual else actual
    if not isinstance(out, Tensor) or out.shape[:-1] != x.shape[:-1]:
        return ""
    match = _formula(small, candidates, x, out)
    if match is None:
        return ""
    if isinstance(actual, tuple):
        if any(one is not None for one in actual[1:]):
            return "it returns attention weights"
        match = match._replace(nones=len(actual) - 1)
    if reason := _limited(module):
        return reason
    trained = trained[0] if isinstance(trained, tuple) else trained
    return _with_dropout(small, match, x, trained) or "it has dropout of another form"


def _with_dropout(small: Any, match: Match, x: Tensor, trained: Tensor) -> Match | None:
    """Return the match with the dropouts of weights and output that explain what the module returns
    in training, from the random numbers of `_run`."""
    projected = _projected(small, match.names, x)
    named = (value for name, value in _settings(small).items() if "drop" in name)
    values = {p for p in named if type(p) is float} | {p for _, p in _dropouts(small)}
    for of_weights, of_output in product((0.0, *sorted(p for p in values if 0 < p < 1)), repeat=2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_SEED)
            out = _computed(small, match, projected, of_weights)
            out = functional.dropout(out, of_output, training=of_output > 0)
        if _equal(trained, out):
            return match._replace(dropout=of_weights, output_dropout=of_output)
    return None


def _projected(small: Any, names: Names, x: Tensor) -> Tensor:
    return torch.cat([_linear(getattr(small, name), x) for name in names.projections], dim=-1)


def _computed(small: Any, match: Match, projected: Tensor, dropout: float) -> Tensor:
    """Return the output of the formula, without dropout of the output."""
    q, k, v = split_heads(projected, match.heads, match.by_head)
    out = functional.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=match.causal, scale=match.scale
    )
    out = out.transpose(1, 2).flatten(2)
    last = match.names.output
    return out if last is None else _linear(getattr(small, last), out)


def _run(module: Any, x: Tensor, training: bool) -> Any:
    with torch.random.fork_rng(devices=()), torch.autocast("cpu", enabled=False):
        torch.manual_seed(_SEED)
        return module.train(training)(x)


def _with_random_weights(module: nn.Module, names: Names, generator: torch.Generator) -> Any:
    """Return a copy on the CPU whose scores have a standard deviation of one."""
    shared = {id(p): p for p in module.parameters()}
    config = getattr(module, "config", None)
    small: Any = copy.deepcopy(module, shared | {id(config): config})
    for name in names.all:
        layer = getattr(small, name)
        weight = torch.randn(layer.weight.shape, generator=generator)
        layer.weight = nn.Parameter(weight / math.sqrt(_shape(layer)[1]))
        if (bias := bias_of(layer)) is not None:
            layer.bias = nn.Parameter(torch.randn(bias.shape, generator=generator))
    return small.cpu()


def _formula(small: Any, candidates: list[Names], x: Tensor, actual: Tensor) -> Match | None:
    settings = _settings(small)
    scales = [
        float(value)
        for name, value in settings.items()
        if "scal" in name and not isinstance(value, str | bool) and value > 0
    ]
    for names in candidates:
        projected = _projected(small, names, x)
        width = projected.shape[-1] // 3
        last = None if names.output is None else getattr(small, names.output)
        if actual.shape[-1] != (width if last is None else _shape(last)[0]):
            continue
        numbers = {n for n in settings.values() if type(n) is int and n > 0 and width % n == 0}
        divisors = (n for n in range(1, width + 1) if width % n == 0 and n not in numbers)
        for heads in (*sorted(numbers), *divisors):
            scale = 1 / math.sqrt(width // heads)
            others = {one for one in (*scales, 1.0) if not math.isclose(one, scale)}
            for by_head in (False, True)[: 2 if len(names.projections) == 1 else 1]:
                for factor, causal in product((scale, *sorted(others)), (False, True)):
                    match = Match(names, heads, by_head, causal, factor, None)
                    if _equal(actual, _computed(small, match, projected, 0.0)):
                        return match
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= _TOLERANCE * b.norm())


def _linear(layer: Any, x: Tensor) -> Tensor:
    weight = layer.weight.T if is_transposed(layer) else layer.weight
    return functional.linear(x, weight, bias_of(layer))


class _Attention:
    """The fused forward of one attention module."""

    def __init__(self, module: Any, match: Match, copies: WeightCopies) -> None:
        self._match, self._copies = match, copies
        layers = [getattr(module, name) for name in match.names.all]
        self._kinds = [type(layer) for layer in layers]
        self._weights = [layer.weight for layer in layers]
        self._transposed = is_transposed(layers[0])
        self._settings, self._dropouts = _settings(module), _dropouts(module)
        named = inspect.signature(module.forward).parameters.values()
        self._parameters = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD]
        self._defaults = {p.name: p.default for p in named}
        self._takes_more = any(p.kind == p.VAR_KEYWORD for p in named)
        self._has_function = hasattr(
            sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS"
        )

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs."""
        call = self._call(module, args, kwargs)
        return call if isinstance(call, str) else self._changed(module, call.x)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._call(module, args, kwargs)
        assert isinstance(call, _Call)
        match = self._match
        layers = [getattr(module, name) for name in match.names.all]
        projections = layers[: len(match.names.projections)]
        q, k, v = projected_heads(
            call.x,
            tuple(layer.weight for layer in projections),
            self._copies,
            [bias for bias in map(bias_of, projections) if bias is not None],
            heads=match.heads,
            by_head=match.by_head,
            transposed=self._transposed,
        )
        if call.cache is not None:
            k, v = call.cache.update(k, v, module.layer_idx)
        dropout = match.dropout if module.training else 0.0
        rules = None if dropout else self._rules(module, q, k, call.mask)
        if call.mask is None or rules is not None:
            k, v = k.to(q.dtype), v.to(q.dtype)
            # Dropout of torch: the same random numbers as before.
            impl = "sdpa" if dropout else "auto"
            rules = ScoreRules(dropout=dropout) if dropout else rules
            out = attention(
                q, k, v, is_causal=match.causal, scale=match.scale, rules=rules, impl=impl
            ).transpose(1, 2)
        else:
            out, _ = attention_function(module)(
                module, q, k, v, call.mask, dropout=dropout, scaling=match.scale, **call.rest
            )
        out = out.flatten(2)
        if match.names.output is not None:
            output = layers[-1]
            bias = bias_of(output)
            biases = () if bias is None else (bias,)
            out = fused_linear(
                out, (output.weight,), self._copies, biases, transposed=self._transposed
            )
        if match.output_dropout:
            out = functional.dropout(out, match.output_dropout, module.training)
        return out if match.nones is None else (out, *[None] * match.nones)

    def _rules(self, module: Any, q: Tensor, k: Tensor, mask: Tensor | None) -> ScoreRules | None:
        """Return the rules that say the same as the mask of a causal model, if known."""
        rules = rules_of(mask) if self._match.causal and q.shape[2] == k.shape[2] > 1 else None
        return rules if rules is not None and module.config._attn_implementation == "sdpa" else None

    def _call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | str:
        """Return the arguments of a call, or why it is another one than the formula's."""
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        unknown = not self._takes_more and not given.keys() <= {*self._parameters}
        if unknown or len(args) > len(self._parameters) or not self._parameters:
            return "its arguments do not fit its signature"
        x = given.pop(self._parameters[0], None)
        given = {name: one for name, one in given.items() if not self._is_neutral(name, one)}
        mask = next((given.pop(name) for name in _MASKS if name in given), None)
        cache = next((given.pop(name) for name in _CACHES if name in given), None)
        rest = {name: given.pop(name) for name in _WITHOUT_EFFECT if name in given}
        if given or not isinstance(x, Tensor):
            return f"it is called with {', '.join(sorted(given)) or type(x).__name__}"
        if mask is not None and (not self._has_function or type(mask) is not Tensor):
            return "it is called with a mask"
        if cache is not None and not self._is_empty(module, cache):
            return "its cache has tokens, or is one of an encoder and a decoder"
        return _Call(x, mask, cache, rest)

    def _is_neutral(self, name: str, value: Any) -> bool:
        """Return whether an argument changes nothing: None, or a flag that is not set, unless it is
        set by default."""
        default = self._defaults.get(name, name == "is_causal" and self._match.causal)
        return value is None or (value is False and default is not True)

    def _is_empty(self, module: Any, cache: Any) -> bool:
        """Return whether this is a cache of self-attention in which nothing was generated."""
        if not self._has_function or hasattr(cache, "self_attention_cache"):
            return False
        return hasattr(cache, "update") and cache.get_seq_length(module.layer_idx) == 0

    def _changed(self, module: Any, x: Tensor) -> str:
        """Return whether the module is not as it was compared: other layers (an adapter),
        parameters (sharded), hooks, settings or dropout."""
        layers = [getattr(module, name) for name in self._match.names.all]
        same = all(
            type(layer) is kind and layer.weight is weight and not has_hooks(layer)
            for layer, kind, weight in zip(layers, self._kinds, self._weights, strict=True)
        )
        if not same or _settings(module) != self._settings:
            return "its layers or settings were changed"
        dropouts = [child for child in module.children() if drops(child)]
        # Some modules read their own mode, others call the dropout, which has its own.
        same = all(child.training == module.training for child in dropouts)
        if _dropouts(module) != self._dropouts or not same:
            return "its dropout was changed"
        alike = len({weight.dtype for weight in self._weights}) == 1
        if x.dim() != 3 or not x.is_floating_point() or not alike:
            return "its input or weights have another shape or dtype"
        return ""


class _Call(NamedTuple):
    x: Tensor
    mask: Tensor | None
    cache: Any
    rest: dict[str, Any]
