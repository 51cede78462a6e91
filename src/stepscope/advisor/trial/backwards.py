"""Observer of a program's backward calls and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_UNSCALED = "_stepscope_unscaled"


class Backwards:
    """Wraps `torch.autograd.backward`, through which every backward call goes."""

    def __init__(self) -> None:
        self.before: list[Callable[[Any], None]] = []
        """Called with the roots of each backward."""
        self.paused = False
        """Whether backward calls are those of a `TrainStep`, and not of the program."""
        self._pending: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] = []

    def attach(self) -> None:
        plain = torch.autograd.backward
        scale = torch.amp.GradScaler.scale

        def backward(tensors: Any, *arguments: Any, **keywords: Any) -> None:
            if not self.paused:
                for call in self.before:
                    call(tensors)
                self.note(tensors)
            plain(tensors, *arguments, **keywords)

        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, torch.Tensor):
                setattr(result, _UNSCALED, outputs.detach())
            return result

        torch.autograd.backward = backward
        torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign, assignment]

    def note(self, tensors: Any) -> None:
        """Record a scalar root as a loss. The copy stays on the device: reading it would
        synchronize."""
        for root in tensors if isinstance(tensors, tuple | list) else (tensors,):
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                self._pending.append(getattr(root, _UNSCALED, root).detach().clone().flatten()[0])

    def end_step(self) -> None:
        """Sum the losses since the last step (micro-batches). A step without a loss is not counted:
        with several optimizers it is not known at first which one ends a training step."""
        if self._pending:
            self._steps.append(torch.stack(self._pending).double().sum())
            self._pending.clear()

    def take(self) -> list[float | None]:
        """Return the losses of all steps since the last call; None for one that is not finite."""
        # Not with float(): the change `read_back` makes it return the value of an earlier step.
        values = torch.stack(self._steps).tolist() if self._steps else []
        self._steps.clear()
        return [value if math.isfinite(value) else None for value in values]
