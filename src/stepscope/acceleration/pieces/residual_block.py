"""Blocks with residual adds: each add and the norm after it in one kernel, also from one block to
the next and to the norm after the last one, and norms in the dtype of the matmuls that read them.

A pre-norm block is recognized by how it calls its parts (`layout_of`); it returns its output in a
tuple if the original does (`Patch`). Layers of `nn.Transformer` may be post-norm, and have an MLP
that is not a module; the parts of BERT are post-norm, too: a linear layer and the norm of
its sum with the residual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.pieces.block_layout import CONSTANTS, Layout, layout_of
from stepscope.acceleration.pieces.mlp import activation_name
from stepscope.acceleration.pieces.norm import Norm, Sum, is_called_norm
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
    parallel: bool = False
    """True if it reads the same tensor as the branch before."""
    ff_dropout: str = ""
    """The last dropout of the MLP of a layer of `nn.Transformer`."""


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
_OF_MODULES = vars(nn.Module()).keys()


def find(model: nn.Module, norms: dict[nn.Module, Norm], copies: WeightCopies) -> Found:
    replacements, left = [], []
    layouts: dict[object, Layout | str] = {}
    for name, module in model.named_modules():
        block = _fused(module, norms, copies, layouts)
        if isinstance(block, _Block):
            replacements.append(Replacement(PIECE, name, module, block.forward, block.declines))
        elif block:
            left.append(Left(PIECE, name, block))
    return replacements, left


def _fused(
    module: nn.Module,
    norms: dict[nn.Module, Norm],
    copies: WeightCopies,
    layouts: dict[object, Layout | str],
) -> _Block | str:
    """Return the fused form of a block, or why it stays; empty if this is not one."""
    of_torch = next((some for kind, some in _OF_TORCH.items() if isinstance(module, kind)), ())
    is_post_norm = {name for name, _ in module.named_children()} == _POST_NORM
    layout: Layout | str = ""
    if of_torch:
        sublayers = [_with_mlp(one, module, copies) for one in of_torch]
    elif is_post_norm:
        sublayers = [Sublayer("LayerNorm", lambda module, x, _: module.dropout(module.dense(x)))]
    else:
        layout = _layout(module, layouts)
        if isinstance(layout, str):
            return layout
        sublayers = [Sublayer(one.norm, one.call, one.parallel) for one in layout.branches]
    if any(map(has_hooks, module.modules())):
        return "it has hooks"
    if any(getattr(module, one.norm) not in norms for one in sublayers):
        return "its norms compute something else or are excluded"
    if isinstance(layout, Layout):
        return _Traced(module, sublayers, norms, layout)
    return (_PostNorm if is_post_norm else _OfTorch)(module, sublayers, norms)


def _layout(module: nn.Module, known: dict[object, Layout | str]) -> Layout | str:
    """Return the layout of a module, that of an equal one if there was one before."""
    parts = dict(module.named_children())
    norms = [name for name, part in parts.items() if is_called_norm(part)]
    if not norms or len(norms) == len(parts):
        return ""
    own = {name: one for name, one in vars(module).items() if name not in _OF_MODULES}
    others = {name: id(one) for name, one in own.items() if not isinstance(one, CONSTANTS)}
    key = (
        type(module),
        frozenset((settings_of(module) | others).items()),
        tuple((name, type(one), *settings_of(one).items()) for name, one in parts.items()),
    )
    if key not in known:
        known[key] = layout_of(module, norms)
    return known[key]


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
        self._sublayers = sublayers
        self._norms = [norms[getattr(module, one.norm)] for one in sublayers]
        self._sum = Sum()
        parameters = inspect.signature(module.forward).parameters.values()
        named = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        self._names = [p.name for p in named] or [""]
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        """Return why the original runs."""
        of_block = [getattr(module, one.norm, None) for one in self._sublayers]
        if of_block != [norm.module for norm in self._norms]:
            return "its norms were exchanged"
        if not isinstance(self._given(args, kwargs)[0], Tensor) or len(args) > len(self._names):
            return "its input is not a tensor"
        if not all(norm.is_dense and not has_hooks(norm.module) for norm in self._norms):
            return "its norms are sharded or have hooks"
        return ""

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(module, *self._given(args, kwargs))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = self._defaults | dict(zip(self._names, args, strict=False)) | kwargs
        return given.pop(self._names[0], None), given

    def _run(self, module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        dtype, first = matmul_dtype(x), self._norms[0]
        x, read = first.read(x, dtype)
        reads, branch = {first: read}, None
        for norm, sublayer in zip(self._norms, self._sublayers, strict=True):
            if branch is not None and not sublayer.parallel:
                x, read = norm.of_sum(x, branch, dtype)
                reads, branch = {norm: read}, None
            elif norm not in reads:
                x, reads[norm] = norm.of_sum(x, None, dtype)
            added = sublayer.call(module, reads[norm], given)
            branch = added if branch is None else added + branch
        assert branch is not None
        return self._sum(x, branch)


class _Traced(_Block):
    """The fused forward of a block that is recognized by how it calls its parts."""

    def __init__(
        self,
        module: Any,
        sublayers: Sequence[Sublayer],
        norms: dict[nn.Module, Norm],
        layout: Layout,
    ) -> None:
        super().__init__(module, sublayers, norms)
        self._layout, self._settings = layout, settings_of(module)

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        if settings_of(module) != self._settings:
            return "its settings have changed"
        differs = self._layout.differs(module, self._given(args, kwargs)[1])
        return differs or super().declines(module, *args, **kwargs)


class _OfTorch(_Block):
    """The fused forward of a layer of `nn.Transformer`."""

    def _run(self, module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        if module.norm_first:
            return super()._run(module, x, given)
        for norm, sublayer in zip(self._norms, self._sublayers, strict=True):
            x = _norm_of_sum(norm, x, sublayer.call(module, x, given))
        return x


class _PostNorm(_Block):
    """The fused forward of LayerNorm(dropout(dense(x)) + residual), as in BERT."""

    def declines(self, module: Any, *args: Any, **kwargs: Any) -> str:
        if len(self._given(args, kwargs)[1]) != 1:
            return "it is called with other arguments than the residual"
        return super().declines(module, *args, **kwargs)

    def _run(self, module: Any, x: Tensor, given: dict[str, Any]) -> Tensor:
        (residual,) = given.values()
        return _norm_of_sum(self._norms[0], residual, self._sublayers[0].call(module, x, {}))


def _norm_of_sum(norm: Norm, x: Tensor, branch: Tensor) -> Tensor:
    """Return the norm of x + branch in the dtype of the original."""
    dtype = norm.output_dtype(torch.promote_types(x.dtype, branch.dtype))
    return norm.of_sum(x, branch, dtype)[1]
