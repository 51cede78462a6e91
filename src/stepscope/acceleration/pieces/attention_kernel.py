"""The attention kernel alone, in modules that no other piece knows: classes of a user, with rotary
positions or norms of q and k.

The forward of the module runs as it is. Within it, naive attention (`attention/substitute.py`) and
calls of `scaled_dot_product_attention` use the fastest attention kernel; projections stay. With a
mask that is not causal, or dropout of the weights, the original operations run. A module without
such attention is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.attention.constants import KnownMasks, MasksOfCall
from stepscope.acceleration.attention.deferred import materialized
from stepscope.acceleration.attention.substitute import fused_attention
from stepscope.acceleration.checks import NotReplacedError
from stepscope.acceleration.forward_registry import forward_below
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.acceleration.unrecognized import unrecognized_attention
from stepscope.attention import attention

PIECE = "attention kernel"
_UNKNOWN = "this form of attention is not known"
_DROPS = "it drops attention weights"
_HOOKS = "it has hooks"
_KEPT = "it keeps attention weights"
_SDPA = functional.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Those of SDPA that may be positional."""


def find(model: nn.Module, known: Sequence[str]) -> Found:
    """`known` has the names of the attention modules of other pieces."""
    replacements, left = [], []
    masks = KnownMasks()
    for name in unrecognized_attention(model, known):
        module = model.get_submodule(name)
        if any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, _HOOKS))
            continue
        fused = _Attention(module, masks)
        replacements.append(Replacement(PIECE, name, module, fused.forward, fused.declines))
    return replacements, left


class _Attention:
    def __init__(self, module: nn.Module, masks: KnownMasks) -> None:
        self._original = forward_below(module)
        self._masks = masks
        self._is_known = self._keeps_weights = False

    def declines(self, module: nn.Module, *args: Any, **kwargs: Any) -> str:
        del args, kwargs
        if any(map(has_hooks, module.modules())):
            return _HOOKS
        return _KEPT if self._keeps_weights else ""

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kernels = _Kernels(MasksOfCall(self._masks, module.buffers()))
        with kernels:
            out = materialized((self._original(*args, **kwargs),))[0]
        self._keeps_weights = kernels.is_referenced
        if not self._is_known and (self._keeps_weights or not kernels.substituted):
            # Its first call is the comparison with the original.
            why = _DROPS if kernels.drops_weights else _UNKNOWN
            raise NotReplacedError(_KEPT if self._keeps_weights else why)
        self._is_known = True
        return out


class _Kernels(fused_attention):
    """Attention by the fastest kernel, with the results of the original."""

    exact = True

    def __init__(self, masks: MasksOfCall) -> None:
        super().__init__()
        self.masks: MasksOfCall = masks

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        if function is _SDPA:
            return self._sdpa(*materialized(arguments), **materialized(keywords or {}))
        result = super().__torch_function__(function, types, arguments, keywords)
        self.masks.note(function, arguments, keywords or {}, result)
        return result

    def _sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute a call of `scaled_dot_product_attention`."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        if mask is not None and not causal and self._is_causal(mask):
            mask, causal = None, True
        self.drops_weights |= bool(given.get("dropout_p"))
        if given.get("dropout_p") or mask is not None:
            return _SDPA(*args, **kwargs)
        self.substituted += 1
        q, k, v = (given[name] for name in _ARGUMENTS[:3])
        return _attend(q, k, v, causal, given.get("scale"), bool(given.get("enable_gqa")))

    def _is_causal(self, mask: Tensor) -> bool:
        if mask.dtype == torch.bool:
            return self.masks.causal(mask)
        return self.masks.causal_together((), (mask,))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _attend(q, k, v, options["is_causal"], options["scale"], grouped=False)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """Compute attention without a mask, or with a causal one. SDPA broadcasts batches, and has one
    alignment of causal masks that are not square."""
    same_batch = grouped or q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not same_batch or (causal and q.shape[-2] != k.shape[-2]):
        return _SDPA(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return attention(q, k, v, is_causal=causal, scale=scale)
