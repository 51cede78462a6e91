"""Parameters flattened into one buffer and sliced evenly: reduce-scatter, update, all-gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer

from stepscope.parallel.collectives import start_all_gather, start_reduce_scatter
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.inner_optimizer import Make, as_views, follow, on_its_device
from stepscope.parallel.peers import finish


class FlatGroup(NamedTuple):
    """All parameters of one group and dtype, flattened end to end."""

    name: str
    group: int
    parameters: list[Tensor]
    elements: int
    buffer: Tensor
    """The slices of all ranks; the end may be padding."""
    own: Tensor
    """This rank's slice without padding; the inner optimizer's parameter."""
    optimizer: Optimizer


class SlicedParameters:
    """The `scatter` division: each rank owns an equal slice of the flattened parameters."""

    def __init__(self, make: Make, group: dist.ProcessGroup | None) -> None:
        self._make = make
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._groups = 0
        self._flat_groups: list[FlatGroup] = []

    def add_group(self, group: dict[str, Any]) -> None:
        options = {key: value for key, value in group.items() if key != "params"}
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for (dtype, _), members in kinds.items():
            elements = sum(parameter.numel() for parameter in members)
            chunk = -(-elements // self._size)
            buffer = as_views(members, chunk * self._size)
            begin = min(self._rank * chunk, elements)
            own = torch.nn.Parameter(buffer[begin : min(begin + chunk, elements)])
            name = f"group{self._groups}.{str(dtype).removeprefix('torch.')}"
            optimizer = self._make([own], options)
            self._flat_groups.append(
                FlatGroup(name, self._groups, members, elements, buffer, own, optimizer)
            )
        self._groups += 1

    def step(self, groups: list[dict[str, Any]]) -> None:
        arriving = [(flat, *self._reduce(flat)) for flat in self._flat_groups]
        leaving = []
        for flat, gradient, work in arriving:
            finish(work, self._group)
            flat.own.grad = gradient[: flat.own.numel()]
            follow(flat.optimizer, groups[flat.group])
            flat.optimizer.step()
            flat.own.grad = None
            chunk = flat.buffer.numel() // self._size
            mine = flat.buffer[self._rank * chunk : (self._rank + 1) * chunk]
            # A copy: not every backend allows overlapping input and output.
            leaving.append(start_all_gather(flat.buffer, mine.clone(), self._group))
        for work in leaving:
            finish(work, self._group)

    def _reduce(self, flat: FlatGroup) -> tuple[Tensor, dist.Work]:
        gradients = torch.zeros_like(flat.buffer)
        offset = 0
        for parameter in flat.parameters:
            if parameter.grad is not None:
                view = gradients[offset : offset + parameter.numel()].view(parameter.shape)
                torch.mul(parameter.grad, 1.0 / self._size, out=view)
            offset += parameter.numel()
        own = gradients.new_empty(gradients.numel() // self._size)
        work = start_reduce_scatter(own, gradients, self._group)
        return own, work

    def local_state(self) -> dict[str, Any]:
        return {
            f"{flat.name}.{name}": self._divided(flat, value)
            for flat in self._flat_groups
            for name, value in flat.optimizer.state[flat.own].items()
        }

    def _divided(self, flat: FlatGroup, value: Any) -> Any:
        """Wrap a slice as a DTensor of the full size, so that it can be resharded."""
        if not isinstance(value, Tensor) or value.shape != flat.own.shape or not value.dim():
            return value
        return DTensor.from_local(
            value,
            self._mesh(value.device.type),
            [Shard(0)],
            run_check=False,
            shape=torch.Size((flat.elements,)),
            stride=(1,),
        )

    def _mesh(self, device_type: str) -> DeviceMesh:
        group = self._group or dist.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, device_type)

    def load(self, find: Callable[[str], Any], names: set[str]) -> None:
        for flat in self._flat_groups:
            prefix = f"{flat.name}."
            state = {}
            for name in sorted(name for name in names if name.startswith(prefix)):
                value = find(name)
                if isinstance(value, DTensor):
                    if value.numel() != flat.elements:
                        raise ParallelError(
                            f"state {name} has {value.numel()} elements,"
                            f" the parameters {flat.elements}"
                        )
                    value = value.to_local().clone()
                elif isinstance(value, Tensor):
                    value = on_its_device(value, flat.own, flat.optimizer.param_groups[0])
                state[name.removeprefix(prefix)] = value
            flat.optimizer.state[flat.own] = state

    def empty_for(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        for flat in self._flat_groups:
            if name.startswith(f"{flat.name}."):
                if not len(size):
                    return torch.empty(size, dtype=dtype)
                empty: Tensor = self._divided(
                    flat, torch.empty_like(flat.own.detach(), dtype=dtype)
                )
                return empty
        return None
