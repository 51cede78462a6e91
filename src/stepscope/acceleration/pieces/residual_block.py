"""Blocks with residual adds: each add and the norm after it in one kernel, also from one block to
the next and to the norm after the last one, and norms in the dtype of the matmuls that read them.

A pre-norm block is recognized by the names of its parts (`LAYOUTS`): decoders of Hugging Face with
RMSNorm or LayerNorm, GPT-2 and nanoGPT, GPT-NeoX, Phi, the ViTs of transformers and timm. It calls
attention with its own arguments by name, and returns its output in a tuple if the original does
(`Patch`). Blocks with other names are recognized by how they call their parts (`layout_of`). Layers
of `nn.Transformer` may be post-norm, and have an MLP that is no module of its own; so are the parts
of BERT, a linear layer and the norm of its sum with the residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.pieces.block_layout import Layout, layout_of
from stepscope.acceleration.pieces.mlp import activation_name
from stepscope.acceleration.pieces.norm import Norm, Sum
from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    drops,
    has_hooks,
    is_plain_linear,
    settings_of,
)
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.activation_policy import NORMS
from stepscope.kernels.feed_forward import mlp
from stepscope.kernels.weight_copies import WeightCopies

PIECE = "residual block"


class Sublayer(NamedTuple):
    """A branch of a block: `call(module, read, arguments of the block)`, and its norm."""

    norm: str
    call: Callable[[Any, Tensor, dict[str, Any]], Any]
    parts: tuple[str, ...] = ()
    """The modules that it calls."""
    ff_dropout: str = ""
    """The last dropout of the MLP of a layer of `nn.Transformer`."""


def _attention(norm: str, *parts: str) -> Sublayer:
    """Return a sublayer of modules in a row; the first one gets the arguments of the block. Others
    are dropout, layer scale, stochastic depth or another norm."""

    def call(module: Any, read: Tensor, given: dict[str, Any]) -> Any:
        first = getattr(module, parts[0])
        output = first(read, **_with_own_positions(first, given))
        branch = output[0] if isinstance(output, tuple) else output
        for name in parts[1:]:
            branch = getattr(module, name)(branch)
        return branch

    return Sublayer(norm, call, parts)


def _mlp(norm: str, *parts: str) -> Sublayer:
    call = _attention(norm, *parts).call
    return Sublayer(norm, lambda module, read, _: call(module, read, {}), parts)


def _with_own_positions(attention: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the rotary positions of one kind of attention, where a block gets
    those of full attention and of sliding windows."""
    if not given.keys() >= _BOTH_POSITIONS:
        return given
    kind = "local" if getattr(attention, "is_sliding", False) else "global"
    others = {name: one for name, one in given.items() if name not in _BOTH_POSITIONS}
    return others | {_POSITIONS: given[f"{_POSITIONS}_{kind}"]}


_POSITIONS = "position_embeddings"
_BOTH_POSITIONS = {f"{_POSITIONS}_global", f"{_POSITIONS}_local"}
_FIRST, _SECOND = "input_layernorm", "post_attention_layernorm"
LAYOUTS = (
    (_attention(_FIRST, "self_attn"), _mlp(_SECOND, "mlp")),
    (
        _attention(_FIRST, "self_attn", _SECOND),
        _mlp("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    (_attention(_FIRST, "self_attn", "resid_dropout"), _mlp(_FIRST, "mlp", "resid_dropout")),
    (_attention(_FIRST, "self_attn"), _mlp(_SECOND, "mlp", "dropout")),
    (
        _attention(_FIRST, "self_attn", "resid_attn_dropout"),
        _mlp(_SECOND, "mlp", "resid_mlp_dropout"),
    ),
    (
        _attention(_FIRST, "attention", "post_attention_dropout"),
        _mlp(_SECOND, "mlp", "post_mlp_dropout"),
    ),
    (_attention("ln_1", "attn"), _mlp("ln_2", "mlp")),
    (_attention("norm1", "attn", "ls1", "drop_path1"), _mlp("norm2", "mlp", "ls2", "drop_path2")),
    (
        _attention("layernorm_before", "attention", "dropout"),
        _mlp("layernorm_after", "mlp", "dropout"),
    ),
)
"""Pre-norm blocks. Sublayers with the same norm are parallel."""
_OF_TORCH: dict[type[nn.Module], tuple[Sublayer, ...]] = {
    nn.TransformerEncoderLayer: (
        Sublayer(
            "norm1",
            lambda module, x, given: module._sa_block(
                x, given["src_mask"], given["src_key_padding_mask"], given["is_causal"]
            ),
        ),
        Sublayer("norm2", lambda module, x, _: module._ff_block(x), ff_dropout="dropout2"),
    ),
    nn.TransformerDecoderLayer: (
        Sublayer(
            "norm1",
            lambda module, x, given: module._sa_block(
                x, given["tgt_mask"], given["tgt_key_padding_mask"], given["tgt_is_causal"]
            ),
        ),
        Sublayer(
            "norm2",
            lambda module, x, given: module._mha_block(
                x,
                given["memory"],
                given["memory_mask"],
                given["memory_key_padding_mask"],
                given["memory_is_causal"],
            ),
        ),
        Sublayer("norm3", lambda module, x, _: module._ff_block(x), ff_dropout="dropout3"),
    ),
}
_POST_NORM = {"dense", "LayerNorm", "dropout"}


def find(model: nn.Module, norms: dict[nn.Module, Norm], copies: WeightCopies) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        parts = {name for name, _ in module.named_children()}
        sublayers = _sublayers(module, parts)
        if sublayers is None:
            replacements += _traced(name, module, norms)
            continue
        used = {one.norm for one in sublayers}
        other = parts - used.union(*(one.parts for one in sublayers))
        if any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, "it has hooks"))
        elif sublayers[0].parts and other:
            left.append(Left(PIECE, name, f"it has other parts: {', '.join(sorted(other))}"))
        elif any(getattr(module, norm) not in norms for norm in used):
            left.append(Left(PIECE, name, "its norms compute something else or are excluded"))
        else:
            kind = _PostNorm if parts == _POST_NORM else _Block
            with_mlp = [_with_mlp(one, module, copies) for one in sublayers]
            block = kind(module, with_mlp, norms)
            replacements.append(Replacement(PIECE, name, module, block.forward, block.declines))
    return replacements, left


def _sublayers(module: nn.Module, parts: set[str]) -> tuple[Sublayer, ...] | None:
    """Return the sublayers of a block; None if this is not one."""
    for kind, sublayers in _OF_TORCH.items():
        if isinstance(module, kind):
            return sublayers
    if parts == _POST_NORM:
        return (_mlp("LayerNorm", "dense", "dropout"),)
    found = []
    for sublayers in LAYOUTS:
        names = {name for one in sublayers for name in (one.norm, *one.parts)}
        if names <= parts:
            found.append((len(names), sublayers))
    return max(found, key=lambda one: one[0], default=(0, None))[1]


def _traced(name: str, module: nn.Module, norms: dict[nn.Module, Norm]) -> list[Replacement]:
    """Return the replacement of a block with other names of its parts; none if it is no block."""
    own = [name for name, child in module.named_children() if child in norms]
    if any(map(has_hooks, module.modules())):
        return []
    layout = layout_of(module, own)
    if layout is None:
        return []
    block = _Traced(module, layout, norms)
    return [Replacement(PIECE, name, module, block.forward, block.declines)]


def _with_mlp(sublayer: Sublayer, module: Any, copies: WeightCopies) -> Sublayer:
    """Return the MLP of a layer of `nn.Transformer` as one operation if its activation is known."""
    kind: Any = next((kind for kind in _OF_TORCH if isinstance(module, kind)), None)
    if not sublayer.ff_dropout or type(module)._ff_block is not kind._ff_block:
        return sublayer
    activation = activation_name(module.activation)
    layers = module.linear1, module.linear2
    if activation is None or not all(map(is_plain_linear, layers)):
        return sublayer
    weights = [layer.weight for layer in layers]

    def call(module: Any, read: Tensor, given: dict[str, Any]) -> Tensor:
        first, second = module.linear1, module.linear2
        # Other layers (an adapter), other parameters (sharded), later hooks, or dropout.
        same = first.weight is weights[0] and second.weight is weights[1]
        plain = all(map(is_plain_linear, (first, second)))
        dropping = drops(module.dropout) and module.dropout.training
        if not same or not plain or dropping:
            return sublayer.call(module, read, given)  # type: ignore[no-any-return]
        out = mlp(
            read,
            (first.weight,),
            second.weight,
            copies,
            activation=activation,
            biases=[layer.bias for layer in (first,) if layer.bias is not None],
            out_bias=second.bias,
            policy=NORMS,
        )
        return getattr(module, sublayer.ff_dropout)(out)  # type: ignore[no-any-return]

    return sublayer._replace(call=call)


class _Block:
    """The fused forward of one block."""

    def __init__(
        self, module: Any, sublayers: Sequence[Sublayer], norms: dict[nn.Module, Norm]
    ) -> None:
        self._calls = [one.call for one in sublayers]
        self._norms = [norms[getattr(module, one.norm)] for one in sublayers]
        self._sum = Sum()
        parameters = inspect.signature(module.forward).parameters.values()
        named = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        self._names = [p.name for p in named] or [""]
        self._defaults = {p.name: p.default for p in named if p.default is not p.empty}

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs. Cross-attention of GPT-2 is another block."""
        del module
        x, given = self._given(args, kwargs)
        if not isinstance(x, Tensor) or len(args) > len(self._names):
            return "its input is not a tensor"
        if any(name.startswith("encoder_") and one is not None for name, one in given.items()):
            return "it has cross-attention"
        if not all(norm.is_dense and not has_hooks(norm.module) for norm in self._norms):
            return "its norms are sharded or have hooks"
        return ""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        x, given = self._given(args, kwargs)
        given = {name: one for name, one in given.items() if not name.startswith("encoder_")}
        return self._run(module, x, given)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = self._defaults | dict(zip(self._names, args, strict=False)) | kwargs
        return given.pop(self._names[0], None), given

    def _run(self, module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        if not getattr(module, "norm_first", True):
            for norm, call in zip(self._norms, self._calls, strict=True):
                x = _norm_of_sum(norm, x, call(module, x, given))
            return x
        dtype, first = matmul_dtype(x), self._norms[0]
        x, read = first.read(x, dtype)
        branch = self._calls[0](module, read, given)
        parallel = getattr(module, "use_parallel_residual", False)
        for norm, call in zip(self._norms[1:], self._calls[1:], strict=True):
            if norm is not first:
                x, read = norm.of_sum(x, None if parallel else branch, dtype)
            added = call(module, read, given)
            branch = added + branch if parallel or norm is first else added
        return self._sum(x, branch)


class _Traced(_Block):
    """The fused forward of a block that is recognized by how it calls its parts."""

    def __init__(self, module: Any, layout: Layout, norms: dict[nn.Module, Norm]) -> None:
        sublayers = [Sublayer(one.norm, one.call, one.parts) for one in layout.branches]
        super().__init__(module, sublayers, norms)
        self._flags, self._settings = layout.flags, settings_of(module)

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        given = self._given(args, kwargs)[1]
        if any(given[name] != value for name, value in self._flags.items()):
            return "its flags have other values"
        if settings_of(module) != self._settings:
            return "its settings have changed"
        return super().declines(module, *args, **kwargs)


class _PostNorm(_Block):
    """The fused forward of LayerNorm(dropout(dense(x)) + residual), as in BERT."""

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        if len(self._given(args, kwargs)[1]) != 1:
            return "it is called with other arguments than the residual"
        return super().declines(module, *args, **kwargs)

    def _run(self, module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        (residual,) = given.values()
        return _norm_of_sum(self._norms[0], residual, self._calls[0](module, x, {}))


def _norm_of_sum(norm: Norm, x: Tensor, branch: Tensor) -> Tensor:
    """Return the norm of x + branch in the dtype of the original."""
    dtype = norm.output_dtype(torch.promote_types(x.dtype, branch.dtype))
    return norm.of_sum(x, branch, dtype)[1]
