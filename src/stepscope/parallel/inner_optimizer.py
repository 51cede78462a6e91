"""The optimizer that a rank runs on its shard, and the flat buffers behind its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

Make = Callable[[list[Tensor], dict[str, Any]], Optimizer]


def on_its_device(value: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Copy a saved state tensor to the device where an optimizer with this group expects it. Step
    counts are on the CPU, except in fused and capturable variants, which read them on the
    device."""
    if value.dim() or group.get("fused") or group.get("capturable"):
        # A copy: two pieces of one parameter must not share a step count.
        return value.to(parameter.device, copy=True)
    return value.clone()


def follow(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Copy the options of the outer group, which schedulers change, to the inner optimizer."""
    for key, value in group.items():
        if key != "params":
            optimizer.param_groups[0][key] = value


@torch.no_grad()
def as_views(tensors: list[Tensor], elements: int | None = None) -> Tensor:
    """Allocate one flat buffer and make the tensors views of it; `elements` adds padding."""
    flat = tensors[0].new_zeros(elements or sum(tensor.numel() for tensor in tensors))
    offset = 0
    for tensor in tensors:
        view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        tensor.data = view
        offset += tensor.numel()
    return flat
