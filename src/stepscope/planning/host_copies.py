"""Saved tensors in pinned host memory, copied there and back while the GPU computes.

Tensors of a block form a group. A group leaves the GPU while the next one is computed: its memory
is reused after the copy, in the order of the stream, so that the peak does not depend on how far
the CPU is ahead. In the backward pass a group is copied back while the one after it is computed.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.errors import StepscopeError
from stepscope.torch_tools.capturing import is_capturing

LEAST_BYTES = 1 << 20
"""Smaller tensors stay on the GPU."""


class HostCopies:
    """The groups of a model."""

    def __init__(self) -> None:
        self._last: Group | None = None
        self._stream: Any = None

    def new_group(self) -> Group:
        """Begin a group, and let the memory of the last one be reused."""
        if self._last is not None:
            self._last.leave()
        previous = None if self._last is None else weakref.ref(self._last)
        self._last = Group(self, previous)
        return self._last

    def stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if is_capturing():
            raise StepscopeError(
                "a step with tensors in host memory cannot be captured", 'use graph="off"'
            )
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream


class Group:
    """Copies that leave together and come back together."""

    def __init__(self, copies: HostCopies, previous: weakref.ref[Group] | None) -> None:
        self._copies, self._previous = copies, previous
        self._entries: list[weakref.ref[HostCopy]] = []

    def add(self, tensor: Tensor) -> HostCopy:
        copy = HostCopy(tensor, self, self._copies.stream(tensor.device))
        self._entries.append(weakref.ref(copy))
        return copy

    def leave(self) -> None:
        for copy in self._alive():
            copy.leave()

    def load(self) -> None:
        for copy in self._alive():
            if not copy.was_taken:
                copy.load()

    def load_previous(self) -> None:
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.load()

    def _alive(self) -> list[HostCopy]:
        return [copy for entry in self._entries if (copy := entry()) is not None]


class HostCopy:
    """A tensor and its copy in host memory."""

    def __init__(self, tensor: Tensor, group: Group, stream: Any) -> None:
        self._group, self._stream = group, stream
        self._tensor: Tensor | None = tensor
        self._event: Any = None
        self.was_taken = False
        # Host memory is no part of what a memory ledger counts.
        with _disable_current_modes(), torch.no_grad():
            pinned = stream is not None
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._transfer(self._host, tensor)
        self._device = tensor.device

    def __del__(self) -> None:
        # Of a copy that nothing takes, as in a backward pass for some of the inputs: the memory of
        # its tensor is reused after the transfer.
        self._wait()

    def leave(self) -> None:
        """Let the tensor's memory be reused once it is copied."""
        self._wait()
        self._tensor = None

    def load(self) -> None:
        """Start to copy the tensor back, unless it is there."""
        if self._tensor is None:
            with torch.no_grad():
                self._tensor = torch.empty_like(self._host, device=self._device)
                self._transfer(self._tensor, self._host)

    def take(self) -> Tensor:
        """Return the tensor, which this copy then refers to no longer."""
        self._group.load()
        self.load()
        self._wait()
        tensor, self._tensor, self.was_taken = self._tensor, None, True
        assert tensor is not None
        self._group.load_previous()
        return tensor

    def _transfer(self, target: Tensor, source: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        # The source must have been written, and the memory of the target be free.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._event = self._stream.record_event()

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
            self._event = None
