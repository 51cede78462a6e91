"""Changes to the training loop, applied by patching torch: data loading, copies, read-backs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader

_MAX_WORKERS = 8
_PIN_MEMORY_POSITION = 6
"""Position of `pin_memory` among DataLoader's positional arguments after the data set."""
Applied = Counter[str]
"""Number of times that each change took effect."""
On = Callable[[], bool]
"""Whether a change is made at present."""
_TORCH = str(Path(torch.__file__).parent)


def set_gradients_to_none(applied: Applied, on: On) -> None:
    """Make `zero_grad` set gradients to None instead of filling them with zeros."""
    for class_ in (torch.optim.Optimizer, torch.nn.Module):
        plain = class_.zero_grad

        def zero_grad(self: Any, set_to_none: bool = True, plain: Any = plain) -> None:
            applied["gradients"] += not set_to_none
            plain(self, set_to_none=set_to_none or on())

        class_.zero_grad = zero_grad  # type: ignore[method-assign]


def use_loader_workers(applied: Applied, on: On) -> None:  # noqa: ARG001
    """Give worker processes to DataLoaders that have none."""
    plain = DataLoader.__init__
    workers = max(1, min(_MAX_WORKERS, (os.cpu_count() or 2) - 1))

    def init(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if not keywords.get("num_workers") and len(arguments) < 5:
            applied["data"] += 1
            keywords |= {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def larger_batches(size: int, applied: Applied) -> None:
    """Double the batch size of DataLoaders whose batch size is half of `size`."""
    plain = DataLoader.__init__

    def init(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        given = arguments[0] if arguments else keywords.get("batch_size", 1)
        if given is not None and 2 * given == size:
            applied["batch"] += 1
            arguments = (size, *arguments[1:]) if arguments else arguments
            keywords |= {} if arguments else {"batch_size": size}
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = init  # type: ignore[method-assign]


def copy_from_pinned_memory(applied: Applied, on: On) -> None:  # noqa: ARG001
    """Copy to the GPU from pinned memory, without blocking. DataLoaders pin their batches, in a
    separate thread if they have workers."""
    to, cuda = torch.Tensor.to, torch.Tensor.cuda
    init = DataLoader.__init__

    def pinning(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) <= _PIN_MEMORY_POSITION and torch.cuda.is_available():
            keywords["pin_memory"] = True
        init(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = pinning  # type: ignore[method-assign]

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        # Parameters do not count: they are moved once, with the model.
        applied["copies"] += not isinstance(tensor, torch.nn.Parameter)
        if tensor.layout != torch.strided or tensor.is_pinned():
            return tensor
        # Contiguous: torch would otherwise make a contiguous copy in pageable memory first.
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def to_device(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != "cpu" or not goes_to_gpu(arguments, keywords):
            return to(self, *arguments, **keywords)
        arguments, keywords = with_non_blocking(arguments, keywords)
        return to(pinned(self), *arguments, **keywords)

    def to_gpu(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type == "cpu":
            return cuda(pinned(self), *arguments[:1], **keywords | {"non_blocking": True})
        return cuda(self, *arguments, **keywords)

    torch.Tensor.to = to_device  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = to_gpu  # type: ignore[method-assign, assignment]


def goes_to_gpu(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return True if a call of `Tensor.to` with these arguments names a GPU or a tensor on one."""
    named = [*arguments[:1], keywords.get("device"), keywords.get("tensor")]
    return any(
        (isinstance(word, torch.device) and word.type == "cuda")
        or (isinstance(word, torch.Tensor) and word.device.type == "cuda")
        or (isinstance(word, str) and word.partition(":")[0] == "cuda")
        or (isinstance(word, int) and not isinstance(word, bool))
        for word in named
    )


def with_non_blocking(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `Tensor.to` with `non_blocking=True`, which may be positional: after
    a device and a dtype, or after a dtype or a tensor alone."""
    alone = bool(arguments) and isinstance(arguments[0], torch.dtype | torch.Tensor)
    position = 1 if alone else 2
    if len(arguments) > position:
        return (*arguments[:position], True, *arguments[position + 1 :]), dict(keywords)
    return arguments, {**keywords, "non_blocking": True}


class _DelayedValue:
    """Value read back by one line of the program, copied asynchronously to the host."""

    def __init__(self, value: torch.Tensor) -> None:
        self._buffer = value.detach().cpu().pin_memory()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last = self._buffer.tolist()

    def send(self, value: torch.Tensor) -> Any:
        """Return the last value that arrived, and start the copy of the new one."""
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._last = self._buffer.tolist()
            self._buffer.copy_(value.detach(), non_blocking=True)
            self._copied.record()
        return self._last


def read_back_delayed(applied: Applied, on: On) -> None:
    """Make `.item()` and `float()` of a GPU scalar return the value of an earlier step without
    waiting."""
    delayed: dict[tuple[str, int], _DelayedValue] = {}
    item = torch.Tensor.item

    def late(self: torch.Tensor, depth: int = 1) -> Any:
        frame = sys._getframe(depth)
        line = frame.f_code.co_filename, frame.f_lineno
        if not on() or self.device.type != "cuda" or self.dim() or line[0].startswith(_TORCH):
            return item(self)
        if line not in delayed:
            applied["read_back"] += 1
            delayed[line] = _DelayedValue(self)
        return delayed[line].send(self)

    torch.Tensor.item = late  # type: ignore[method-assign, assignment]

    def late_float(self: torch.Tensor) -> float:
        return float(late(self, 2))

    torch.Tensor.__float__ = late_float  # type: ignore[method-assign, assignment]


def disable_autocast(applied: Applied) -> None:
    """Disable autocast: operators use the dtypes of their inputs."""
    plain = torch.autocast.__init__

    def init(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: Any = None,
    ) -> None:
        applied["dtype"] += enabled
        plain(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]


def disable_checkpointing(applied: Applied) -> None:
    """Disable activation checkpointing: checkpointed segments save their activations."""

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        applied["checkpoint"] += 1
        for option in (
            "use_reentrant",
            "context_fn",
            "determinism_check",
            "debug",
            "preserve_rng_state",
            "early_stop",
        ):
            keywords.pop(option, None)
        return function(*arguments, **keywords)

    torch.utils.checkpoint.checkpoint = call
