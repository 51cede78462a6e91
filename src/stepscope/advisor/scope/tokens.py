"""Number of tokens in the inputs of a model's call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_IDS = ("input_ids", "tokens", "idx")
"""Names of token ids in the keyword arguments or batches of common libraries."""


def tokens_in(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    """Return the number of token ids: the size of the named input, or of the first tensor if it
    holds integers of at least two dimensions; 0 for a model of other inputs."""
    for inputs in (keywords, *(one for one in arguments if isinstance(one, Mapping))):
        named = next((inputs[name] for name in _IDS if name in inputs), None)
        if isinstance(named, torch.Tensor):
            return named.numel()
    first = next(_tensors((*arguments, *keywords.values())), None)
    if first is None or first.dtype not in (torch.int64, torch.int32) or first.dim() < 2:
        return 0
    return first.numel()


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(tuple(value.values()))
