"""Who wants to know when a program's backward begins and what its losses were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_UNSCALED = "_stepscope_unscaled"


class Backwards:
    """Sees every call of `backward`, which all go through one function of torch."""

    def __init__(self) -> None:
        self.before: list[Callable[[], None]] = []
        self._pending: list[torch.Tensor] = []
        self._steps: list[torch.Tensor | None] = []

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
        """The losses since the last step are one: micro-batches add up."""
        self._steps.append(torch.stack(self._pending).double().sum() if self._pending else None)
        self._pending.clear()

    def take(self) -> list[float | None]:
        """Of every step since the last time; None where a step had none, or none that is finite."""
        steps, self._steps = self._steps, []
        values = [None if one is None else float(one) for one in steps]
        return [v if v is not None and abs(v) < float("inf") else None for v in values]
