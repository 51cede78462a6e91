"""Calls of PyTorch's fused attention in the form that its kernels take: four dimensions, and all
samples of a `vmap` in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute attention; `options` are those of `scaled_dot_product_attention`. With three
    dimensions, or inside of `vmap`, that function would run its naive implementation, or one call
    after the other."""
    if torch._C._are_functorch_transforms_active():
        mask = options.pop("attn_mask", None)
        return _Batched.apply(q, k, v, mask, options)  # type: ignore[no-any-return, no-untyped-call]
    if q.dim() != 3:
        return functional.scaled_dot_product_attention(q, k, v, **options)
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    q, k, v = (one.unsqueeze(1) for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).squeeze(1)


class _Batched(torch.autograd.Function):
    """Attention whose rule for `vmap` makes the mapped dimension one of the kernel's batch."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        return fused(q, k, v, attn_mask=mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError("the operators of the rule for vmap have their own backward")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, int]:
        inputs = [
            _first(one, dim, info.batch_size)
            for one, dim in zip((q, k, v), in_dims[:3], strict=True)
        ]
        if mask is not None and in_dims[3] is not None:
            mask = _first(mask, in_dims[3], info.batch_size)
            while mask.dim() < inputs[0].dim():
                mask = mask.unsqueeze(1)
        elif mask is not None and mask.dim() == inputs[0].dim():
            mask = mask.unsqueeze(0)
        shape = inputs[0].shape
        if len(shape) > 4:
            if mask is not None and mask.dim() > 2:
                mask = mask.expand(*shape[:-1], mask.shape[-1]).flatten(0, -4)
            inputs = [one.flatten(0, -4) for one in inputs]
        out = fused(*inputs, attn_mask=mask, **options)
        return out.reshape(*shape[:-1], out.shape[-1]), 0


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor with the mapped dimension first."""
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)
