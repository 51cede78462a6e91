"""Operators of a step in their order, each with the time that it needs on a device.

The time is that of the ceilings: FLOPs at the matmul rate of the dtype, or bytes that are read and
written at the memory bandwidth, whichever takes longer, and a launch at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.measure.dispatch import Observer
from stepscope.measure.flops import operator_flops
from stepscope.measure.tensors import stored
from stepscope.records.usual_ceilings import usual_rates

ATTENTION = "attention"
"""Name of every kernel of fused attention."""
PREDICTED = "stepscope.predicted_attention"
"""Attention on fake tensors."""
_CASTS = ("_to_copy", "to", "clone")
"""Autocast casts a weight once, and again in the backward pass: the calls of a step differ."""
_RANDOM = torch.Tag.nondeterministic_seeded
_DEFAULT_DEVICE = "NVIDIA H200"
_LAUNCH_S = 3e-6
_REACHED = 0.8
"""Share of a datasheet's rates that an H200 reaches."""
_HOST_RATE = 50e9
"""Bytes/s of copies to pinned host memory over PCIe 5.0 x16, in each direction."""

Key = tuple[str, int]
"""An operator of a block: its name, and how often the name was called before."""


class Rates(NamedTuple):
    """What a device can do in a second."""

    device: str
    matmul: Mapping[str, float]
    memory: float
    host: float = _HOST_RATE

    def seconds(self, flops: int, dtype: str, moved: int) -> float:
        rate = self.matmul.get(dtype) or self.matmul["float32"]
        return max(flops / rate, moved / self.memory, _LAUNCH_S)


def known_rates() -> Rates:
    """Return the rates of this GPU: measured ones, else a share of its datasheet, else those of an
    H200."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    on_paper = {one.name: _REACHED * one.value for one in datasheet_ceilings(name)}
    known = usual_rates(name) or on_paper
    device, rates = (name, known) if known else (_DEFAULT_DEVICE, usual_rates(_DEFAULT_DEVICE))
    matmul = {
        key.removeprefix("matmul."): value
        for key, value in rates.items()
        if key.startswith("matmul.")
    }
    return Rates(device, matmul, rates["memory.copy"])


class Operator(NamedTuple):
    key: Key
    seconds: float
    bytes: int
    """Of its outputs."""
    storages: frozenset[int]
    keepable: bool
    """Whether its outputs can be saved and used in place of a second call."""


class OperatorLog(Observer):  # type: ignore[no-untyped-call]
    """Lists all operators that run inside."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self._rates = rates
        self._calls: Counter[str] = Counter()
        self._written: set[int] = set()
        self.is_random = False

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.operators)

    def keepable(self) -> list[tuple[int, Operator]]:
        """Index and operator of those whose outputs nothing has written to since."""
        return [
            (index, one)
            for index, one in enumerate(self.operators)
            if one.keepable and not one.storages & self._written
        ]

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        name = name_of(function)
        key = (name, self._calls[name])
        self._calls[name] += 1
        inputs = _tensors((arguments, keywords))
        outputs = _tensors(result)
        storages = _storages(outputs)
        self.is_random |= is_random(function, arguments)
        is_written, is_view = writes(function), bool(storages) and storages <= _storages(inputs)
        if is_written:
            self._written |= storages
        size = 0 if is_view else _bytes(outputs)
        moved = _bytes(inputs) + _bytes(outputs) if is_written or not is_view else 0
        flops = flops_of(function, arguments, keywords, result) if inputs else 0
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else ""
        seconds = self._rates.seconds(flops, dtype, moved) if moved else 0.0
        keepable = size > 0 and can_keep(function, arguments)
        self.operators.append(Operator(key, seconds, size, storages, keepable))


def name_of(function: Any) -> str:
    """Return the name of an operator, one for all kernels of fused attention."""
    packet = getattr(function, "_overloadpacket", None)
    name: str = getattr(packet, "__name__", str(function))
    if "dot_product" in name or name.startswith("predicted_attention"):
        return ATTENTION if not name.endswith("_backward") else f"{ATTENTION}_backward"
    return name


def can_keep(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether the result of an operator may be used in place of a second call.

    If random numbers were not drawn again, those drawn later would differ.
    """
    if name_of(function) in _CASTS or writes(function) or aliases(function):
        return False
    return not is_random(function, arguments)


def is_random(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether an operator draws random numbers; attention does with dropout only."""
    if name_of(function) != ATTENTION:
        return _RANDOM in function.tags
    names = [one.name for one in function._schema.arguments]
    given: dict[str, Any] = dict(zip(names, arguments, strict=False))
    return bool(given.get("dropout_p", given.get("dropout", 0.0)))


def writes(function: Any) -> bool:
    return any(one.alias_info and one.alias_info.is_write for one in function._schema.arguments)


def aliases(function: Any) -> bool:
    """Return whether a result shares memory with an argument."""
    return any(one.alias_info for one in function._schema.returns)


def flops_of(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
) -> int:
    if not str(function).startswith(PREDICTED):
        return operator_flops(function, arguments, keywords, result)
    query, key, *_, is_causal = arguments[:5]
    forward: int = 4 * query.numel() * key.shape[-2] // (2 if is_causal else 1)
    # The backward kernel computes the scores again.
    return forward if name_of(function) == ATTENTION else 5 * forward // 2


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tensors: list[Tensor]) -> frozenset[int]:
    return frozenset(part.untyped_storage()._cdata for one in tensors for part in stored(one))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(one.nbytes for one in tensors if one.layout is torch.strided)
