"""A stand-in for a part of a step: it allocates what the part does, and computes nothing."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function
from torch.utils._python_dispatch import _disable_current_modes

_DEVICE = torch.device("cpu")


class Part(Protocol):
    """What a stand-in stands for."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors like its outputs."""

    @property
    def is_compiled(self) -> bool:
        """Whether its backward pass takes zeros for the gradients of outputs that nothing reads."""

    def allocated(self, what: str) -> Tensor:
        """Allocate its `saved`, `copies`, `forward` or `backward` bytes."""

    def retained(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return those that it saves as they are."""

    def keep_in_forward(self, copies: Tensor) -> None:
        """Refer to what is freed at the end of the forward pass."""


def stand_in(part: Part, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return outputs like those of a part; in the backward pass these tensors get gradients."""
    made: tuple[Tensor, ...] = _StandIn.apply(part, *tensors)  # type: ignore[no-untyped-call]
    return made


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Part, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        part.allocated("forward")
        part.keep_in_forward(part.allocated("copies"))
        ctx.saved = part.allocated("saved")
        outputs = [torch.empty_like(one) for one in part.outputs]
        is_trained = [one.requires_grad for one in part.outputs]
        ctx.mark_non_differentiable(*itertools.compress(outputs, map(operator.not_, is_trained)))
        ctx.save_for_backward(*part.retained(tensors, outputs))
        ctx.part = part
        with _disable_current_modes():
            ctx.trained = [
                torch.empty_like(one, device="meta")
                if one.requires_grad and part.is_compiled
                else None
                for one in part.outputs
            ]
        ctx.like = [
            (one.size(), one.stride(), one.dtype) if needed else None
            for one, needed in zip(tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zeros = [
            torch.empty_like(one, device=_DEVICE)
            for one, gradient in zip(ctx.trained, gradients, strict=True)
            if one is not None and gradient is None
        ]
        ctx.part.allocated("backward")
        del zeros
        # These bytes have the gradients too, while there is what they are computed from.
        ctx.saved = None
        return None, *(None if one is None else _gradient(*one) for one in ctx.like)


def _gradient(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """Return a gradient, which has memory for each element also where its tensor has not."""
    if 0 in stride:
        return torch.empty(size, dtype=dtype)
    return torch.empty_strided(size, stride, dtype=dtype)


def allocate(size: int, what: str, part: str = "blocks") -> Tensor:
    """Return a tensor of this many bytes; a ledger shows the name of the part for what is saved."""
    made = torch.empty(max(size, 0), dtype=torch.uint8)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if what == "saved" and hooks is not None:
        # A ledger counts it among what is saved for the backward pass.
        _saved(hooks[0], made, part)
    return made


def _saved(hook: Callable[[Tensor], Any], tensor: Tensor, part: str) -> Any:
    """Call a hook of saved tensors in a function of torch, whose name a ledger shows."""

    def call(hook: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        if torch._C._len_torch_function_stack() > 0:
            return handle_torch_function(call, (), hook, tensor)
        return hook(tensor)

    call.__name__ = part
    return call(hook, tensor)
