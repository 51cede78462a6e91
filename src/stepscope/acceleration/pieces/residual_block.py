"""Pre-norm blocks of Hugging Face decoders: the residual add and the norm after it in one kernel,
and norms in the dtype of the matmuls that read them.

A block has exactly the parts `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stepscope.acceleration.pieces.norm import matched_norm
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.norm import normed_sum

PIECE = "residual block"
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


def find(model: nn.Module) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        parts = dict(module.named_children())
        if not parts.keys() >= _PARTS:
            continue
        forward = _forward(module, parts) if parts.keys() == _PARTS else None
        if forward is None:
            left.append(Left(PIECE, name, "it has other parts than two RMSNorms, attention, MLP"))
        elif any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, "it has hooks"))
        else:
            replacements.append(Replacement(PIECE, name, module, forward))
    return replacements, left


def _forward(module: nn.Module, parts: Mapping[str, nn.Module]) -> Any:
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    matches = [matched_norm(norm) for norm in norms]
    if None in matches:
        return None
    original = module.forward
    (first_eps, first_offset), (second_eps, second_offset) = matches  # type: ignore[misc]

    def forward(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, second = module.input_layernorm, module.post_attention_layernorm
        if args or has_hooks(first) or has_hooks(second):
            return original(hidden_states, *args, **kwargs)
        dtype = matmul_dtype(hidden_states)
        weight = first.weight + first_offset if first_offset else first.weight
        stream, read = normed_sum(hidden_states, None, weight, first_eps, dtype)
        branch, _ = module.self_attn(hidden_states=read.value, **kwargs)
        weight = second.weight + second_offset if second_offset else second.weight
        stream, read = normed_sum(stream, branch, weight, second_eps, dtype)
        return stream + module.mlp(read.value)

    return forward
