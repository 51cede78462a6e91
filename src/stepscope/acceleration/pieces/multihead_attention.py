"""`nn.MultiheadAttention` as self-attention: one matmul for Q, K and V with heads as views of it,
one gradient of all three, and the fastest attention kernel.

It covers calls without attention weights, padding and masks other than the causal one that
`is_causal` states: torch passes that flag to its kernel instead of the mask. Layers of
`nn.Transformer` make such calls. In all others, cross-attention too, the original runs. Dropout of
the weights is that of torch's SDPA, with the same random numbers as before.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from stepscope.acceleration.pieces.attention import PIECE
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention import ScoreRules, attention
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.qkv import projected_heads
from stepscope.kernels.weight_copies import WeightCopies


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if type(module) is not nn.MultiheadAttention:
            continue
        if reason := _refused(module):
            left.append(Left(PIECE, name, reason))
        else:
            fused = _Attention(module, copies)
            replacements.append(Replacement(PIECE, name, module, fused.forward, fused.declines))
    return replacements, left


def _refused(module: Any) -> str:
    if any(map(has_hooks, module.modules())):
        return "it has hooks"
    if module.in_proj_weight is None:
        return "its keys or values have another width than its queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key"
    if type(module.out_proj) is not NonDynamicallyQuantizableLinear:
        return "its output projection is not a plain linear layer"
    return ""


class _Attention:
    """The fused forward of one module."""

    def __init__(self, module: nn.MultiheadAttention, copies: WeightCopies) -> None:
        self._copies = copies
        self._signature = inspect.signature(nn.MultiheadAttention.forward)
        self._weights = module.in_proj_weight, module.out_proj.weight

    def declines(self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs."""
        call = self._call(module, args, kwargs)
        x = call["query"]
        weights = module.in_proj_weight, module.out_proj.weight
        same = all(one is other for one, other in zip(weights, self._weights, strict=True))
        if not same or _refused(module):
            return "its layers were exchanged or have hooks"
        if call["key"] is not x or call["value"] is not x:
            return "it is cross-attention"
        if call["need_weights"]:
            return "it returns attention weights"
        if call["key_padding_mask"] is not None:
            return "it is called with a padding mask"
        if (call["attn_mask"] is not None) != call["is_causal"]:
            return "it is called with a mask and without is_causal"
        if x.is_nested or x.dim() != 3 or not x.is_floating_point():
            return "its input is not a batch of sequences"
        return ""

    def forward(self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        call = self._call(module, args, kwargs)
        heads = projected_heads(
            call["query"],
            (module.in_proj_weight,),
            self._copies,
            () if module.in_proj_bias is None else (module.in_proj_bias,),
            heads=module.num_heads,
        )
        if not module.batch_first:
            # (seq, heads, batch, d_head)
            heads = tuple(part.transpose(0, 2) for part in heads)  # type: ignore[assignment]
        dropout = module.dropout if module.training else 0.0
        out = attention(
            *heads,
            is_causal=call["is_causal"],
            rules=ScoreRules(dropout=dropout) if dropout else None,
            impl="sdpa" if dropout else "auto",
        )
        by_token = out.transpose(1, 2) if module.batch_first else out.permute(2, 0, 1, 3)
        output = module.out_proj
        biases: tuple[Tensor, ...] = () if output.bias is None else (output.bias,)
        return fused_linear(by_token.flatten(2), (output.weight,), self._copies, biases), None

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = self._signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments
