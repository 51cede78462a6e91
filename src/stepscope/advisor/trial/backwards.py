"""Who wants to know when a program's backward begins and what its losses were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_UNSCALED = "_stepscope_unscaled"


class Backwards:
    """Sees every call of `backward`, which all go through one function of torch."""

    def __init__(self) -> None:
        self.before: list[Callable[[], None]] = []
        self._pending: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] = []

    def attach(self) -> None:
        plain = torch.autograd.backward
        scale = torch.amp.GradScaler.scale

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
            for call in self.before:
                call()
            self._note(tensors)
            plain(tensors, *arguments, **keywords)

        def scaled(scaler: Any, outputs: Any) -> Any:
            found = scale(scaler, outputs)
            if isinstance(found, torch.Tensor):
                setattr(found, _UNSCALED, outputs.detach())
            return found

        torch.autograd.backward = backward
        torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign, assignment]

    def _note(self, tensors: Any) -> None:
        """A scalar is a loss. A copy stays on the device: to read it would mean to wait."""
        for root in tensors if isinstance(tensors, tuple | list) else (tensors,):
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                self._pending.append(getattr(root, _UNSCALED, root).detach().clone().flatten()[0])

    def end_step(self) -> None:
        """The losses since the last step are one: micro-batches add up. A step without any is none
        of the loop's: of several optimizers it is not known at first which one ends a step."""
        if self._pending:
            self._steps.append(torch.stack(self._pending).double().sum())
            self._pending.clear()

    def take(self) -> list[float | None]:
        """Of every step since the last time; None for one that is not finite."""
        # Not by float(), which a change may have made give the value of a step before.
        values = torch.stack(self._steps).tolist() if self._steps else []
        self._steps.clear()
        return [value if math.isfinite(value) else None for value in values]
