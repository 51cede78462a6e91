"""Blocks with LayerNorm: the residual add and the norm after it in one kernel, and norms in the
dtype of the matmuls that read them.

A block is recognized by the names of its parts (`LAYOUTS`): those of GPT-2 and nanoGPT, GPT-NeoX,
Phi, the ViTs of transformers and timm, and pre-norm `nn.TransformerEncoderLayer`. It calls
attention with its own arguments by name. Post-norm parts of BERT, a linear layer and the norm of
its sum with the residual, are one operation too.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.pieces.norm import OutputDtypes, matched_layer_norm
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.norm import normed_sum

PIECE = "residual block"


class Layout(NamedTuple):
    """Attributes of the parts of a pre-norm block."""

    norms: tuple[str, ...]
    """Of attention and of the MLP; one norm for both in a parallel block."""
    attention: str
    mlp: str
    after_attention: tuple[str, ...] = ()
    """Dropout, layer scale or stochastic depth."""
    after_mlp: tuple[str, ...] = ()

    @property
    def parts(self) -> set[str]:
        return {*self.norms, self.attention, self.mlp, *self.after_attention, *self.after_mlp}


LAYOUTS = (
    Layout(("ln_1", "ln_2"), "attn", "mlp"),
    Layout(("norm1", "norm2"), "attn", "mlp", ("ls1", "drop_path1"), ("ls2", "drop_path2")),
    Layout(
        ("input_layernorm", "post_attention_layernorm"),
        "attention",
        "mlp",
        ("post_attention_dropout",),
        ("post_mlp_dropout",),
    ),
    Layout(("input_layernorm",), "self_attn", "mlp", ("resid_dropout",), ("resid_dropout",)),
    Layout(("layernorm_before", "layernorm_after"), "attention", "mlp", ("dropout",), ("dropout",)),
)
_POST_NORM = {"dense", "LayerNorm", "dropout"}


def find(model: nn.Module) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        forward = _forward(module)
        if forward is None:
            continue
        if any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, "it has hooks"))
        else:
            replacements.append(Replacement(PIECE, name, module, forward))
    return replacements, left


def _forward(module: nn.Module) -> Any:
    """Return the fused forward; None if this is not such a block."""
    parts = {name for name, _ in module.named_children()}
    layout = next((layout for layout in LAYOUTS if layout.parts == parts), None)
    if layout is not None:
        return _block_forward(module, layout)
    if isinstance(module, nn.TransformerEncoderLayer) and module.norm_first:
        return _encoder_forward(module)
    return _post_norm_forward(module) if parts == _POST_NORM else None


class _Norm:
    """A LayerNorm of a block, fused with the residual add before it."""

    def __init__(self, name: str, epsilon: float) -> None:
        self._name, self._epsilon = name, epsilon

    def applies(self, module: Any) -> bool:
        norm = getattr(module, self._name)
        return type(norm.weight) is nn.Parameter and not has_hooks(norm)

    def __call__(
        self, module: Any, x: Tensor, branch: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm."""
        norm = getattr(module, self._name)
        stream, normed = normed_sum(
            x,
            branch,
            norm.weight,
            self._epsilon,
            dtype,
            bias=norm.bias,
            centered=True,
            through=True,
        )
        return stream, normed.value


def _norms(module: nn.Module, names: tuple[str, ...]) -> list[_Norm] | None:
    epsilons = [matched_layer_norm(getattr(module, name)) for name in names]
    norms = [_Norm(n, eps) for n, eps in zip(names, epsilons, strict=True) if eps is not None]
    return norms if len(norms) == len(names) else None


def _block_forward(module: Any, layout: Layout) -> Any:
    norms = _norms(module, layout.norms)
    if norms is None:
        return None
    original = module.forward
    parameters = list(inspect.signature(original).parameters.values())
    named = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    first, *others = (p.name for p in named)
    defaults = {p.name: p.default for p in named[1:] if p.default is not p.empty}

    def branch_of(module: Any, names: tuple[str, ...], output: Any) -> Any:
        branch = output[0] if isinstance(output, tuple) else output
        for name in names:
            branch = getattr(module, name)(branch)
        return branch

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = defaults | dict(zip(others, args[1:], strict=False)) | kwargs
        x = args[0] if args else given.pop(first)
        # Cross-attention is another block.
        encoder = [given.pop(name) for name in list(given) if name.startswith("encoder_")]
        if any(value is not None for value in encoder) or not all(n.applies(module) for n in norms):
            return original(*args, **kwargs)
        attention, mlp = getattr(module, layout.attention), getattr(module, layout.mlp)
        dtype = matmul_dtype(x)
        stream, read = norms[0](module, x, None, dtype)
        attended = branch_of(module, layout.after_attention, attention(read, **given))
        if len(norms) == 2 and not getattr(module, "use_parallel_residual", False):
            stream, read = norms[1](module, stream, attended, dtype)
            return stream + branch_of(module, layout.after_mlp, mlp(read))
        if len(norms) == 2:
            stream, read = norms[1](module, stream, None, dtype)
        return branch_of(module, layout.after_mlp, mlp(read)) + attended + stream

    return forward


def _encoder_forward(module: nn.TransformerEncoderLayer) -> Any:
    norms = _norms(module, ("norm1", "norm2"))
    if norms is None:
        return None
    original = module.forward

    def forward(
        module: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        masks = src_mask, src_key_padding_mask
        # Boolean masks have to be converted first.
        if any(mask is not None for mask in masks) or not all(n.applies(module) for n in norms):
            return original(src, *masks, is_causal=is_causal)
        dtype = matmul_dtype(src)
        stream, read = norms[0](module, src, None, dtype)
        attended = module._sa_block(read, None, None, is_causal=is_causal)
        stream, read = norms[1](module, stream, attended, dtype)
        return stream + module._ff_block(read)

    return forward


def _post_norm_forward(module: Any) -> Any:
    """Return the forward of LayerNorm(dropout(dense(x)) + residual), as in BERT."""
    norms = _norms(module, ("LayerNorm",))
    if norms is None:
        return None
    original = module.forward
    dtypes = OutputDtypes(module.LayerNorm)

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 2 or not norms[0].applies(module):
            return original(*args, **kwargs)
        hidden_states, residual = args
        branch = module.dropout(module.dense(hidden_states))
        total = torch.promote_types(branch.dtype, residual.dtype)
        dtype = dtypes.of(total, residual.device, module.LayerNorm.weight)
        return norms[0](module, residual, branch, dtype)[1]

    return forward
