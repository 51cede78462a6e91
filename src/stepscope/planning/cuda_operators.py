"""What CUDA does otherwise than a CPU, on fake tensors of a CPU.

A machine without a GPU cannot run autograd on fake CUDA tensors, so that a prediction runs on a CPU
everywhere, and gets the operators, dtypes and defaults of CUDA here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.measure.autocast_rules import NARROW, CudaAutocast, rule_name
from stepscope.measure.dispatch import FunctionMode, OperatorMode

_NO_GRAPH_TASK = -1
_NARROW_DTYPES = (torch.float16, torch.bfloat16)
_DIMENSIONS = 4
"""Batch, heads, length, size of a head."""
_UNSHARED = 4
"""References to a sum of gradients that nothing else has: the engine and the call of the mode."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention as CUDA selects it: fused, with tensors of the size of its inputs, or naive."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if _is_fused(query, key, attn_mask):
        fused: Tensor = _FusedAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attn_mask, is_causal, dropout_p
        )
        return fused
    naive: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return naive


def _is_fused(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    if mask is not None and mask.requires_grad:
        return False
    if query.dtype is torch.float32:
        # The memory-efficient kernel has as many heads of keys as of queries.
        return query.shape[:-2] == key.shape[:-2]
    return query.dtype in (torch.bfloat16, torch.float16)


def _attention_outputs(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
) -> tuple[Tensor, Tensor]:
    """Outputs of every kernel of fused attention, without values."""
    del key, is_causal, dropout
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() == _DIMENSIONS and (query.dtype is torch.float32 or mask is not None):
        # The memory-efficient kernel writes (batch, seq, heads, d_head).
        out = query.new_empty(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    elif query.shape == shape:
        out = torch.empty_like(query)
    else:
        out = query.new_empty(shape)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _attention_gradients(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, is_causal
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _operator(name: str, run: Callable[..., Any]) -> Any:
    made = torch.library.custom_op(f"stepscope::{name}", run, mutates_args=())
    made.register_fake(run)
    return made


_predicted_attention = _operator("predicted_attention", _attention_outputs)
_predicted_attention_backward = _operator("predicted_attention_backward", _attention_gradients)


class _FusedAttention(torch.autograd.Function):
    """Allocates and saves what fused attention does. Dropout saves only a seed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, causal: bool, dropout: float
    ) -> Tensor:
        out: Tensor
        out, log_sum_exp = _predicted_attention(query, key, value, mask, causal, dropout)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        gradients: Any = _predicted_attention_backward(query, key, value, gradient, ctx.causal)
        return *gradients, None, None, None


def _wide_softmax_output(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _wide_softmax_gradient(gradient: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    del out
    return gradient.new_empty(gradient.shape, dtype=dtype)


_predicted_softmax = _operator("predicted_softmax", _wide_softmax_output)
_predicted_softmax_backward = _operator("predicted_softmax_backward", _wide_softmax_gradient)


class _WideSoftmax(torch.autograd.Function):
    """Allocates and saves what a softmax or its logarithm in float32 does for 16-bit inputs: CUDA
    reads and writes them within its kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = _predicted_softmax(x)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _predicted_softmax_backward(gradient, *ctx.saved_tensors, ctx.dtype)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if target.is_floating_point() or label_smoothing:
        return functional.cross_entropy(
            input.float(), target, weight, size_average, ignore_index, reduce, reduction,
            label_smoothing,
        )  # fmt: skip
    logarithms = _WideSoftmax.apply(input)  # type: ignore[no-untyped-call]
    return functional.nll_loss(
        logarithms, target, weight, size_average, ignore_index, reduce, reduction
    )


def _softmax(input: Tensor, *_: Any, **__: Any) -> Tensor:
    out: Tensor = _WideSoftmax.apply(input)  # type: ignore[no-untyped-call]
    return out


_OF_16_BIT = {"cross_entropy": _cross_entropy, "softmax": _softmax, "log_softmax": _softmax}
"""Operators that take 16-bit inputs where autocast runs them in float32."""


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout that saves a boolean mask."""
    if not training or p == 0.0:
        return input
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(out) if inplace else out


_REPLACED: dict[Any, Any] = {
    functional.scaled_dot_product_attention: attention,
    functional.dropout: dropout,
}


class CudaOperators(FunctionMode):
    """Calls what allocates and saves the same tensors as the operators of CUDA."""

    def __enter__(self) -> Self:
        self._patches = [
            patch.object(functional, original.__name__, _replaced(original, replacement))
            for original, replacement in _REPLACED.items()
        ]
        for one in self._patches:
            one.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for one in self._patches:
            one.stop()

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return _REPLACED.get(function, function)(*arguments, **keywords)


def _replaced(original: Any, replacement: Any) -> Any:
    """Calls within functions of torch, such as `multi_head_attention_forward`, reach no mode."""

    @wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        in_mode = torch._C._len_torch_function_stack() > 0
        return (original if in_mode else replacement)(*arguments, **keywords)

    return call


class CudaDtypes(CudaAutocast):
    """Within `torch.autocast("cpu")`, which casts the inputs of matmuls: the other dtypes as on
    CUDA."""

    replaces = True
    """Whether functions whose kernels read other dtypes are replaced."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        replaced = _OF_16_BIT.get(rule_name(function)) if self.replaces else None
        first = arguments[0] if arguments else None
        if replaced and isinstance(first, Tensor) and first.dtype in _NARROW_DTYPES:
            wanted = keywords.get("dtype")
            if wanted is torch.float32 or (wanted is None and torch.is_autocast_enabled("cpu")):
                return replaced(*arguments, **keywords)
        return super().run(function, arguments, keywords)

    def dtype_of(self, name: str, inputs: Any) -> torch.dtype | None:
        if name in NARROW or not torch.is_autocast_enabled("cpu"):
            return None
        return super().dtype_of(name, inputs)


class InPlaceSums(OperatorMode):  # type: ignore[no-untyped-call]
    """Adds gradients in place where autograd does.

    Autograd never writes to tensors of Python classes, such as fake ones. For a weight that is used
    twice this would be one more gradient than on a GPU.
    """

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if (
            function is torch.ops.aten.add.Tensor
            and torch._C._current_graph_task_id() != _NO_GRAPH_TASK
            and not torch.is_grad_enabled()
            and isinstance(arguments[1], Tensor)
            and arguments[0].shape == arguments[1].shape
            and arguments[0].dtype == arguments[1].dtype
            and arguments[0]._use_count() <= _UNSHARED
        ):
            return arguments[0].add_(*arguments[1:])
        return function(*arguments, **keywords)


def use_cuda_defaults(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all parameters of a group together, as it does on CUDA by default."""
    for group in (*optimizer.param_groups, optimizer.defaults):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable")
