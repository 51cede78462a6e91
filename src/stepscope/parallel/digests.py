"""Digests of tensors, to compare their values between ranks bit by bit.

A digest is a sum of the elements' bits with a pseudorandom odd weight per position, in integers
modulo 2**64. Its value does not depend on the order of additions, so a CPU and a GPU compute the
same, and one changed element always changes it. Only the sum leaves the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stepscope.parallel.memory_order import as_real, in_logical_order

_CHUNK = 1 << 20
"""Elements per sum: bounds the memory of the weights to a few times 8 MiB."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """One integer per tensor. Equal values, shapes aside, have equal digests."""
    sums = [_digest(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(index)
    results = [0] * len(sums)
    for indices in by_device.values():
        # One transfer per device.
        values = torch.stack([sums[index] for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = value
    return results


def _digest(tensor: Tensor) -> Tensor:
    values = as_real(in_logical_order(tensor.detach())).reshape(-1)
    bits = values.view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), _CHUNK):
        part = bits[begin : begin + _CHUNK].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + part.numel(), device=bits.device) * _FIRST
        weights = ((weights ^ (weights >> 29)) * _SECOND) | 1
        total += (part * weights).sum()
    return total
