"""Batches in pinned memory, copied to the GPU without blocking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import AT_COPIES, Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule

if TYPE_CHECKING:
    import torch

PINNED = (
    "DataLoader(…, pin_memory=True, num_workers=4)",
    "batch = batch.to(device, non_blocking=True)",
)
_PIN_MEMORY_POSITION = 6
"""Position of `pin_memory` among DataLoader's positional arguments after the data set."""


@rule("pinned-data", "batches in pinned memory, copied asynchronously")
def _pinned(facts: Facts) -> Change | Left | None:
    """Pinned batches. If values are read back too, that advice includes this one."""
    if not facts.on_gpu:
        return Left("the step runs on a CPU")
    if not facts.pageable_ms:
        return Left("no batch is copied from pageable memory")
    if facts.reads_back:
        return Left("values are read from the device in every step: see the change that avoids it")
    after = replace(facts, pageable_ms=0.0, waits="" if facts.waits == AT_COPIES else facts.waits)
    return Change(
        after=after,
        why=f"copies from pageable memory take {facts.pageable_ms:.3g} ms and block the CPU until"
        " the device has finished all earlier work",
        risk="CPU memory",
        lines=PINNED,
        setting={"copies": "pinned"},
    )


@setting("copies", "pinned", without="no batch is copied to the device by .to() or .cuda()")
def _copy_from_pinned_memory(program: Program, value: str) -> None:  # noqa: ARG001
    """Copy to the GPU from pinned memory. DataLoaders pin their batches, in a separate thread if
    they have workers."""
    import torch
    from torch.utils.data import DataLoader

    to, cuda = torch.Tensor.to, torch.Tensor.cuda
    init = DataLoader.__init__

    def pinning(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) <= _PIN_MEMORY_POSITION and torch.cuda.is_available():
            keywords["pin_memory"] = True
        init(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = pinning  # type: ignore[method-assign]

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        # Parameters do not count: they are moved once, with the model.
        program.applied["copies"] += not isinstance(tensor, torch.nn.Parameter)
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
    import torch

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
    import torch

    alone = bool(arguments) and isinstance(arguments[0], torch.dtype | torch.Tensor)
    position = 1 if alone else 2
    if len(arguments) > position:
        return (*arguments[:position], True, *arguments[position + 1 :]), dict(keywords)
    return arguments, {**keywords, "non_blocking": True}
