"""What CUDA does otherwise than a CPU, on fake tensors of a CPU.

A machine without a GPU cannot run autograd on fake CUDA tensors, so that a prediction runs on a CPU
everywhere, and gets the operators, dtypes and defaults of CUDA here.
"""

from __future__ import annotations

from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.measure.autocast_rules import NARROW, CudaAutocast

_NO_GRAPH_TASK = -1
_UNSHARED = 4
"""References to a sum of gradients that nothing else has: the engine and the call of the mode."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    *arguments: Any, **keywords: Any
) -> Tensor:  # fmt: skip
    """Fused attention. That of a CPU has no dropout, for which CUDA's saves only a seed."""
    del dropout_p
    return _ATTENTION(query, key, value, attn_mask, 0.0, *arguments, **keywords)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout that saves a boolean mask."""
    if not training or p == 0.0:
        return input
    out: Tensor = torch.native_dropout(input, p, True)[0]
    return input.copy_(out) if inplace else out


_ATTENTION = functional.scaled_dot_product_attention
_REPLACED: dict[Any, Any] = {_ATTENTION: _attention, functional.dropout: _dropout}


class CudaOperators(TorchFunctionMode):
    """Calls what saves the same tensors as the operators of CUDA."""

    def __enter__(self) -> Self:
        # Calls within functions of torch, such as `multi_head_attention_forward`, do not reach a
        # mode.
        self._patches = [
            patch.object(functional, original.__name__, replacement)
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

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        del types
        return _REPLACED.get(function, function)(*arguments, **(keywords or {}))


class CudaDtypes(CudaAutocast):
    """Within `torch.autocast("cpu")`, which casts the inputs of matmuls: the other dtypes as on
    CUDA."""

    def __init__(self) -> None:
        super().__init__(torch.float32)

    def dtype_of(self, name: str, inputs: Any) -> torch.dtype | None:
        if name in NARROW or not torch.is_autocast_enabled("cpu"):
            return None
        return super().dtype_of(name, inputs)


class InPlaceSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds gradients in place where autograd does.

    Autograd never writes to tensors of Python classes, such as fake ones. For a weight that is used
    twice this would be one more gradient than on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
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
        return function(*arguments, **(keywords or {}))


def use_cuda_defaults(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update all parameters of a group together, as it does on CUDA by default."""
    for group in (*optimizer.param_groups, optimizer.defaults):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable")
