"""The loss of a language model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.torch_tools.ranges import named


def cross_entropy(
    logits: Tensor,  # (..., vocab)
    targets: Tensor,  # (...)
) -> Tensor:
    """Return the mean over tokens of -log p(target), computed in at least float32."""
    with named("loss"):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())
