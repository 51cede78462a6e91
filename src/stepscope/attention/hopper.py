"""Attention on Hopper GPUs: our warp-specialized forward kernel, and cuDNN's backward kernel.

Each is the faster one of its pass. cuDNN adds up the gradient of q in no fixed order, so that
inputs are not supported while `torch.use_deterministic_algorithms` asks for repeatable results.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from stepscope.attention import ops, sdpa
from stepscope.attention.call import AttentionCall, Backend, BoundAttention
from stepscope.attention.inputs import as_four_dims
from stepscope.attention.preference import reason_against
from stepscope.attention.specialized import (
    CAPABILITY,
    FORWARD,
    KINDS,
    forward_kernel_of,
    speed_over,
)
from stepscope.torch_tools.derivatives import differentiable_once, transforms_active
from stepscope.torch_tools.triton_available import nvidia_capability

if TYPE_CHECKING:
    from stepscope.attention.triton.launch import Forward


class HopperAttention(Backend):
    """Our forward kernel for Hopper, and cuDNN's backward kernel."""

    def attend(self, call: AttentionCall) -> Tensor:
        q, k, v, is_causal, *_ = call
        differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if not differentiates or not ops.can_launch_directly(q, k, v):
            return ops.TRITON.attend(call)
        factor = call.factor
        heads = [as_four_dims(x) for x in (q, k, v)]

        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return ops.launch_forward(q, k, v, is_causal, factor, 0)

        out: Tensor = _CudnnBackward.apply(*heads, forward, (is_causal, factor))  # type: ignore[no-untyped-call]
        return out.view(q.shape)

    def bind(self, call: AttentionCall) -> BoundAttention:
        """Compute once what follows from the shapes."""
        if call.q.dim() != 4:
            return super().bind(call)
        settings = call.is_causal, call.factor
        forward = ops.bound_forward(call.q, *settings, 0)
        return ops.bound_attention(super().bind(call), forward, _CudnnBackward, settings)

    def refuses(self, call: AttentionCall) -> str | None:
        q, k, v, is_causal, scale, _, rules = call
        if rules is not None:
            return "cuDNN's backward kernel has no rules"
        if torch.compiler.is_compiling() or transforms_active():
            return "the compiler and transforms see other operators than those of the forward pass"
        if nvidia_capability(q.device)[0] != CAPABILITY:
            return f"it needs a Hopper GPU, and q is on {q.device}"
        # Before what takes longer.
        if q.element_size() != 2 or (q.shape[-1], is_causal) not in FORWARD:
            return f"its forward kernel is for {KINDS}"
        if torch.are_deterministic_algorithms_enabled():
            return "cuDNN's backward kernel is not deterministic"
        if is_causal and q.shape[-2] != k.shape[-2]:
            return "cuDNN has one alignment of the causal mask"
        if scale is not None and scale <= 0:
            return "cuDNN has positive scales only"
        q, k, v = map(ops.rows_contiguous, (q, k, v))
        call = call._replace(q=q, k=k, v=v)
        return ops.TRITON.refuses(call) or sdpa.refusal(SDPBackend.CUDNN_ATTENTION, call)

    def leaves(self, call: AttentionCall) -> str | None:
        """Return why another implementation is preferred: it was faster, or the forward kernel
        would be another one, or slower than cuDNN's."""
        from stepscope.attention.triton import specialized

        q, k = as_four_dims(call.q), as_four_dims(call.k)
        sizes = specialized.sizes_of(q, k, call.is_causal, 0)
        reason = reason_against("hopper", sizes, q.element_size())
        if reason is not None:
            return reason
        # Strides and addresses are not part of a cached decision: the forward decides on them.
        reason = specialized.refuses(
            q, k, causal=call.is_causal, shift=0, aligned=True, rules=False
        )
        kernel = forward_kernel_of(sizes)
        if reason is None and kernel is not None and speed_over("cudnn", sizes, kernel) < 1:
            return "cuDNN's forward is faster: too many rows of the last query tile would be empty"
        return reason


HOPPER = HopperAttention()


def _no_dropout(device: torch.device) -> Tensor:
    """Return the seed and the offset of a dropout that does not take place."""
    # The memory of a tensor that is created in a capture belongs to the graph.
    capturing = torch.cuda.is_current_stream_capturing()
    return _zero.__wrapped__(device) if capturing else _zero(device)


@functools.lru_cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


class _CudnnBackward(torch.autograd.Function):
    saves_output = True

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Forward, settings: tuple[bool, float]
    ) -> Tensor:
        out, lse = forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @differentiable_once("attention by cuDNN's backward kernel", "impl='reference'")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # cuDNN reads contiguous rows only, and strides are not part of a cached decision.
        q, k, v = ops.rows_contiguous(q), ops.rows_contiguous(k), ops.rows_contiguous(v)
        is_causal, scale = ctx.settings
        unused = _no_dropout(q.device)
        grads = _cudnn_backward()(
            grad, q, k, v, out, lse.unsqueeze(-1), unused, unused, None, None, None,
            q.shape[2], k.shape[2], 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return *grads, None, None


@functools.cache
def _cudnn_backward() -> Any:
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
