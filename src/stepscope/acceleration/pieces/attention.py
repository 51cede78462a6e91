"""Self-attention of Hugging Face decoders: Q, K and V as one matmul, rotary positions in place, and
the fastest attention kernel.

These modules have `q_proj`, `k_proj`, `v_proj`, `o_proj` and `head_dim`, get the cosines and sines
of the positions, and call the attention function that the model's configuration names (Llama,
Mistral, Qwen, Gemma, SmolLM, …). Anything that the fused form does not cover (masks other than
causal, dropout, a filled cache, positions that differ within a batch) still has the fused
projection, and the rest as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    has_hooks,
    is_plain_linear,
)
from stepscope.attention import attention
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.rope import rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "attention"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_LAYERS = (*_PROJECTIONS, "o_proj")
_NORMS = ("q_norm", "k_norm")


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
            replacements.append(Replacement(PIECE, name, module, fused.forward))
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
        return same and empty

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
        name = module.config._attn_implementation
        dropout = getattr(module, "attention_dropout", 0.0) if module.training else 0.0
        if name == "sdpa" and mask is None and not dropout and q.shape[2] == k.shape[2] > 1:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            out = attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=causal, scale=module.scaling)
            return out.transpose(1, 2), None
        window = getattr(module, "sliding_window", None)
        extra = {} if window is None else {"sliding_window": window}
        result: tuple[Tensor, Any] = attention_function(module)(
            module, q, k, v, mask, dropout=dropout, scaling=module.scaling, **extra, **kwargs
        )
        return result


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
