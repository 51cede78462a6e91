"""FLOPs of any program, counted operator by operator at the dispatcher.

Counted as everywhere here: two for each multiply-add of the matrix products and convolutions,
those inside of recurrent layers too, causal attention at half, nothing for anything else. What a
checkpointed segment computes again in the backward is counted apart, and what fused attention
computes again not at all: neither is part of the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stepscope.torch_tools.triton_available import tf32_is_enabled

Count = Callable[..., int]

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
_RECURRENT_WEIGHT = re.compile(r"weight\d?")
_CHECKPOINTS = ("_recomputation_hook.", "_checkpoint_hook.")


def operator_flops(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
) -> int:
    """Of one call of one operator, 0 for all that have no matrix product or convolution in them."""
    packet = getattr(function, "_overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name == _CPU_ATTENTION:
        shapes = [tensor.shape for tensor in arguments[:3]]
        counted = sdpa_flop_count(*shapes)  # type: ignore[no-untyped-call]
    elif name == f"{_CPU_ATTENTION}_backward":
        shapes = [tensor.shape for tensor in arguments[:4]]
        counted = sdpa_backward_flop_count(*shapes)  # type: ignore[no-untyped-call]
    elif name.removesuffix("_backward") in _RECURRENT:
        counted = _recurrent_flops(_by_name(function, arguments, keywords))
        counted *= 2 if name.endswith("_backward") else 1
    else:
        formula: Count | None = flop_registry.get(packet)
        if formula is None:
            return 0
        counted = formula(*arguments, **keywords, out_val=result)
    if "attention" in name and name.endswith("_backward"):
        counted = _without_recomputed_scores(counted, arguments)
    causal = bool(_by_name(function, arguments, keywords).get("is_causal"))
    return int(counted) // 2 if causal else int(counted)


def _without_recomputed_scores(counted: int, arguments: tuple[Any, ...]) -> int:
    """torch counts the scores that the backward of fused attention computes a second time."""
    _, q, _, v, *_ = arguments
    head, value = q.shape[-1], v.shape[-1]
    # dQ, dK and the recomputed scores have `head`; dV and the gradient of the scores `value`.
    return int(counted * (2 * head + 2 * value) // (3 * head + 2 * value))


def _by_name(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """What an operator was called with, its defaults included."""
    declared = function._schema.arguments
    named = {one.name: one.default_value for one in declared if one.has_default_value()}
    names = (one.name for one in declared)
    return named | dict(zip(names, arguments, strict=False)) | keywords


def _recurrent_flops(given: dict[str, Any]) -> int:
    """Of the forward of a recurrent layer, or of a stack of them: every weight matrix meets every
    token once, whether it takes the input, the state or the projection of the state."""
    tokens = given["input"].numel() // given["input"].shape[-1]
    held = tree_leaves(
        [value for name, value in given.items() if _RECURRENT_WEIGHT.fullmatch(name)]
    )
    return int(2 * tokens * sum(weight.numel() for weight in held if weight.dim() == 2))


def computes_again() -> bool:
    """Whether torch.utils.checkpoint is at it, in either of its forms."""
    if torch._C._current_graph_task_id() == -1:
        return False
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    while hooks is not None:
        # Within one that is computed again there may be another stretch.
        if getattr(hooks[0], "__qualname__", "").startswith(_CHECKPOINTS):
            return True
        hooks = getattr(hooks[0], "around", None)
    node = torch._C._current_autograd_node()
    return node is not None and "CheckpointFunction" in node.name() and torch.is_grad_enabled()


class FlopCount:
    """A sum of FLOPs by the number format of the operands."""

    def __init__(self) -> None:
        self.by_format: dict[str, int] = {}
        self.again = 0
        """Of what was computed before; in none of the others."""

    @property
    def total(self) -> int:
        return sum(self.by_format.values())

    def add(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        counted = operator_flops(function, arguments, keywords, result)
        if counted and computes_again():
            self.again += counted
        elif counted:
            tensors = (a for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))
            name = str(next(tensors).dtype).removeprefix("torch.")
            self.by_format[name] = self.by_format.get(name, 0) + counted

    def main_format(self) -> str:
        """The format with the most of them, by the name that a record gives it."""
        if not self.by_format:
            return ""
        name = max(self.by_format, key=lambda one: self.by_format[one])
        fast = tf32_is_enabled() and torch.cuda.is_available()
        return "tf32" if name == "float32" and fast else name


class CountingFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around anything; what torch.compile made into one kernel is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = FlopCount()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        result = function(*arguments, **(keywords or {}))
        self.counted.add(function, arguments, keywords or {}, result)
        return result
