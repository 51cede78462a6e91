"""The Triton attention as torch operators, for autograd and torch.compile, and as an autograd
Function.

`stepscope::flash_forward` and `stepscope::flash_backward` are opaque to the compiler; their fake
implementations give it the shapes. Inputs are (B, H, M, D) and (B, H/G, N, D). Where no compiler,
dispatch mode or transform intercepts operators, the kernels are launched directly: a custom
operator in Python costs more CPU time than a short attention takes on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.attention.inputs import (
    as_four_dims,
    checked_inputs,
    default_scale,
    with_positive_scale,
)
from stepscope.attention.masking import causal_offset
from stepscope.attention.tiles import MAX_HEAD
from stepscope.attention.transforms import Passes, attend_under_transforms
from stepscope.torch_tools.derivatives import (
    differentiable_once,
    no_second_derivative,
    transforms_active,
)
from stepscope.torch_tools.triton_available import is_interpreted

MIN_MULTIPLY_ADDS = 1 << 34
"""Multiply-adds of one matmul below which a launch through torch's C++ dispatch is faster."""
_NAME = "Triton attention"
TUNED_CAPABILITY = 9
"""Major compute capability that the tiles are tuned for."""
MAX_PREFERRED_HEAD_DIM = 96
"""Largest head dimension at which the 16-bit kernels are preferred to cuDNN."""


@functools.cache
def _kernels() -> Any:
    from stepscope.attention.triton import launch as triton_launch

    return triton_launch


def _rows_contiguous(x: Tensor) -> Tensor:
    """Make the last dimension contiguous: the kernels assume a stride of one."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row; a row sees key j iff j <= row + shift."""
    q, k, v = _rows_contiguous(q), _rows_contiguous(k), _rows_contiguous(v)
    outputs: tuple[Tensor, Tensor] = _kernels().forward(
        q, k, v, scale=scale, causal=is_causal, shift=shift
    )
    return outputs


def _launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    shift: int,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    # Saved-tensor hooks may return `out` and `lse` with different strides.
    grad, q, k, v, out = map(_rows_contiguous, (grad, q, k, v, out))
    lse = lse.contiguous()
    grads: tuple[Tensor, Tensor, Tensor] = _kernels().backward(
        grad, q, k, v, out, lse, scale=scale, causal=is_causal, shift=shift, packed=packed
    )
    return grads


@torch.library.custom_op("stepscope::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
) -> tuple[Tensor, Tensor]:
    return _launch_forward(q, k, v, is_causal, scale, shift)


@flash_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    shift: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(_rows_contiguous(q)), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("stepscope::flash_backward", mutates_args=())
def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    shift: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_backward(grad, q, k, v, out, lse, is_causal, scale, shift)


@flash_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    shift: int,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(_rows_contiguous(x)) for x in (q, k, v)]
    return grads[0], grads[1], grads[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.is_causal, ctx.scale, ctx.shift = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    grads = flash_backward(grad, q, k, v, out, lse, ctx.is_causal, ctx.scale, ctx.shift)
    return (*grads, None, None, None)


def _raise_no_second_derivative(ctx: Any, *_: Tensor) -> None:  # noqa: ARG001
    raise RuntimeError(no_second_derivative(_NAME, "impl='reference'"))


flash_forward.register_autograd(_differentiate, setup_context=_save)
flash_backward.register_autograd(_raise_no_second_derivative)


def _can_launch_directly(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether nothing needs to intercept an operator: plain tensors, no compiler, no
    dispatch mode, no transform."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN_TENSOR_TYPES
        and type(k) in _PLAIN_TENSOR_TYPES
        and type(v) in _PLAIN_TENSOR_TYPES
        and torch._C._len_torch_dispatch_stack() == 0
        and not transforms_active()
    )


def _passes(is_causal: bool, scale: float, shift: int) -> Passes:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _attend(q, k, v, is_causal, scale, shift, direct=_can_launch_directly(q, k, v))

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        direct = _can_launch_directly(q, k, v) and type(grad) in _PLAIN_TENSOR_TYPES
        return _attend_backward(grad, q, k, v, out, lse, (is_causal, scale, shift), direct)

    return Passes(_NAME, forward, backward)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int, *, direct: bool
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp for tensors with any number of leading dimensions."""
    run: Callable[..., tuple[Tensor, Tensor]] = _launch_forward if direct else flash_forward
    if q.dim() == 4:
        return run(q, k, v, is_causal, scale, shift)
    out, lse = run(*[as_four_dims(x) for x in (q, k, v)], is_causal, scale, shift)
    return out.view(q.shape), lse.view(q.shape[:-1])


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settings: tuple[bool, float, int],
    direct: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v with any number of leading dimensions."""
    run: Callable[..., tuple[Tensor, ...]] = flash_backward
    if direct:
        # Outputs of an operator must not share memory.
        run = functools.partial(_launch_backward, packed=True)
    if q.dim() == 4:
        return run(grad, q, k, v, out, lse, *settings)
    heads = [as_four_dims(x) for x in (grad, q, k, v, out)]
    grads = run(*heads, lse.reshape(heads[1].shape[:-1]), *settings)
    return tuple(g.view(x.shape) for g, x in zip(grads, (q, k, v), strict=True))


_PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """Compute attention with the Triton kernels. Inputs have been checked and are supported."""
    q, factor = with_positive_scale(q, default_scale(q) if scale is None else scale)
    shift = causal_offset(q.shape[-2], k.shape[-2], causal_align) if is_causal else 0
    if _can_launch_directly(q, k, v):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return FlashAttentionTriton.attend(q, k, v, is_causal, factor, shift)
        q4, k4, v4 = as_four_dims(q), as_four_dims(k), as_four_dims(v)
        return _launch_forward(q4, k4, v4, is_causal, factor, shift)[0].view(q.shape)
    if transforms_active():
        return attend_under_transforms(q, k, v, _passes(is_causal, factor, shift))
    heads = [as_four_dims(x) for x in (q, k, v)]
    out: Tensor = flash_forward(*heads, is_causal, factor, shift)[0]
    return out.view(q.shape)


def refuses(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,
    is_causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    causal_align: str | None,  # noqa: ARG001
) -> str | None:
    interpreted = is_interpreted()
    if q.device.type != "cuda" and not interpreted:
        return f"q is on {q.device}: a Triton kernel needs a GPU (or TRITON_INTERPRET=1, slowly)"
    if q.dtype == torch.float64:
        return "q is float64: the kernels compute in float32"
    if q.dtype == torch.bfloat16 and interpreted:
        return "q is bfloat16: Triton's interpreter computes it wrongly; use float32 or float16"
    if q.shape[-1] > MAX_HEAD:
        return f"the head dimension is {q.shape[-1]}: at most {MAX_HEAD} is supported"
    if v.shape[-1] != q.shape[-1]:
        return f"the head dimension of v is {v.shape[-1]}, that of q {q.shape[-1]}: must be equal"
    return None


def leaves(
    q: Tensor,
    k: Tensor,
    v: Tensor,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    causal_align: str | None,  # noqa: ARG001
) -> str | None:
    """Return why another implementation is preferred although the kernels support the input."""
    if q.device.type != "cuda":
        return "on a CPU the kernels run in Triton's interpreter, which is for tests"
    if torch.cuda.get_device_capability(q.device)[0] != TUNED_CAPABILITY:
        return f"its tiles are tuned for GPUs of compute capability {TUNED_CAPABILITY}"
    if q.numel() * k.shape[-2] < MIN_MULTIPLY_ADDS:
        # The message has no size of the input: the compiler cannot format a symbolic one.
        return (
            f"below {MIN_MULTIPLY_ADDS:.1e} multiply-adds the launch takes longer than the kernel"
        )
    if q.dtype != torch.float32 and q.shape[-1] > MAX_PREFERRED_HEAD_DIM:
        limit = MAX_PREFERRED_HEAD_DIM
        return f"cuDNN, which torch uses here, is faster at head dimensions above {limit}"
    return None


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and the log-sum-exp of the scaled scores (natural logarithm, shaped
    like q without its last dimension). Differentiable once.
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = checked_inputs(q, k, v, is_causal, None, None)
        refusal = refuses(q, k, v, is_causal, None, None)
        if refusal:
            raise ValueError(refusal)
        return cls.attend(q, k, v, is_causal, default_scale(q), 0)

    @classmethod
    def attend(
        cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
    ) -> Tensor:
        """Compute attention of checked and supported inputs with a positive scale."""
        if transforms_active():
            return attend_under_transforms(q, k, v, _passes(is_causal, scale, shift))
        out: Tensor = super().apply(q, k, v, is_causal, scale, shift)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
    ) -> Tensor:
        direct = _can_launch_directly(q, k, v)
        out, lse = _attend(q, k, v, is_causal, scale, shift, direct=direct)
        ctx.settings = (is_causal, scale, shift)
        ctx.direct = direct
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Without create_graph no second derivative can be taken, so no guard is needed.
        return _guarded_gradients(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    grads = _attend_backward(grad, q, k, v, out, lse, ctx.settings, ctx.direct)
    return (*grads, None, None, None)


_guarded_gradients = differentiable_once(_NAME, "impl='reference'")(_gradients)
