"""Habits of training loops, changed where torch is called: data, copies, values read back."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.data import DataLoader

_MOST_WORKERS = 8
_PLACE_OF_PINNING = 6
"""Of `pin_memory` among what stands after the data set of a DataLoader."""
Applied = Counter[str]
"""How often each change found something to change."""
_TORCH = str(Path(torch.__file__).parent)


def drop_gradients(applied: Applied) -> None:
    """`zero_grad` lets go of gradients instead of filling them with zeros."""
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        plain = kind.zero_grad

        def zero_grad(self: Any, set_to_none: bool = True, plain: Any = plain) -> None:
            applied["gradients"] += not set_to_none
            plain(self, set_to_none=True)

        kind.zero_grad = zero_grad  # type: ignore[method-assign]


def load_ahead(applied: Applied) -> None:
    """Loaders without workers get some."""
    plain = DataLoader.__init__
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1))

    def made(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if not keywords.get("num_workers") and len(arguments) < 5:
            applied["data"] += 1
            keywords |= {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = made  # type: ignore[method-assign]


def larger_batches(size: int, applied: Applied) -> None:
    """Loaders of batches half that size make them that large."""
    plain = DataLoader.__init__

    def made(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        given = arguments[0] if arguments else keywords.get("batch_size", 1)
        if given is not None and 2 * given == size:
            applied["batch"] += 1
            arguments = (size, *arguments[1:]) if arguments else arguments
            keywords |= {} if arguments else {"batch_size": size}
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = made  # type: ignore[method-assign]


def copy_from_pinned_memory(applied: Applied) -> None:
    """Copies to the GPU go through memory that the driver can read by itself, and do not wait.
    Loaders pin their batches, beside the program where they have workers."""
    to, cuda = torch.Tensor.to, torch.Tensor.cuda
    made = DataLoader.__init__

    def pinning(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) <= _PLACE_OF_PINNING and torch.cuda.is_available():
            keywords["pin_memory"] = True
        made(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = pinning  # type: ignore[method-assign]

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        # Parameters are moved once, when the model is.
        applied["copies"] += not isinstance(tensor, torch.nn.Parameter)
        if tensor.layout != torch.strided or tensor.is_pinned():
            return tensor
        # Without gaps: torch would close those in pageable memory before it copies.
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def to_device(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != "cpu" or not goes_to_gpu(arguments, keywords):
            return to(self, *arguments, **keywords)
        arguments, keywords = without_waiting(arguments, keywords)
        return to(pinned(self), *arguments, **keywords)

    def to_gpu(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type == "cpu":
            return cuda(pinned(self), *arguments[:1], **keywords | {"non_blocking": True})
        return cuda(self, *arguments, **keywords)

    torch.Tensor.to = to_device  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = to_gpu  # type: ignore[method-assign, assignment]


def goes_to_gpu(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a call of `Tensor.to` with these names a GPU, or a tensor on one."""
    named = [*arguments[:1], keywords.get("device"), keywords.get("tensor")]
    return any(
        (isinstance(word, torch.device) and word.type == "cuda")
        or (isinstance(word, torch.Tensor) and word.device.type == "cuda")
        or (isinstance(word, str) and word.partition(":")[0] == "cuda")
        or (isinstance(word, int) and not isinstance(word, bool))
        for word in named
    )


def without_waiting(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The same call of `Tensor.to`, which does not wait. `non_blocking` may stand in its place:
    after a device and a format, or after a format or a tensor alone."""
    alone = bool(arguments) and isinstance(arguments[0], torch.dtype | torch.Tensor)
    place = 1 if alone else 2
    if len(arguments) > place:
        return (*arguments[:place], True, *arguments[place + 1 :]), dict(keywords)
    return arguments, {**keywords, "non_blocking": True}


class _Late:
    """The value that one place in the program read back last, on its way to the host."""

    def __init__(self, value: torch.Tensor) -> None:
        self._held = value.detach().cpu().pin_memory()
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last = self._held.tolist()

    def send(self, value: torch.Tensor) -> Any:
        """What arrived so far; the value itself is sent for the next time."""
        if self._there.query():  # type: ignore[no-untyped-call]
            self._last = self._held.tolist()
            self._held.copy_(value.detach(), non_blocking=True)
            self._there.record()
        return self._last


def read_back_later(applied: Applied) -> None:
    """`.item()` and `float()` of a number on the GPU give the value of a step before, at once."""
    held: dict[tuple[str, int], _Late] = {}
    item = torch.Tensor.item

    def late(self: torch.Tensor, depth: int = 1) -> Any:
        frame = sys._getframe(depth)
        place = frame.f_code.co_filename, frame.f_lineno
        if self.device.type != "cuda" or self.dim() or place[0].startswith(_TORCH):
            return item(self)
        if place not in held:
            applied["read_back"] += 1
            held[place] = _Late(self)
        return held[place].send(self)

    torch.Tensor.item = late  # type: ignore[method-assign, assignment]

    def late_float(self: torch.Tensor) -> float:
        return float(late(self, 2))

    torch.Tensor.__float__ = late_float  # type: ignore[method-assign, assignment]


def without_autocast(applied: Applied) -> None:
    """Operators keep the formats of what they are given."""
    plain = torch.autocast.__init__

    def made(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: Any = None,
    ) -> None:
        applied["dtype"] += enabled
        plain(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)

    torch.autocast.__init__ = made  # type: ignore[method-assign]


def run_nothing_again(applied: Applied) -> None:
    """Checkpointed parts of the program keep their activations."""

    def once(function: Any, *arguments: Any, **keywords: Any) -> Any:
        applied["checkpoint"] += 1
        for own in ("use_reentrant", "context_fn", "determinism_check", "debug",
                    "preserve_rng_state", "early_stop"):  # fmt: skip
            keywords.pop(own, None)
        return function(*arguments, **keywords)

    torch.utils.checkpoint.checkpoint = once
