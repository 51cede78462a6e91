"""Self-attention of Hugging Face decoders: Q, K and V as one matmul, rotary positions in place, and
the fastest attention kernel.

These modules have `q_proj`, `k_proj`, `v_proj`, `o_proj` and `head_dim`, get the cosines and sines
of the positions, and call the attention function that the model's configuration names (Llama,
Mistral, Qwen, Gemma, SmolLM, gpt-oss, …). Sliding windows and packed documents are computed by the
rules of their masks (`mask_rules`), soft-capping and attention sinks of naive attention as in
`ScoreRules`. Anything that the fused form does not cover (padding, dropout, a filled cache,
positions that differ within a batch) still has the fused projection, and the rest as it was.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

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
from stepscope.attention.rules import ScoreRules
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.rope import rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "attention"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LAYERS = (*_PROJECTIONS, "o_proj")
_NORMS = ("q_norm", "k_norm")
_EXTRA = {"sliding_window": "sliding_window", "softcap": "attn_logit_softcapping", "s_aux": "sinks"}
"""Arguments of attention functions, and the attributes of modules from which they come."""
_MASKED = ("sdpa", "eager")
"""Attention functions that read masks only."""
_OTHER_SCORES = ("position_bias", "cache")
"""Arguments that change what SDPA computes."""


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    tables = RotaryTables()
    for name, module in model.named_modules():
        if not all(hasattr(module, layer) for layer in (*_LAYERS, "head_dim")):
            continue
        if not hasattr(_modeling(module), "apply_rotary_pos_emb"):
            continue
        if reason := _refused(module):
            left.append(Left(PIECE, name, reason))
        else:
            fused = _Attention(module, copies, tables)
            # Naive attention returns the weights, which no decoder block reads.
            unused = (1,) if _is_eager(module) else ()
            replacements.append(Replacement(PIECE, name, module, fused.forward, unused))
    return replacements, left


def _refused(module: Any) -> str:
    layers = [getattr(module, layer) for layer in _LAYERS]
    if not all(type(layer) is nn.Linear for layer in layers):
        return "its projections are not plain linear layers"
    if has_hooks(module) or not all(map(is_plain_linear, layers)):
        return "it has hooks"
    if len({layer.bias is None for layer in layers[:3]}) != 1:
        return "only some of its projections have a bias"
    known = {*_LAYERS, *_NORMS, "rotary_emb", "rotary_fn"}
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

    def __init__(self, module: Any, copies: WeightCopies, tables: RotaryTables) -> None:
        self._original = module.forward
        self._copies, self._tables = copies, tables
        self._weights = [getattr(module, layer).weight for layer in _LAYERS]
        self._extra = {
            name: attribute for name, attribute in _EXTRA.items() if _passes(module, name)
        }

    def forward(
        self,
        module: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if position_embeddings is None or not self._applies(module, past_key_values):
            return self._original(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        q, k, v = self._heads(module, hidden_states, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        heads, weights = self._attend(module, q, k, v, attention_mask, kwargs)
        merged = heads.reshape(*hidden_states.shape[:-1], -1)
        output = module.o_proj
        biases = () if output.bias is None else (output.bias,)
        return fused_linear(merged, (output.weight,), self._copies, biases), weights

    def _applies(self, module: Any, cache: Any) -> bool:
        """Return whether the projections are still those of before, and nothing was generated."""
        layers = [getattr(module, layer) for layer in _LAYERS]
        same = all(
            is_plain_linear(layer) and layer.weight is weight
            for layer, weight in zip(layers, self._weights, strict=True)
        )
        empty = cache is None or cache.get_seq_length(module.layer_idx) == 0
        # Some modules pass the window of the configuration, which these functions do not read.
        window = hasattr(module, "sliding_window") or "sliding_window" not in self._extra
        return same and empty and (window or module.config._attn_implementation in _MASKED)

    def _heads(
        self, module: Any, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, seq, d_head), the first two rotated."""
        projections = [getattr(module, name) for name in _PROJECTIONS]
        biases = [layer.bias for layer in projections if layer.bias is not None]
        weights = tuple(layer.weight for layer in projections)
        parts = fused_linear(x, weights, self._copies, biases)
        d_head = module.head_dim
        heads, key_heads = (weight.shape[0] // d_head for weight in weights[:2])
        shared = cos.shape[0] == 1 and cos.shape[-1] == d_head and not cos.requires_grad
        if shared and not any(hasattr(module, name) for name in _NORMS):
            return rotated_parts_(parts, *self._tables.of(cos, sin), heads, key_heads)
        sizes = [weight.shape[0] for weight in weights]
        q, k, v = (
            part.view(*part.shape[:-1], -1, d_head) for part in torch.split(parts, sizes, -1)
        )
        q, k = (
            getattr(module, name, nn.Identity())(part)
            for name, part in zip(_NORMS, (q, k), strict=True)
        )
        q, k = _modeling(module).apply_rotary_pos_emb(
            q.transpose(1, 2), k.transpose(1, 2), cos, sin
        )
        return q, k, v.transpose(1, 2)

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return the heads, (batch, seq, heads, d_head), and the attention weights if the model's
        own function returns them."""
        dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
        given = {name: getattr(module, attribute, None) for name, attribute in self._extra.items()}
        extra = {name: value for name, value in given.items() if value is not None}
        same = q.shape[2] == k.shape[2] > 1 and not any(kwargs.get(one) for one in _OTHER_SCORES)
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


def _passes(module: nn.Module, name: str) -> bool:
    """Return whether the forward of a module passes an argument of that name to a function."""
    constants = inspect.unwrap(type(module).forward).__code__.co_consts
    return any(name == one or (isinstance(one, tuple) and name in one) for one in constants)


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
    )
