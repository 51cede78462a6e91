"""A training step as a module that waits where a real one computes, and has its gradients.

For ranks that are more than the machine's cores: what they send is real, their compute is time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    """A schedule: each stretch begins where the one before should have ended, late or not."""

    def __init__(self) -> None:
        self._due_s = self._reached_s = 0.0

    def start(self, at_s: float) -> None:
        self._due_s = at_s

    def wait(self, ms: float) -> None:
        self._due_s += ms / 1e3
        left = self._due_s - time.monotonic()
        if left > 0:
            time.sleep(left)

    def reach(self) -> None:
        """Something else has the thread from now on."""
        self._reached_s = time.monotonic()

    def go_on(self) -> None:
        """All that follows is later by as much as it took."""
        self._due_s += time.monotonic() - self._reached_s


class WaitingStep(nn.Module):
    """Its backward makes gradients in their order and at their distances.

    What a hook does with a gradient delays all that follow, as it would delay real compute; what
    autograd itself takes between two gradients is part of the distance that was recorded.
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
        self._at_each_gradient(self._pace.reach)

    def count_hooks(self) -> None:
        """Hooks that were registered until now put off what follows; call after wrapping."""
        self._at_each_gradient(self._pace.go_on)

    def _at_each_gradient(self, act: Callable[[], None]) -> None:
        # It must not hold this module: no collector looks into the hooks of a parameter.
        for parameter in self.held:
            parameter.register_post_accumulate_grad_hook(lambda _: act())

    def forward(self) -> Tensor:
        self._pace.start(time.monotonic())
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
        self._pace.wait(self._forward_ms)
        return stream

    def optimize(self, synchronized: bool = False) -> None:
        """With `synchronized`, from now on: the ranks have waited for each other."""
        if synchronized:
            self._pace.start(time.monotonic())
        for parameter in self.held:
            parameter.grad = None
        self._pace.wait(self._optimizer_ms)


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
        gradient = None if ctx.made is None else ctx.made.clone()
        ctx.pace.wait(ctx.gap_ms)
        return incoming[0], gradient, None, None, None
