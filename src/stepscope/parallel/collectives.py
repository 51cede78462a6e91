"""Collectives of tensors: issued asynchronously, waited for with `peers.finish`.

Messages are contiguous (`memory_order.py`). Complex ones are sent as pairs of real numbers.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.parallel.memory_order import as_real
from stepscope.parallel.peers import BoundedCalls, NoAnswer, finish, waits_on_device
from stepscope.parallel.pickling import loads

# torch 2.13 renamed them; the old names emit a warning there.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Any:
    return dist.all_reduce(as_real(tensor), group=group, async_op=True)


def start_all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Any:
    return all_gather_single(as_real(output), as_real(own), group=group, async_op=True)


def start_reduce_scatter(own: Tensor, values: Tensor, group: dist.ProcessGroup | None) -> Any:
    work = reduce_scatter_single(as_real(own), as_real(values), group=group, async_op=True)
    return work if waits_on_device(group) else _BoundedWait(work)


class _BoundedWait:
    """A reduce-scatter of gloo, whose work ignores the timeout that its wait is given."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._work.wait()
            return
        try:
            BoundedCalls().call(self._work.wait, timeout.total_seconds())
        except NoAnswer:
            raise RuntimeError("the reduce-scatter timed out") from None


def start_broadcast(tensor: Tensor, sender: int, group: dist.ProcessGroup | None) -> Any:
    """`sender` is a rank of the group."""
    sender = sender if group is None else dist.get_global_rank(group, sender)
    return dist.broadcast(as_real(tensor), sender, group=group, async_op=True)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    finish(start_all_reduce(tensor, group), group)


def all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    finish(start_all_gather(output, own, group), group)


def broadcast_tensor(tensor: Tensor, sender: int, group: dist.ProcessGroup | None) -> None:
    finish(start_broadcast(tensor, sender, group), group)


def gather_objects(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The objects of all ranks, by rank of the group."""
    device, size = message_device(group), dist.get_world_size(group)
    data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8).to(device)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    all_gather(lengths, torch.tensor([data.numel()], device=device), group)
    padded = data.new_zeros(int(lengths.max()))
    padded[: data.numel()] = data
    every = data.new_empty(size * padded.numel())
    all_gather(every, padded, group)
    rows = every.cpu().view(size, -1)
    return [
        loads(row[:length].numpy().tobytes())
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
