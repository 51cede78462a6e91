"""Self-attention of Hugging Face decoders: Q, K and V as one matmul, rotary positions in place, and
the fastest attention kernel.

These modules have projections for queries, keys and values, or one for all three that has them one
after the other or side by side in each head, and one of the output. They get the cosines and sines
of the positions, of all entries of a head or the first ones, and call the attention function that
the model's configuration names (Llama, Mistral, Qwen, Gemma, SmolLM, Phi, GPT-NeoX, gpt-oss, …).
Sliding windows and packed documents are computed by the rules of their masks (`mask_rules`),
soft-capping and attention sinks of naive attention as in `ScoreRules`. Anything that the fused form
does not cover (padding, dropout, a filled cache, positions that differ within a batch) still has
the fused projection, and the rest as it was.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.pieces.mask_rules import rules_of
from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    has_hooks,
    is_plain_linear,
)
from stepscope.attention import attention
from stepscope.attention.packed import split_heads
from stepscope.attention.rules import ScoreRules
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.rope import rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "attention"
_SEPARATE, _PACKED, _BY_HEAD = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("query_key_value",)
_OUTPUTS = ("o_proj", "dense")
_NORMS = (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"))
_HEAD_SIZES = ("head_dim", "head_size")
_CACHES = ("past_key_values", "layer_past")
_EXTRA = {"sliding_window": "sliding_window", "softcap": "attn_logit_softcapping", "s_aux": "sinks"}
"""Arguments of attention functions, and the attributes of modules from which they come."""
_MASKED = ("sdpa", "eager")
"""Attention functions that read masks only."""
_OTHER_SCORES = ("position_bias", "cache")
"""Arguments that change what SDPA computes."""


class Layers(NamedTuple):
    """Names of the linear layers of a module, and the sizes of its heads."""

    projections: tuple[str, ...]
    """Of queries, keys and values; or one, which has all three."""
    output: str
    d_head: int
    heads: int
    key_heads: int

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.projections, self.output)

    @property
    def by_head(self) -> bool:
        """Whether queries, keys and values are side by side in each head."""
        return self.projections == _BY_HEAD

    @property
    def rows(self) -> list[int]:
        """Return the numbers of entries of queries, keys and values."""
        return [heads * self.d_head for heads in (self.heads, self.key_heads, self.key_heads)]


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    tables = RotaryTables()
    for name, module in model.named_modules():
        if not hasattr(_modeling(module), "apply_rotary_pos_emb"):
            continue
        layers = _layers(module)
        if isinstance(layers, str):
            left += [Left(PIECE, name, layers)] if layers else []
        elif reason := _refused(module, layers):
            left.append(Left(PIECE, name, reason))
        else:
            fused = _Attention(module, layers, copies, tables)
            # Naive attention returns the weights, which no decoder block reads.
            unused = (1,) if _is_eager(module) else ()
            replacements.append(
                Replacement(PIECE, name, module, fused.forward, fused.declines, unused)
            )
    return replacements, left


def _layers(module: nn.Module) -> Layers | str:
    """Return the layers of an attention, or why it is left; an empty string if it is not one."""
    output = next((name for name in _OUTPUTS if hasattr(module, name)), None)
    forms = (_SEPARATE, _PACKED, _BY_HEAD)
    projections = next(
        (names for names in forms if all(hasattr(module, name) for name in names)), None
    )
    sizes = [getattr(module, name, None) for name in _HEAD_SIZES]
    d_head = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    if output is None or projections is None or d_head is None:
        return ""
    layers = [getattr(module, name) for name in (*projections, output)]
    if not all(type(layer) is nn.Linear for layer in layers):
        return "its projections are not plain linear layers"
    heads = layers[-1].in_features // d_head
    rows = [layer.out_features for layer in layers[:-1]]
    of_keys = rows[1] if len(rows) == 3 else (rows[0] - heads * d_head) // 2
    found = Layers(projections, output, d_head, heads, of_keys // d_head)
    expected = found.rows if len(rows) == 3 else [sum(found.rows)]
    grouped = found.key_heads != heads
    if rows != expected or of_keys <= 0 or heads % found.key_heads or (grouped and found.by_head):
        return "the sizes of its projections are not those of heads"
    return found


def _refused(module: Any, layers: Layers) -> str:
    linear = [getattr(module, name) for name in layers.all]
    if has_hooks(module) or not all(map(is_plain_linear, linear)):
        return "it has hooks"
    if len({layer.bias is None for layer in linear[:-1]}) != 1:
        return "only some of its projections have a bias"
    known = {*layers.all, *_NORMS[0], *_NORMS[1], "rotary_emb", "rotary_fn"}
    if unknown := [name for name, _ in module.named_children() if name not in known]:
        return f"it has other parts: {', '.join(unknown)}"
    return ""


def _modeling(module: nn.Module) -> Any:
    """Return the Python module that defines the class: it has the functions that its forward
    calls."""
    return sys.modules[type(module).__module__]


def attention_function(module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """Return the function of a Hugging Face model that its configuration names."""
    modeling, name = _modeling(module), module.config._attn_implementation
    function: Callable[..., tuple[Tensor, Any]] = modeling.eager_attention_forward
    if name != "eager":
        function = modeling.ALL_ATTENTION_FUNCTIONS[name]
    return function


class RotaryTables:
    """Cosines and sines of a step, (seq, d_head/2) in float32: all blocks get the same tensors."""

    def __init__(self) -> None:
        self._source: tuple[Tensor, Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for (1, seq, d_head) tensors whose two halves are equal."""
        source = self._source
        if self._tables is None or source is None or source[0] is not cos or source[1] is not sin:
            half = cos.shape[-1] // 2
            self._source = (cos, sin)
            self._tables = tuple(x[0, :, :half].float().contiguous() for x in (cos, sin))  # type: ignore[assignment]
        assert self._tables is not None
        return self._tables


class _Attention:
    """The fused forward of one attention module."""

    def __init__(
        self, module: Any, layers: Layers, copies: WeightCopies, tables: RotaryTables
    ) -> None:
        self._layers, self._copies, self._tables = layers, copies, tables
        self._weights = [getattr(module, name).weight for name in layers.all]
        self._norms = [
            next((name for name in names if hasattr(module, name)), None) for names in _NORMS
        ]
        named = inspect.signature(module.forward).parameters.values()
        self._names = [p.name for p in named if p.kind == p.POSITIONAL_OR_KEYWORD]
        self._extra = {
            name: attribute for name, attribute in _EXTRA.items() if _passes(module, name)
        }

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs: other projections than before, or a cache with tokens."""
        given = self._given(args, kwargs)
        if given.get("position_embeddings") is None:
            return "it is called without position embeddings"
        layers = [getattr(module, name) for name in self._layers.all]
        if not all(
            is_plain_linear(layer) and layer.weight is weight
            for layer, weight in zip(layers, self._weights, strict=True)
        ):
            return "its projections were exchanged or have hooks"
        cache = next((given[name] for name in _CACHES if given.get(name) is not None), None)
        if cache is not None and cache.get_seq_length(module.layer_idx):
            return "its cache has tokens"
        # Some modules pass the window of the configuration, which these functions do not read.
        masked = module.config._attn_implementation in _MASKED
        if "sliding_window" in self._extra and not hasattr(module, "sliding_window") and not masked:
            return "its attention function reads the window of the configuration"
        return ""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        x, (cos, sin) = given.pop(self._names[0]), given.pop("position_embeddings")
        mask = given.pop("attention_mask", None)
        caches = [given.pop(name) for name in _CACHES if name in given]
        q, k, v = self._heads(module, x, cos, sin)
        for cache in caches:
            if cache is not None:
                k, v = cache.update(k, v, module.layer_idx)
        heads, weights = self._attend(module, q, k, v, mask, given)
        merged = heads.reshape(*x.shape[:-1], -1)
        output = getattr(module, self._layers.output)
        biases = () if output.bias is None else (output.bias,)
        return fused_linear(merged, (output.weight,), self._copies, biases), weights

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | kwargs

    def _heads(
        self, module: Any, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, seq, d_head), the first two rotated."""
        layers = self._layers
        projections = [getattr(module, name) for name in layers.projections]
        biases = [layer.bias for layer in projections if layer.bias is not None]
        weights = tuple(layer.weight for layer in projections)
        parts = fused_linear(x, weights, self._copies, biases)
        rotated = _rotated_entries(module, layers.d_head, cos)
        # Tables of GPT-OSS have one entry per pair.
        shared = cos.shape[0] == 1 and cos.shape[-1] == rotated and not cos.requires_grad
        if shared and not any(self._norms):
            return rotated_parts_(
                parts, *self._tables.of(cos, sin), layers.heads, layers.key_heads, layers.by_head
            )
        if layers.by_head:
            q, k, v = split_heads(parts, layers.heads, by_head=True)
        else:
            q, k, v = (
                part.view(*part.shape[:-1], -1, layers.d_head).transpose(1, 2)
                for part in torch.split(parts, layers.rows, -1)
            )
        q, k = (
            part if name is None else _normed(getattr(module, name), part)
            for name, part in zip(self._norms, (q, k), strict=True)
        )
        first = [part[..., :rotated] for part in (q, k)]
        turned = _modeling(module).apply_rotary_pos_emb(*first, cos, sin)
        if rotated < layers.d_head:
            turned = [
                torch.cat((new, old[..., rotated:]), dim=-1)
                for new, old in zip(turned, (q, k), strict=True)
            ]
        return turned[0], turned[1], v

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return the heads, (batch, seq, heads, d_head), and the attention weights if the model's
        own function returns them."""
        dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
        given = {name: getattr(module, attribute, None) for name, attribute in self._extra.items()}
        extra = {name: value for name, value in given.items() if value is not None}
        others = any(kwargs.get(one) is not None for one in _OTHER_SCORES)
        same = q.shape[2] == k.shape[2] > 1 and not others
        known = None if dropout or not same else score_rules(module, mask, extra, kwargs)
        if known is not None:
            causal, rules = known
            k, v = k.to(q.dtype), v.to(q.dtype)
            out = attention(q, k, v, is_causal=causal, scale=module.scaling, rules=rules)
            return out.transpose(1, 2), None
        result: tuple[Tensor, Any] = attention_function(module)(
            module, q, k, v, mask, dropout=dropout, scaling=module.scaling, **extra, **kwargs
        )
        return result


def _normed(norm: Any, part: Tensor) -> Tensor:  # (batch, heads, seq, d_head)
    """Return the norm of each head, or of all heads of a token if it has a weight for each."""
    by_token = part.transpose(1, 2)
    weight = getattr(norm, "weight", None)
    of_all = weight is not None and weight.shape == (by_token.shape[2:].numel(),)
    out: Tensor = norm(by_token.flatten(2) if of_all else by_token)
    return out.reshape(by_token.shape).transpose(1, 2)


def _passes(module: nn.Module, name: str) -> bool:
    """Return whether the forward of a module passes an argument of that name to a function."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    return any(name == one or (isinstance(one, tuple) and name in one) for one in constants)


def _rotated_entries(module: Any, d_head: int, cos: Tensor) -> int:
    """Return how many entries of each head the model rotates: by its attributes, or else as many as
    its tables have, or all of them if the tables have one entry per pair."""
    entries: int | None = getattr(module, "rotary_ndims", None)
    parameters = getattr(module.config, "rope_parameters", None)
    if entries is None and parameters is not None:
        entries = int(d_head * parameters.get("partial_rotary_factor", 1.0))
    if entries is None and 2 * cos.shape[-1] == d_head:
        entries = d_head if _takes_pairs(_modeling(module).apply_rotary_pos_emb, d_head) else None
    return cos.shape[-1] if entries is None else entries


@functools.cache
def _takes_pairs(rotate: Callable[..., Any], d_head: int) -> bool:
    """Return whether a function rotates heads by tables that have one entry per pair."""
    head = torch.zeros(1, 1, 1, d_head, device="cpu")
    table = torch.zeros(1, 1, d_head // 2, device="cpu")
    try:
        return bool(rotate(head, head, table, table)[0].shape == head.shape)
    except Exception:
        # It takes two entries per pair.
        return False


def _is_eager(module: Any) -> bool:
    return bool(module.config._attn_implementation == "eager")


def score_rules(
    module: Any, mask: Tensor | None, extra: dict[str, Any], kwargs: dict[str, Any]
) -> tuple[bool, ScoreRules | None] | None:
    """Return the causal flag and the rules of a call of SDPA or of naive attention with a mask and
    extra arguments; None if they are not known."""
    if module.config._attn_implementation == "sdpa" and not extra.keys() - {"sliding_window"}:
        if mask is None:
            causal = kwargs.get("is_causal")
            return (getattr(module, "is_causal", True) if causal is None else bool(causal)), None
        rules = rules_of(mask)
    elif _is_eager(module) and not _weights_are_read(module, kwargs):
        rules = rules_of(mask)
        if rules is not None and ("softcap" in extra or "s_aux" in extra):
            rules = rules.with_scores(softcap=extra.get("softcap"), sinks=extra.get("s_aux"))
    else:
        return None
    if rules is None:
        return None
    return True, rules if rules.names else None


def _weights_are_read(module: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether somebody may read the weights: the caller of the model, or a hook."""
    wanted = kwargs.get("output_attentions", getattr(module.config, "output_attentions", False))
    return bool(wanted) or has_hooks(module)


def uses_eager_attention(model: nn.Module) -> bool:
    """Return whether a Hugging Face model computes its attention naively although it could use
    SDPA."""
    config = getattr(model, "config", None)
    return (
        getattr(config, "_attn_implementation", None) == "eager"
        and bool(getattr(model, "_supports_sdpa", False))
        and not getattr(config, "output_attentions", False)
        and hasattr(model, "set_attn_implementation")
        and not any(map(_sdpa_differs, model.modules()))
    )


def _sdpa_differs(module: nn.Module) -> bool:
    """Return whether the naive attention of a module computes something else than SDPA: some
    versions of transformers ignore soft-capping with SDPA although the model claims to support
    it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "eager_attention_forward" not in code.co_names:
        return False
    # Without dropout, which some modules apply themselves.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return not _equals_sdpa(module)
    except Exception:
        # Whatever one of them raises for what the other computes.
        return True
    finally:
        for part, mode in modes:
            part.training = mode


@torch.no_grad()
def _equals_sdpa(module: Any) -> bool:
    """Compare both on scores of all magnitudes, in float64, to which no setting of the matmul
    precision applies."""
    modeling = _modeling(module)
    device = next((one.device for one in module.parameters()), None)
    like: dict[str, Any] = {"device": device, "dtype": torch.float64}
    groups = getattr(module, "num_key_value_groups", 1)
    q, k, v = (
        torch.linspace(1, 7 * n, heads * 256, **like).sin().view(1, heads, 16, 16)
        for n, heads in ((3, groups), (5, 1), (8, 1))
    )
    q = q * torch.logspace(-1, 2, 16, **like)[:, None]
    mask = None
    if getattr(module, "is_causal", True):
        mask = torch.full((1, 1, 16, 16), -torch.inf, **like).triu(1)
    extra = {
        name: getattr(module, at, None) for name, at in _EXTRA.items() if _passes(module, name)
    }
    how = {"dropout": 0.0} | {name: value for name, value in extra.items() if value is not None}
    if _passes(module, "scaling"):
        how["scaling"] = 1.0
    functions = (modeling.eager_attention_forward, modeling.ALL_ATTENTION_FUNCTIONS["sdpa"])
    naive, fused = (one(module, q, k, v, mask, **how)[0] for one in functions)
    # Some compute the softmax in float32.
    return torch.allclose(naive, fused, rtol=1e-4, atol=1e-5)
