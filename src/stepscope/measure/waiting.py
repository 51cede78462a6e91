"""A training step as a module that waits where a real one computes, and has its gradients.

For ranks that are more than the machine's cores: what they send is real, their compute is time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Due(NamedTuple):
    """A gradient: its size, its format, and when it is ready after the start of the backward."""

    elements: int
    dtype: str
    ready_ms: float


class Pace:
    """Sleeps for stretches of time; what one oversleeps, the next is shorter by."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def wait(self, ms: float, began_s: float) -> None:
        due = began_s + ms / 1e3 - self._late_s
        left = due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._late_s = time.monotonic() - due


class WaitingStep(nn.Module):
    """Its backward makes gradients in their order and at their distances.

    Distances, not moments: what a hook does with a gradient delays all that follow, as it would
    delay real compute.
    """

    def __init__(
        self,
        forward_ms: float,
        gradients: Sequence[Due],
        backward_ms: float,
        optimizer_ms: float,
        like: WaitingStep | None = None,
    ) -> None:
        """`like` is another of the same gradients, whose values this one may use as well."""
        super().__init__()
        self._forward_ms, self._optimizer_ms = forward_ms, optimizer_ms
        self._pace = Pace()
        self.held = nn.ParameterList(
            nn.Parameter(torch.zeros(due.elements, dtype=getattr(torch, due.dtype)))
            for due in gradients
        )
        # Copied for each backward: a real one makes new tensors as well.
        self._made: list[Tensor] = (
            [torch.full_like(parameter, 1e-3) for parameter in self.held]
            if like is None
            else like._made
        )
        self._order = sorted(range(len(gradients)), key=lambda place: gradients[place].ready_ms)
        moments = [0.0, *(gradients[place].ready_ms for place in self._order), backward_ms]
        self._gaps = [end - start for start, end in pairwise(moments)]

    def forward(self) -> Tensor:
        began = time.monotonic()
        start = torch.zeros((), requires_grad=True)
        stream: Tensor = _Wait.apply(  # type: ignore[no-untyped-call]
            start, None, None, self._gaps[-1], self._pace
        )
        # Autograd goes through these from last to first.
        for number in reversed(range(len(self._order))):
            place = self._order[number]
            stream = _Wait.apply(  # type: ignore[no-untyped-call]
                stream, self.held[place], self._made[place], self._gaps[number], self._pace
            )
        self._pace.wait(self._forward_ms, began)
        return stream

    def optimize(self) -> None:
        began = time.monotonic()
        for parameter in self.held:
            parameter.grad = None
        self._pace.wait(self._optimizer_ms, began)


class _Wait(torch.autograd.Function):
    """Nothing in the forward; in the backward the time until a gradient is there, and it."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, parameter: Tensor | None, made: Tensor | None, gap_ms: float,
        pace: Pace,
    ) -> Tensor:  # fmt: skip
        ctx.made, ctx.gap_ms, ctx.pace = (None if parameter is None else made), gap_ms, pace
        return stream.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        began = time.monotonic()
        gradient = None if ctx.made is None else ctx.made.clone()
        ctx.pace.wait(ctx.gap_ms, began)
        return incoming[0], gradient, None, None, None
