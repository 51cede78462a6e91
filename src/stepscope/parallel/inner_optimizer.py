"""The optimizer that a rank runs on its part, and the buffers that its parameters are views of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

Make = Callable[[list[Tensor], dict[str, Any]], Optimizer]


def on_its_device(value: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Where an optimizer with that group wants a part of its state: a count of steps is on the
    host, except in the forms that read it on the device."""
    if value.dim() or group.get("fused") or group.get("capturable"):
        # A copy: two pieces of one parameter must not share a count of steps.
        return value.to(parameter.device, copy=True)
    return value.clone()


def follow(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Schedulers change the outer group; the inner one follows."""
    for key, value in group.items():
        if key != "params":
            optimizer.param_groups[0][key] = value


@torch.no_grad()
def as_views(tensors: list[Tensor], elements: int | None = None) -> Tensor:
    """One buffer that the tensors become views of; `elements` makes it longer."""
    flat = tensors[0].new_zeros(elements or sum(tensor.numel() for tensor in tensors))
    offset = 0
    for tensor in tensors:
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        tensor.data = view
        offset += tensor.numel()
    return flat
