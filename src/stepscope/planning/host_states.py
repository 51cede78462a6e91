"""Optimizer states in pinned host memory, on the GPU during `optimizer.step()` alone.

The copies follow the order of the stream, so nothing waits for them but the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.errors import StepscopeError
from stepscope.planning.host_copies import LEAST_BYTES
from stepscope.torch_tools.capturing import is_capturing


class HostStates:
    """Keeps the large states of an optimizer in host memory between its steps, until `remove()`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._hosts: dict[tuple[int, str], Tensor] = {}
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self.load()),
            optimizer.register_step_post_hook(lambda *_: self.store()),
        ]
        self.store()

    def load(self) -> None:
        """Copy the states to the devices of their parameters."""
        if is_capturing():
            raise StepscopeError(
                "optimizer states in host memory cannot be part of a CUDA graph", 'use graph="off"'
            )
        for parameter, state, key, value in self._large():
            if value is self._hosts.get((id(parameter), key)):
                state[key] = self._to_device(value, parameter)

    def store(self) -> None:
        """Copy the states to host memory, and free those on the device."""
        for parameter, state, key, value in self._large():
            at = id(parameter), key
            if value is self._hosts.get(at):
                continue
            state[key] = self._hosts[at] = self._to_host(value, self._hosts.get(at))

    def remove(self) -> None:
        """Leave the states on the device from now on."""
        self.load()
        for handle in self._handles:
            handle.remove()
        self._hosts.clear()

    def _to_host(self, value: Tensor, host: Tensor | None) -> Tensor:
        """Copy into the host memory of the last step, if it is of the same form."""
        if host is None or (host.shape, host.dtype) != (value.shape, value.dtype):
            pinned = value.device.type == "cuda"
            host = torch.empty_like(value, device="cpu", pin_memory=pinned)
        return host.copy_(value, non_blocking=True)

    def _to_device(self, host: Tensor, parameter: Tensor) -> Tensor:
        return torch.empty_like(host, device=parameter.device).copy_(host, non_blocking=True)

    @property
    def bytes(self) -> int:
        return sum(host.nbytes for host in self._hosts.values())

    def _large(self) -> Iterator[tuple[Tensor, dict[str, Any], str, Tensor]]:
        for parameter, state in self._optimizer.state.items():
            for key, value in [*state.items()] if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.nbytes >= LEAST_BYTES:
                    yield parameter, state, key, value


class FakeHostStates(HostStates):
    """The same with fake tensors of a CPU: those in host memory have none."""

    def _to_host(self, value: Tensor, host: Tensor | None) -> Tensor:
        del host
        return value.new_empty(1).expand(value.shape)

    def _to_device(self, host: Tensor, parameter: Tensor) -> Tensor:
        del parameter
        return host.new_empty(host.shape)
