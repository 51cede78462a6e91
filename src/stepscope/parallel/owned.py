"""Whole parameters with an owner each; the owner updates, everyone receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.parallel.buckets import MEGABYTE, Item, plan_buckets, share_out
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT

Make = Callable[[list[Tensor], dict[str, Any]], Optimizer]


class Parcel(NamedTuple):
    """Parameters of one group and one owner that travel together."""

    owner: int
    group: int
    places: tuple[int, ...]
    parameters: list[Tensor]
    buffer: Tensor
    optimizer: Optimizer | None
    """On the owner's rank."""


class OwnedParameters:
    def __init__(self, make: Make, bucket_mb: float, group: dist.ProcessGroup | None) -> None:
        self._make = make
        self._limit = bucket_mb * MEGABYTE
        self._group = group
        self._rank = dist.get_rank(group)
        self._loads = [0] * dist.get_world_size(group)
        self._groups = 0
        self._parameters = 0
        self._rounds: list[list[Parcel]] = []
        """In a round every owner updates and sends one parcel; the next is updated meanwhile."""

    def add_group(self, group: dict[str, Any]) -> None:
        held: list[Tensor] = group["params"]
        owners = share_out([p.numel() * p.element_size() for p in held], self._loads)
        options = {key: value for key, value in group.items() if key != "params"}
        queues = []
        for owner in range(len(self._loads)):
            own = [place for place in range(len(held)) if owners[place] == owner]
            items = [
                Item(
                    "", held[p].numel(), held[p].element_size(), f"{held[p].dtype} {held[p].device}"
                )
                for p in own
            ]
            buckets = plan_buckets(items, self._limit)
            queues.append(
                [
                    self._parcel(owner, tuple(own[i] for i in bucket.items), held, options)
                    for bucket in buckets
                ]
            )
        for number in range(max(map(len, queues), default=0)):
            self._rounds.append([queue[number] for queue in queues if number < len(queue)])
        self._groups += 1
        self._parameters += len(held)

    def _parcel(
        self, owner: int, places: tuple[int, ...], held: list[Tensor], options: dict[str, Any]
    ) -> Parcel:
        own = [held[place] for place in places]
        buffer = as_views(own)
        optimizer = self._make(own, options) if owner == self._rank else None
        first = self._parameters
        return Parcel(
            owner, self._groups, tuple(first + place for place in places), own, buffer, optimizer
        )

    def step(self, groups: list[dict[str, Any]]) -> None:
        flying = []
        for parcels in self._rounds:
            for parcel in parcels:
                if parcel.optimizer is not None:
                    follow(parcel.optimizer, groups[parcel.group])
                    parcel.optimizer.step()
            for parcel in parcels:
                sender = parcel.owner
                if self._group is not None:
                    sender = dist.get_global_rank(self._group, sender)
                work = dist.broadcast(parcel.buffer, sender, group=self._group, async_op=True)
                flying.append(work)
        with HEARTBEAT.waiting():
            for work in flying:
                work.wait()

    def local_state(self) -> dict[str, Any]:
        return {
            f"{place}.{name}": value
            for place, parameter, optimizer in self._owned()
            for name, value in optimizer.state[parameter].items()
        }

    def load(self, find: Callable[[str], Any], names: set[str]) -> None:
        for place, parameter, optimizer in self._owned():
            prefix = f"{place}."
            state = {}
            for name in sorted(name for name in names if name.startswith(prefix)):
                value = find(name)
                if isinstance(value, Tensor):
                    if value.dim() and value.shape != parameter.shape:
                        raise ParallelError(
                            f"state {name} has shape {tuple(value.shape)},"
                            f" the parameter {tuple(parameter.shape)}"
                        )
                    value = on_its_device(value, parameter, optimizer)
                state[name.removeprefix(prefix)] = value
            optimizer.state[parameter] = state

    def room(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        owned = {str(place) for place, _, _ in self._owned()}
        return torch.empty(size, dtype=dtype) if name.partition(".")[0] in owned else None

    def _owned(self) -> list[tuple[int, Tensor, Optimizer]]:
        return [
            (place, parameter, parcel.optimizer)
            for parcels in self._rounds
            for parcel in parcels
            if parcel.optimizer is not None
            for place, parameter in zip(parcel.places, parcel.parameters, strict=True)
        ]


def on_its_device(value: Tensor, parameter: Tensor, optimizer: Optimizer) -> Tensor:
    """Where the optimizer wants a part of its state: a count of steps is on the host, except in the
    forms that read it on the device."""
    group = optimizer.param_groups[0]
    if value.dim() or group.get("fused") or group.get("capturable"):
        return value.to(parameter.device)
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
