"""The Triton attention as torch operators, for autograd and torch.compile, and as an autograd
Function.

`stepscope::flash_forward` and `stepscope::flash_backward` are opaque to the compiler; their fake
implementations give it the shapes. Inputs are (B, H, M, D) and (B, H/G, N, D). Where no compiler,
dispatch mode or transform intercepts operators, the kernels are launched directly: a custom
operator in Python costs more CPU time than a short attention takes on the GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stepscope.attention.call import NO_TRANSFORMS, AttentionCall, Backend, BoundAttention
from stepscope.attention.dropout import seeds_of
from stepscope.attention.inputs import as_four_dims, checked_call, with_positive_scale
from stepscope.attention.masking import causal_offset
from stepscope.attention.preference import reason_against
from stepscope.attention.specialized import Sizes
from stepscope.attention.tiles import MAX_HEAD
from stepscope.attention.visibility import key_intervals, query_intervals
from stepscope.torch_tools.derivatives import (
    differentiable_once,
    no_second_derivative,
    transforms_active,
)
from stepscope.torch_tools.triton_available import is_interpreted, nvidia_capability

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules
    from stepscope.attention.triton.launch import Forward

KernelRules = tuple[Any, ...]
"""The fields of `launch.Rules`, or empty: key intervals, query intervals, slopes, sinks, seeds,
soft cap, dropout."""
_NAME = "Triton attention"
TUNED_CAPABILITY = 9
"""Major compute capability that the tiles are tuned for."""


@functools.cache
def _kernels() -> Any:
    from stepscope.attention.triton import launch as triton_launch

    return triton_launch


def rows_contiguous(x: Tensor) -> Tensor:
    """Make the last dimension contiguous: the kernels assume a stride of one."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _kernel_rules(rules: KernelRules) -> Any:
    return _kernels().Rules(*[x.contiguous() if isinstance(x, Tensor) else x for x in rules])


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int, *rules: Any
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row; a row sees key j iff j <= row + shift,
    unless the rules have intervals."""
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    kernels = _kernels()
    more = {"rules": _kernel_rules(rules)} if rules else {}
    outputs: tuple[Tensor, Tensor] = kernels.forward(
        q, k, v, scale=scale, causal=is_causal, shift=shift, **more
    )
    return outputs


def launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    shift: int,
    *rules: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and the row sums of gradient times output."""
    # Saved-tensor hooks may return tensors with different strides.
    grad, q, k, v, out = map(rows_contiguous, (grad, q, k, v, out))
    lse = lse.contiguous()
    kernels = _kernels()
    more = {"rules": _kernel_rules(rules)} if rules else {}
    grads: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.backward(
        grad, q, k, v, out, lse, scale=scale, causal=is_causal, shift=shift, **more
    )
    return grads


@torch.library.custom_op("stepscope::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    shift: int,
    key_intervals: Tensor | None = None,
    query_intervals: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seeds: Tensor | None = None,
    softcap: float | None = None,
    dropout: float | None = None,
) -> tuple[Tensor, Tensor]:
    rules = (key_intervals, query_intervals, slopes, sinks, seeds, softcap, dropout)
    return launch_forward(q, k, v, is_causal, scale, shift, *(rules if _any_rule(rules) else ()))


@flash_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    shift: int,  # noqa: ARG001
    *rules: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_contiguous(q)), q.new_empty(q.shape[:-1], dtype=torch.float32)


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
    key_intervals: Tensor | None = None,
    query_intervals: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seeds: Tensor | None = None,
    softcap: float | None = None,
    dropout: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rules = (key_intervals, query_intervals, slopes, sinks, seeds, softcap, dropout)
    settings = (is_causal, scale, shift, *(rules if _any_rule(rules) else ()))
    return launch_backward(grad, q, k, v, out, lse, *settings)


def _any_rule(rules: KernelRules) -> bool:
    return any(rule is not None for rule in rules)


@flash_backward.register_fake
def _(
    grad: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,  # noqa: ARG001
    lse: Tensor,
    is_causal: bool,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    shift: int,  # noqa: ARG001
    *rules: Any,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(rows_contiguous(x)) for x in (q, k, v)]
    return grads[0], grads[1], grads[2], torch.empty_like(lse.contiguous())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *settings = inputs
    ctx.settings = tuple(settings[:3])
    rules = settings[3:] or [None] * _N_RULES
    tensors, ctx.numbers = rules[:_N_TENSORS], tuple(rules[_N_TENSORS:])
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, *tensors)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    grads = flash_backward(grad, q, k, v, out, lse, *ctx.settings, *tensors, *ctx.numbers)
    sinks = tensors[_SINKS]
    grad_sinks = None if sinks is None else sink_gradient(sinks, lse, grads[3])
    rest: list[Tensor | None] = [None] * (_N_SETTINGS + _N_RULES)
    rest[_N_SETTINGS + _SINKS] = grad_sinks
    return (*grads[:3], *rest)


_N_SETTINGS, _N_RULES, _N_TENSORS = 3, 7, 5
"""Numbers of arguments after q, k, v: is_causal, scale and shift, and the fields of `KernelRules`,
of which tensors come first."""
_SINKS = 3
"""Index of the sinks in `KernelRules`."""


def _raise_no_second_derivative(ctx: Any, *_: Tensor) -> None:  # noqa: ARG001
    raise RuntimeError(no_second_derivative(_NAME, "impl='reference'"))


flash_forward.register_autograd(_differentiate, setup_context=_save)
flash_backward.register_autograd(_raise_no_second_derivative)


def can_launch_directly(q: Tensor, k: Tensor, v: Tensor) -> bool:
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


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float,
    shift: int,
    *rules: Any,
    direct: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp for tensors with any number of leading dimensions."""
    run: Callable[..., tuple[Tensor, Tensor]] = launch_forward if direct else flash_forward
    if q.dim() == 4:
        return run(q, k, v, is_causal, scale, shift, *rules)
    out, lse = run(*[as_four_dims(x) for x in (q, k, v)], is_causal, scale, shift, *rules)
    return out.view(q.shape), lse.view(q.shape[:-1])


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settings: tuple[Any, ...],
    direct: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v with any number of leading dimensions, and delta."""
    run: Callable[..., tuple[Tensor, ...]] = launch_backward if direct else flash_backward
    if q.dim() == 4:
        return run(grad, q, k, v, out, lse, *settings)
    heads = [as_four_dims(x) for x in (grad, q, k, v, out)]
    grads = run(*heads, lse.reshape(heads[1].shape[:-1]), *settings)
    return tuple(g.view(x.shape) for g, x in zip(grads, (q, k, v, lse), strict=True))


_PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def sink_gradient(sinks: Tensor, log_sum_exp: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks (heads,): a sink is a score with a value of zero, so that
    its gradient is -P·D, summed over all rows of its head."""
    # A row without a visible key may have the log-sum-exp -inf; its output and delta are 0.
    probs = torch.exp(sinks[:, None] - log_sum_exp).masked_fill(delta == 0.0, 0.0)
    return -(probs * delta).sum((0, 2)).to(sinks.dtype)


class TritonAttention(Backend):
    """The Triton kernels."""

    def attend(self, call: AttentionCall) -> Tensor:
        q, factor = with_positive_scale(call.q, call.factor)
        if call.rules is not None:
            return _attend_by_rules(call._replace(q=q, scale=factor), call.rules)
        k, v, is_causal, shift = call.k, call.v, call.is_causal, call.shift
        if can_launch_directly(q, k, v):
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                return FlashAttentionTriton.attend(q, k, v, is_causal, factor, shift)
            q4, k4, v4 = as_four_dims(q), as_four_dims(k), as_four_dims(v)
            return launch_forward(q4, k4, v4, is_causal, factor, shift)[0].view(q.shape)
        heads = [as_four_dims(x) for x in (q, k, v)]
        out: Tensor = flash_forward(*heads, is_causal, factor, shift)[0]
        return out.view(q.shape)

    def bind(self, call: AttentionCall) -> BoundAttention:
        """Compute once what follows from the shapes."""
        general, factor = super().bind(call), call.factor
        if call.q.dim() != 4 or factor <= 0 or call.rules is not None:
            return general
        settings = call.is_causal, factor, call.shift
        forward = bound_forward(call.q, *settings)
        return bound_attention(general, forward, _BoundFlashAttention, settings)

    def refuses(self, call: AttentionCall) -> str | None:
        q, v, rules = call.q, call.v, call.rules
        interpreted = is_interpreted()
        if rules is not None and rules.bias is not None:
            return "the kernels have no additive bias (ALiBi has alibi_slopes)"
        if transforms_active():
            return NO_TRANSFORMS
        if q.device.type != "cuda" and not interpreted:
            return (
                f"q is on {q.device}: a Triton kernel needs a GPU (or TRITON_INTERPRET=1, slowly)"
            )
        if q.dtype == torch.float64:
            return "q is float64: the kernels compute in float32"
        if q.dtype == torch.bfloat16 and interpreted:
            return "q is bfloat16: Triton's interpreter computes it wrongly; use float32 or float16"
        if q.shape[-1] > MAX_HEAD:
            return f"the head dimension is {q.shape[-1]}: at most {MAX_HEAD} is supported"
        if v.shape[-1] != q.shape[-1]:
            return (
                f"the head dimension of v is {v.shape[-1]}, that of q {q.shape[-1]}: must be equal"
            )
        return None

    def leaves(self, call: AttentionCall) -> str | None:
        q, rules = call.q, call.rules
        if q.device.type != "cuda":
            return "on a CPU the kernels run in Triton's interpreter, which is for tests"
        if rules is not None and (not rules.only_drops or rules.dropout_seed is not None):
            # Other implementations read a mask of seq_q × seq_k, or do not support the rules.
            return None
        if rules is not None:
            return "torch's kernels have dropout, and draw their random numbers faster"
        if nvidia_capability(q.device)[0] != TUNED_CAPABILITY:
            return f"its tiles are tuned for GPUs of compute capability {TUNED_CAPABILITY}"
        repeatable = torch.are_deterministic_algorithms_enabled()
        sizes = sizes_of(q, call.k, call.is_causal)
        return reason_against("triton", sizes, q.element_size(), repeatable=repeatable)

    def details(self, call: AttentionCall) -> str | None:
        """Return which forward kernel runs on a GPU, and why not the other one."""
        if call.q.device.type != "cuda":
            return None
        heads = [rows_contiguous(as_four_dims(x)) for x in call[:3]]
        reason = _kernels().why_plain_forward(
            *heads, causal=call.is_causal, shift=call.shift, rules=call.rules is not None
        )
        if reason is None:
            return "its forward is the warp-specialized kernel for Hopper"
        return f"its forward is not the warp-specialized kernel for Hopper: {reason}"


TRITON = TritonAttention()


def bound_forward(q: Tensor, is_causal: bool, scale: float, shift: int) -> Forward:
    """Return `launch_forward` for inputs (B, H, M, D) that have the shapes, dtypes and device of
    one call with these queries."""

    def general(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return launch_forward(q, k, v, is_causal, scale, shift)

    bound: Forward = _kernels().bound_forward(
        q, general, scale=scale, causal=is_causal, shift=shift
    )
    return bound


def bound_attention(
    general: Callable[..., Tensor],
    forward: Forward,
    function: type[torch.autograd.Function],
    settings: tuple[Any, ...],
) -> Callable[..., Tensor]:
    """Return a function of q, k and v that launches `forward` directly, through the autograd
    `function` of (q, k, v, forward, settings) if gradients are needed, and that calls `general`
    where something may intercept operators."""
    # Below the `apply` of Python, which is for transforms.
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # `attention` calls bound functions outside of the compiler only.
        if (
            type(q) not in _PLAIN_TENSOR_TYPES
            or type(k) not in _PLAIN_TENSOR_TYPES
            or type(v) not in _PLAIN_TENSOR_TYPES
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return general(q, k, v)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            out: Tensor = apply(q, k, v, forward, settings)
            return out
        return forward(q, k, v)[0]

    return attend


def _attend_by_rules(call: AttentionCall, rules: ScoreRules) -> Tensor:
    q, k, v, is_causal, scale, causal_align, _ = call
    assert scale is not None
    shift = 0
    if is_causal or rules.alibi_slopes is not None:
        shift = causal_offset(q.shape[-2], k.shape[-2], causal_align)
    slopes, sinks = (
        None if x is None else x.to(torch.float32).contiguous()
        for x in (rules.alibi_slopes, rules.sinks)
    )
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    of_keys, of_queries = None, None
    if rules.hides_keys:
        lengths = call.lengths
        of_keys = key_intervals(rules, lengths)
        of_queries = query_intervals(rules, lengths) if differentiates else None
    seeds = seeds_of(rules, q.device)
    numbers = (None if x is None else float(x) for x in (rules.softcap, rules.dropout))
    of_rules = (of_keys, of_queries, slopes, sinks, seeds, *numbers)
    direct = can_launch_directly(q, k, v) and all(
        x is None or type(x) in _PLAIN_TENSOR_TYPES for x in (slopes, sinks, seeds)
    )
    if direct and differentiates:
        return FlashAttentionTriton.attend_as(q, k, v, (is_causal, scale, shift, *of_rules))
    return _attend(q, k, v, is_causal, scale, shift, *of_rules, direct=direct)[0]


def sizes_of(q: Tensor, k: Tensor, is_causal: bool) -> Sizes:
    """Return the sizes of inputs with any number of dimensions, all heads as those of one batch."""
    heads, key_heads = math.prod(q.shape[:-2]), math.prod(k.shape[:-2])
    return Sizes(1, heads, key_heads, q.shape[-2], k.shape[-2], q.shape[-1], is_causal)


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels: `apply(q, k, v, is_causal=False)`.

    Saves q, k, v, the output and the log-sum-exp of the scaled scores (natural logarithm, shaped
    like q without its last dimension). Differentiable once.
    """

    saves_output = True

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        call = checked_call(AttentionCall(q, k, v, is_causal))
        refusal = TRITON.refuses(call)
        if refusal:
            raise ValueError(refusal)
        return cls.attend(*call[:4], call.factor, 0)

    @classmethod
    def attend(
        cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shift: int
    ) -> Tensor:
        """Compute attention of checked and supported inputs with a positive scale."""
        out: Tensor = super().apply(q, k, v, is_causal, scale, shift)  # type: ignore[no-untyped-call]
        return out

    @classmethod
    def attend_as(cls, q: Tensor, k: Tensor, v: Tensor, settings: tuple[Any, ...]) -> Tensor:
        """Compute attention with the arguments of `flash_forward`."""
        out: Tensor = super().apply(q, k, v, *settings)  # type: ignore[no-untyped-call]
        return out

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        direct = can_launch_directly(q, k, v)
        out, lse = _attend(q, k, v, *settings, direct=direct)
        ctx.settings = settings[:_N_SETTINGS]
        tensors = settings[_N_SETTINGS:][:_N_TENSORS]
        ctx.numbers = settings[_N_SETTINGS + _N_TENSORS :]
        ctx.direct = direct
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: tuple[Tensor | None, ...] = _gradients(ctx, grad)
        return grads


class _BoundFlashAttention(FlashAttentionTriton):
    """The same for a launch that is bound to the shapes of its inputs, without rules."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Forward, settings: tuple[Any, ...]
    ) -> Tensor:
        out, lse = forward(q, k, v)
        ctx.settings, ctx.numbers, ctx.direct = settings, (), True
        ctx.save_for_backward(q, k, v, out, lse)
        return out


@differentiable_once(_NAME, "impl='reference'")
def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    settings = (*ctx.settings, *tensors, *ctx.numbers)
    # Compiled autograd traces this for a forward pass that was launched directly.
    direct = ctx.direct and not torch.compiler.is_compiling()
    *grads, delta = _attend_backward(grad, q, k, v, out, lse, settings, direct)
    rest: list[Tensor | None] = [None] * len(settings)
    if tensors and ctx.needs_input_grad[len(grads) + _N_SETTINGS + _SINKS]:
        rest[_N_SETTINGS + _SINKS] = sink_gradient(tensors[_SINKS], lse, delta)
    return (*grads, *rest)
