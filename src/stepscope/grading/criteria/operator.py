"""Calls of an operator: compare results and gradients with the exact ones, alone and in a row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stepscope.grading.criteria.attempt import Attempt, Cause
from stepscope.grading.criteria.implementation import Operator
from stepscope.grading.criteria.interpreter import Launches

Results = dict[str, Tensor]
"""The output and the gradients of one call, by name."""


@dataclass(frozen=True)
class Call(ABC):
    """Inputs of one call; `grad` is the gradient of the output."""

    tensors: tuple[Tensor, ...]
    grad: Tensor
    option: Any
    """The last argument of the operator: a flag or a number."""
    names: ClassVar[tuple[str, ...]]
    """Names of the gradients of `tensors`."""

    @abstractmethod
    def output(self, *tensors: Tensor) -> Tensor:
        """Return the result of the reference."""

    @abstractmethod
    def mistakes(self) -> Iterator[Cause]:
        """Yield common wrong outputs."""

    @abstractmethod
    def gradient_mistakes(self, name: str, exact: Results) -> Iterator[Cause]:
        """Yield wrong values of one gradient, of a right forward pass. Called in float64."""

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def shown(self) -> str:
        shape = "×".join(map(str, self.tensors[0].shape))
        return f"{shape}, {str(self.dtype).removeprefix('torch.')}"

    def with_tensors(self, *tensors: Tensor) -> Self:
        return replace(self, tensors=tensors)

    def with_grad_of_sum(self) -> Self:
        """Return the call with the gradient of `output.sum()`, whose strides are 0."""
        return replace(self, grad=self.grad.new_ones(()).expand(self.grad.shape))

    def to(self, dtype: torch.dtype) -> Self:
        tensors = tuple(x.detach().to(dtype) for x in self.tensors)
        return replace(self, tensors=tensors, grad=self.grad.detach().to(dtype))

    def baseline(self) -> Self:
        """Return the inputs of the reference whose error is the baseline."""
        return self

    def size(self, name: str, exact: Results) -> float:  # noqa: ARG002
        """Return the size of float32 intermediates of a gradient that the baseline lacks."""
        return 0.0

    def leaves(self) -> tuple[Tensor, ...]:
        """Return the tensors as leaves of a new graph."""
        return tuple(x.detach().requires_grad_() for x in self.tensors)

    def results(self) -> Results:
        leaves = self.leaves()
        output = self.output(*leaves)
        gradients = torch.autograd.grad(output, leaves, self.grad)
        return {"output": output.detach()} | dict(zip(self.names, gradients, strict=True))


def grade(
    attempt: Attempt, operator: Operator, call: Call, *, what: str = "", may_refuse: bool = False
) -> None:
    """Call the implementation once and compare its results."""
    what = what or call.shown
    with attempt.calling(what, may_refuse=may_refuse):
        leaves = call.leaves()
        _compare(attempt, what, call, leaves, operator.call(*leaves, call.option))


def _compare(
    attempt: Attempt, what: str, call: Call, leaves: Sequence[Tensor], output: Any
) -> None:
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        attempt.fault("wrong-type", f"the result is a {kind} instead of a tensor for {what}")
        return
    exactly = call.to(torch.float64)
    exact, near = exactly.results(), call.baseline().results()
    attempt.compare(
        "output", what, output, exact["output"], near["output"], call.mistakes(), call.dtype
    )
    if attempt.faults:
        return
    gradients = torch.autograd.grad(output, leaves, call.grad, allow_unused=True)
    for name, gradient in zip(call.names, gradients, strict=True):
        causes = exactly.gradient_mistakes(name, exact)
        size = call.size(name, exact)
        attempt.compare(name, what, gradient, exact[name], near[name], causes, call.dtype, size)


def grade_each(attempt: Attempt, operator: Operator, calls: Iterable[tuple[str, Call]]) -> None:
    """Grade calls, each with its description, until one is wrong."""
    for what, call in calls:
        if not attempt.faults:
            grade(attempt, operator, call, what=what)


def grade_until_refused(attempt: Attempt, operator: Operator, calls: Iterable[Call]) -> None:
    for call in calls:
        before = len(attempt.notes)
        grade(attempt, operator, call, may_refuse=True)
        if attempt.faults or len(attempt.notes) > before:
            return


def grade_dtypes(attempt: Attempt, operator: Operator, calls: Iterable[tuple[str, Call]]) -> None:
    for what, call in calls:
        trial = Attempt(attempt.folder)
        with Launches() as launches:
            grade(trial, operator, call, what=what, may_refuse=True)
        if call.dtype == torch.bfloat16 and launches.interpreted:
            attempt.note("bfloat16 is not graded: Triton's interpreter computes it incorrectly")
            continue
        attempt.faults += trial.faults
        attempt.notes += trial.notes


def grade_pending(attempt: Attempt, operator: Operator, calls: Sequence[Call]) -> None:
    """Make all forward passes before the backward passes."""
    pending = []
    for call in calls:
        with attempt.calling(call.shown):
            leaves = call.leaves()
            pending.append((call, leaves, operator.call(*leaves, call.option)))
    if attempt.faults:
        return
    for call, leaves, output in pending:
        trial, what = Attempt(attempt.folder), f"{call.shown}, one of {len(calls)} pending calls"
        with trial.calling(what):
            _compare(trial, what, call, leaves, output)
        _add_stale(attempt, trial, call, operator)


def grade_later(attempt: Attempt, operator: Operator, calls: Iterable[Call]) -> None:
    """Grade calls that come after others."""
    for call in calls:
        if not attempt.faults:
            trial = Attempt(attempt.folder)
            grade(trial, operator, call, what=f"{call.shown}, after calls with other shapes")
            _add_stale(attempt, trial, call, operator)


def _add_stale(attempt: Attempt, trial: Attempt, call: Call, operator: Operator) -> None:
    """Add faults of a later call, as stale if the same call is right after a new import."""
    alone = Attempt(attempt.folder)
    if trial.faults:
        grade(alone, operator.fresh(), call)
    for fault in trial.faults:
        if alone.faults:
            attempt.faults.append(fault)
        else:
            why = "The same call alone is right: something is kept from call to call"
            attempt.fault("stale-result", f"{fault.text}. {why}", **fault.values)
