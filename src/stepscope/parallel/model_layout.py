"""Check that all ranks have the same model: names, shapes, dtypes and order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.parallel.collectives import all_gather, gather_objects, message_device
from stepscope.parallel.errors import ParallelError

TensorSpec = tuple[str, tuple[int, ...], str, bool]


def layout_of(module: nn.Module) -> list[TensorSpec]:
    tensors: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return [tensor_line(name, tensor) for name, tensor in tensors]


def tensor_line(name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return name, tuple(tensor.shape), dtype, tensor.requires_grad


def require_same_layout(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank, with rank and parameter, if two ranks have different models."""
    require_same_lines(layout_of(module), "model", group)


def require_same_lines(
    lines: list[TensorSpec], of: str, group: dist.ProcessGroup | None = None
) -> None:
    digest = hashlib.sha256(repr(lines).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=message_device(group))
    digests = own.new_empty((dist.get_world_size(group), own.numel()))
    all_gather(digests.view(-1), own, group)
    if bool((digests == digests[0]).all()):
        return
    layouts: list[list[TensorSpec]] = gather_objects(lines, group)
    rank = next(r for r, other in enumerate(layouts) if other != layouts[0])
    raise ParallelError(
        f"rank {rank} has a different {of} than rank 0: {_difference(layouts[0], layouts[rank])}"
    )


def _difference(first: list[TensorSpec], second: list[TensorSpec]) -> str:
    for index, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine != theirs:
            return f"entry {index} is {_description(theirs)}, on rank 0 {_description(mine)}"
    extra = max(first, second, key=len)[min(len(first), len(second))]
    return f"{len(second)} entries against {len(first)}; {_description(extra)} has no counterpart"


def _description(line: TensorSpec) -> str:
    name, shape, dtype, trained = line
    return f"{name} ({_size(shape)}, {dtype}{'' if trained else ', frozen'})"


def shape_and_dtype(tensor: Tensor) -> str:
    _, shape, dtype, _ = tensor_line("", tensor)
    return f"({_size(shape)}, {dtype})"


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
