"""Which attention masks of a Hugging Face decoder say no more than "causal".

These models pass no mask where the causal flag of the kernel is enough. To decide that they read
tensors, so while a CUDA graph is captured they build a mask in memory instead, with which attention
takes about three times as long. A model that is called without a mask and without positions has the
same mask for every batch of a shape: the decision of its eager calls holds for the capture.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

PIECE = "causal mask"
_GIVEN = ("attention_mask", "position_ids")


class CausalMasks:
    """The decisions of one decoder, whose forward is replaced to see how it is called."""

    def __init__(self, decoder: nn.Module | None) -> None:
        self._original = None if decoder is None else decoder.forward
        self._called_without_mask = False
        self._unmasked: set[tuple[int, torch.Size]] = set()
        self._causal: weakref.ref[Tensor] | None = None

    def forward(self, decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del decoder
        assert self._original is not None
        given = any(kwargs.get(name) is not None for name in _GIVEN)
        self._called_without_mask = len(args) <= 1 and not given
        try:
            return self._original(*args, **kwargs)
        finally:
            self._called_without_mask = False

    def is_causal(self, module: nn.Module, q: Tensor, mask: Tensor | None) -> bool:
        """Return whether a causal flag without this mask gives the same attention."""
        key = (id(module), q.shape)
        if mask is None:
            if self._called_without_mask:
                self._unmasked.add(key)
            return True
        if self._called_without_mask and _is_capturing(q) and key in self._unmasked:
            # Gradient checkpointing calls with the same mask again, after the forward pass.
            self._causal = weakref.ref(mask)
        return self._causal is not None and self._causal() is mask


def decoder_around(model: nn.Module, name: str) -> tuple[str, nn.Module | None]:
    """Return the innermost module around the named one that takes token ids, a mask and positions;
    None if there is none."""
    while True:
        module = model.get_submodule(name)
        if {"input_ids", *_GIVEN} <= inspect.signature(module.forward).parameters.keys():
            return name, module
        if not name:
            return name, None
        name = name.rpartition(".")[0]


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
