"""What an operator does, from its schema, its tags and its arguments."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

_LARGEST_DIGEST = 1 << 28
"""Bytes of a tensor above which its values are not compared."""
_OVERWRITES = {"copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_"}
"""Operators in place that do not read what they write."""
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
_WEIGHTED = {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_convolution"}


class Operator(NamedTuple):
    """The properties of an operator that do not depend on its arguments."""

    name: str
    """As in a trace: `aten::mm`."""
    base: str
    """Without namespace and overload: `mm`."""
    view: bool
    """Its result shares the memory of an argument, and nothing is computed."""
    mutates: bool
    pointwise: bool
    """An element of its result depends on the elements at its position alone."""
    random: bool
    reads_values: bool
    """The CPU needs values of its result, or its size depends on values."""

    @property
    def overwrites(self) -> bool:
        return self.base in _OVERWRITES

    @property
    def has_values(self) -> bool:
        """True if it computes values, unlike a view and an allocation."""
        return not self.view and not self.base.startswith(("empty", "new_empty"))

    @property
    def multiplies(self) -> bool:
        """True for matmuls and convolutions."""
        return self.base in _WEIGHTED


@cache
def operator_of(function: Any) -> Operator:
    schema = function._schema
    name = str(schema.name)
    tags = getattr(function, "tags", ())
    dynamic = torch.Tag.dynamic_output_shape in tags and "index" not in name
    return Operator(
        name=name,
        base=name.rpartition("::")[2],
        view=_is_view(schema),
        mutates=bool(schema.is_mutable),
        pointwise=torch.Tag.pointwise in tags or name == "aten::_to_copy",
        random=torch.Tag.nondeterministic_seeded in tags,
        reads_values=torch.Tag.data_dependent_output in tags or dynamic,
    )


def _is_view(schema: Any) -> bool:
    aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the memory of a tensor; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def selects_by_mask(operator: Operator, arguments: tuple[Any, ...]) -> bool:
    """Return True for an index with a mask: the size of the result depends on its values."""
    if operator.base not in _INDEXING:
        return False
    indices = arguments[1] if len(arguments) > 1 else ()
    masks = [one for one in tensors(indices) if one.dtype in (torch.bool, torch.uint8)]
    return bool(masks)


def digest(tensor: torch.Tensor) -> int | None:
    """A checksum of shape, dtype and values; None if they cannot be read at no risk."""
    if tensor.numel() * tensor.element_size() > _LARGEST_DIGEST:
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad(), _disable_current_modes():
        values = tensor.detach().cpu().contiguous()
        # Bytes, since numpy does not have all dtypes.
        data = values.reshape(-1).view(torch.uint8).numpy().data if values.numel() else b""
        checksum = zlib.crc32(data)
    return hash((tuple(tensor.shape), str(tensor.dtype), checksum))
