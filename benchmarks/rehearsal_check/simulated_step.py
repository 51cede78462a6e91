"""A simulated training step: a module that sleeps instead of computing and produces gradients.

It is used with more ranks than the machine has cores: communication is real, compute is a wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Due(NamedTuple):
    """A gradient: its size, its dtype, and its time from the start of the backward pass."""

    elements: int
    dtype: str
    ready_ms: float


class Pace:
    """A schedule: each interval begins when the previous one was due to end, late or not."""

    def __init__(self) -> None:
        self._due_s = self._paused_s = 0.0

    def start(self, at_s: float) -> None:
        self._due_s = at_s

    def wait(self, ms: float) -> None:
        self._due_s += ms / 1e3
        left = self._due_s - time.monotonic()
        if left > 0:
            time.sleep(left)

    def pause(self) -> None:
        """Stop the schedule: other code uses the thread from now on."""
        self._paused_s = time.monotonic()

    def resume(self) -> None:
        """Continue the schedule, delayed by the time since `pause`."""
        self._due_s += time.monotonic() - self._paused_s


class WaitingStep(nn.Module):
    """Produces the gradients in the recorded order and at the recorded intervals.

    A gradient hook delays all following gradients, as it would delay real compute; the time of
    autograd itself between two gradients is part of the recorded interval.
    """

    def __init__(
        self,
        forward_ms: float,
        gradients: Sequence[Due],
        backward_ms: float,
        optimizer_ms: float,
        like: WaitingStep | None = None,
    ) -> None:
        """`like` is another step with the same gradients, whose values this step shares."""
        super().__init__()
        self._forward_ms, self._optimizer_ms = forward_ms, optimizer_ms
        self._pace = Pace()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(due.elements, dtype=getattr(torch, due.dtype)))
            for due in gradients
        )
        # Copied for each backward pass: a real backward pass creates new tensors too.
        self._gradients: list[Tensor] = (
            [torch.full_like(parameter, 1e-3) for parameter in self.weights]
            if like is None
            else like._gradients
        )
        self._order = sorted(range(len(gradients)), key=lambda index: gradients[index].ready_ms)
        moments = [0.0, *(gradients[index].ready_ms for index in self._order), backward_ms]
        self._gaps = [end - start for start, end in pairwise(moments)]
        self._at_each_gradient(self._pace.pause)

    def count_hooks(self) -> None:
        """Let the hooks registered so far delay the following gradients; call after wrapping."""
        self._at_each_gradient(self._pace.resume)

    def _at_each_gradient(self, act: Callable[[], None]) -> None:
        # The hook must not reference this module: the garbage collector does not traverse the hooks
        # of a parameter.
        for parameter in self.weights:
            parameter.register_post_accumulate_grad_hook(lambda _: act())

    def forward(self) -> Tensor:
        self._pace.start(time.monotonic())
        start = torch.zeros((), requires_grad=True)
        stream: Tensor = _Wait.apply(  # type: ignore[no-untyped-call]
            start, None, None, self._gaps[-1], self._pace
        )
        # Autograd runs these from last to first.
        for position in reversed(range(len(self._order))):
            index = self._order[position]
            stream = _Wait.apply(  # type: ignore[no-untyped-call]
                stream,
                self.weights[index],
                self._gradients[index],
                self._gaps[position],
                self._pace,
            )
        self._pace.wait(self._forward_ms)
        return stream

    def optimize(self, synchronized: bool = False) -> None:
        """Wait for the optimizer's time; with `synchronized`, counted from now, since the ranks
        have waited for each other."""
        if synchronized:
            self._pace.start(time.monotonic())
        for parameter in self.weights:
            parameter.grad = None
        self._pace.wait(self._optimizer_ms)


class _Wait(torch.autograd.Function):
    """Does nothing in the forward pass; in the backward pass waits and then returns the
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: Tensor,
        parameter: Tensor | None,
        value: Tensor | None,
        gap_ms: float,
        pace: Pace,
    ) -> Tensor:
        ctx.value, ctx.gap_ms, ctx.pace = (None if parameter is None else value), gap_ms, pace
        return stream.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradient = None if ctx.value is None else ctx.value.clone()
        ctx.pace.wait(ctx.gap_ms)
        return incoming[0], gradient, None, None, None
