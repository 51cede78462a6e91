"""FLOPs of any program, counted operator by operator at the dispatcher.

Each multiply-add of matmuls and convolutions, including those inside recurrent layers, counts two
FLOPs; causal attention counts half; everything else counts zero. Recomputation in a checkpointed
segment is counted separately and recomputation inside fused attention is not counted: neither is
part of the model's FLOPs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stepscope.measure.dispatch import Observer
from stepscope.torch_tools.triton_available import tf32_is_enabled

Count = Callable[..., int]

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn")
_RECURRENT_WEIGHT = re.compile(r"weight\d?")
_CHECKPOINTS = ("_recomputation_hook.", "_checkpoint_hook.")


def operator_flops(
    function: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    result: Any,
    *,
    full: bool = False,
) -> int:
    """FLOPs of one operator call; 0 for operators without a matmul or convolution. `full` counts
    all pairs of causal attention, as naive attention computes them."""
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
    return int(counted) // 2 if causal and not full else int(counted)


def _without_recomputed_scores(counted: int, arguments: tuple[Any, ...]) -> int:
    """Subtract the scores that the backward pass of fused attention recomputes, which torch
    counts."""
    _, q, _, v, *_ = arguments
    head, value = q.shape[-1], v.shape[-1]
    # dQ, dK and the recomputed scores have `head`; dV and the gradient of the scores `value`.
    return int(counted * (2 * head + 2 * value) // (3 * head + 2 * value))


def _by_name(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operator call by name, including defaults."""
    declared = function._schema.arguments
    named = {
        argument.name: argument.default_value
        for argument in declared
        if argument.has_default_value()
    }
    names = (argument.name for argument in declared)
    return named | dict(zip(names, arguments, strict=False)) | keywords


def _recurrent_flops(given: dict[str, Any]) -> int:
    """Forward FLOPs of a recurrent layer or a stack of them: every weight matrix (input, state or
    projection of the state) is multiplied with every token once."""
    tokens = given["input"].numel() // given["input"].shape[-1]
    weights = tree_leaves(
        [value for name, value in given.items() if _RECURRENT_WEIGHT.fullmatch(name)]
    )
    return int(2 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2))


def computes_again() -> bool:
    """Return True while torch.utils.checkpoint recomputes, in either of its implementations."""
    if torch._C._current_graph_task_id() == -1:
        return False
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    while hooks is not None:
        # Checkpointed segments may be nested.
        if getattr(hooks[0], "__qualname__", "").startswith(_CHECKPOINTS):
            return True
        hooks = getattr(hooks[0], "around", None)
    node = torch._C._current_autograd_node()
    return node is not None and "CheckpointFunction" in node.name() and torch.is_grad_enabled()


class FlopCount:
    """FLOPs by the dtype of the operands."""

    def __init__(self, *, full: bool = False) -> None:
        self._full = full
        self.by_dtype: dict[str, int] = {}
        self.again = 0
        """FLOPs of recomputation; not part of `total`."""

    @property
    def total(self) -> int:
        return sum(self.by_dtype.values())

    def add(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        counted = operator_flops(function, arguments, keywords, result, full=self._full)
        if counted and computes_again():
            self.again += counted
        elif counted:
            tensors = (a for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))
            name = str(next(tensors).dtype).removeprefix("torch.")
            self.by_dtype[name] = self.by_dtype.get(name, 0) + counted

    def main_format(self) -> str:
        """The dtype with the most FLOPs, by its name in records (`tf32` for float32 with TF32)."""
        if not self.by_dtype:
            return ""
        name = max(self.by_dtype, key=lambda dtype: self.by_dtype[dtype])
        fast = tf32_is_enabled() and torch.cuda.is_available()
        return "tf32" if name == "float32" and fast else name


class CountingFlops(Observer):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of all operators that run inside; kernels of torch.compile are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = FlopCount()

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        self.counted.add(function, arguments, keywords, result)
