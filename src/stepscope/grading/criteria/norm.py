"""Criteria of RMSNorm, and the mistakes that explain a wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.grading.criteria.attempt import Attempt, Cause
from stepscope.grading.criteria.implementation import EPS, Operator
from stepscope.grading.criteria.operator import (
    Call,
    Results,
    grade,
    grade_dtypes,
    grade_each,
    grade_pending,
    grade_until_refused,
)

_LARGE_EPS = 1e-2
_COMMON_EPS = (1e-6, 1e-5, 1e-8, 1e-12)


@dataclass(frozen=True)
class NormCall(Call):
    """Input and weight, with eps."""

    names = ("dx", "dweight")

    def output(self, *tensors: Tensor) -> Tensor:
        x, weight = tensors
        return formula(x, weight, self.option)

    def mistakes(self) -> Iterator[Cause]:
        x, weight, eps = *self.to(torch.float64).tensors, self.option
        square = x.pow(2).mean(-1, keepdim=True)
        total = square * x.shape[-1]
        centered = formula(x - x.mean(-1, keepdim=True), weight, eps)
        where = "eps is added to the root instead of the mean square"
        yield Cause("missing-eps", "eps is not added", x * torch.rsqrt(square) * weight)
        yield Cause("missing-eps", where, x / (square.sqrt() + eps) * weight)
        for other in _COMMON_EPS:
            if other != eps:
                text = f"eps is {other:g} instead of {eps:g}"
                yield Cause("wrong-eps", text, formula(x, weight, other))
        for code, text, wrong in (
            ("missing-weight", "the weight is ignored", formula(x, torch.ones_like(weight), eps)),
            ("missing-weight", "1 is added to the weight", formula(x, 1 + weight, eps)),
            ("mean-subtracted", "the mean is subtracted, as in LayerNorm", centered),
            (
                "sum-not-mean",
                "the squares are summed, not averaged",
                x * torch.rsqrt(total + eps) * weight,
            ),
            (
                "no-root",
                "it is divided by the mean square without the root",
                x / (square + eps) * weight,
            ),
        ):
            yield Cause(code, text, wrong)
        if self.dtype in (torch.float16, torch.bfloat16):
            x, weight = self.tensors
            low = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
            text = "the mean square is accumulated in the dtype of the input; cast to float32 first"
            yield Cause("low-precision", text, low.double())

    def gradient_mistakes(self, name: str, exact: Results) -> Iterator[Cause]:  # noqa: ARG002
        x, weight, grad, eps = *self.tensors, self.grad, self.option
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        unit = x * inverse
        passed = grad * weight
        if name == "dx":
            through = unit * (passed * unit).mean(-1, keepdim=True)
            for text, value in (
                ("the derivative of the root mean square is left out", passed * inverse),
                (
                    "the weight is left out",
                    (grad - unit * (grad * unit).mean(-1, keepdim=True)) * inverse,
                ),
                ("the two terms are added", (passed + through) * inverse),
            ):
                yield Cause("wrong-dx", text, value)
        else:
            rows = (grad * unit).reshape(-1, x.shape[-1])
            for text, value in (
                ("it is averaged over the rows, not summed", rows.mean(0)),
                ("the input is not normalized", (grad * x).reshape(-1, x.shape[-1]).sum(0)),
                ("only the first row counts", rows[0]),
                ("only the last row counts", rows[-1]),
            ):
                yield Cause("wrong-dweight", text, value)


def call_of(
    norm: Operator,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    size: float = 1.0,
    eps: float = EPS,
) -> NormCall:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(*shape, generator=generator) for _ in range(2))
    weight = 1.0 + 0.5 * torch.randn(shape[-1], generator=generator)
    x, weight, grad = (
        t.to(device=device, dtype=dtype) for t in (x * size + 0.3 * size, weight, grad)
    )
    return NormCall((x, weight), grad, eps if norm.eps is None else norm.eps)


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype)


def values(attempt: Attempt, norm: Operator, device: Any) -> None:
    shapes = ((16, 64), (4, 8, 64))
    grade_each(attempt, norm, [("", call_of(norm, *shape, device=device)) for shape in shapes])


def small(attempt: Attempt, norm: Operator, device: Any) -> None:
    call = call_of(norm, 16, 64, device=device, size=1e-3)
    grade(attempt, norm, call, what="rows of 0.001")
    if norm.eps is None and not attempt.faults:
        wide = call_of(norm, 16, 64, device=device, size=0.1, eps=_LARGE_EPS)
        grade(attempt, norm, wide, what=f"eps {_LARGE_EPS}")
    if not attempt.faults:
        with attempt.calling("zero rows"):
            x, weight = call.tensors
            output = norm.call(torch.zeros_like(x), weight, call.option)
            if not torch.equal(output, torch.zeros_like(output)):
                attempt.fault("missing-eps", "zero rows do not give zeros: eps is not added")


def dtypes(attempt: Attempt, norm: Operator, device: Any) -> None:
    """Long rows, and values whose squares overflow float16."""
    calls = []
    for dtype, size in ((torch.float16, 1.0), (torch.float16, 400.0), (torch.bfloat16, 1.0)):
        call = call_of(norm, 8, 1024, dtype=dtype, device=device, size=size)
        calls.append((f"{call.shown}{'' if size == 1.0 else f', values around {size:g}'}", call))
    grade_dtypes(attempt, norm, calls)


def widths(attempt: Attempt, norm: Operator, device: Any) -> None:
    shapes = ((5, 100), (33, 17), (3, 1), (7, 1025))
    grade_until_refused(attempt, norm, (call_of(norm, *shape, device=device) for shape in shapes))


def strides(attempt: Attempt, norm: Operator, device: Any) -> None:
    call = call_of(norm, 16, 64, device=device)
    x, weight = call.tensors
    every, _ = call_of(norm, 16, 128, device=device).tensors
    calls = (
        ("transposed inputs", call.with_tensors(x.t().contiguous().t(), weight)),
        ("every second column of a tensor", call.with_tensors(every[:, ::2], weight)),
        ("the gradient of a sum", call.with_grad_of_sum()),
    )
    grade_each(attempt, norm, calls)


def second_call(attempt: Attempt, norm: Operator, device: Any) -> None:
    calls = [call_of(norm, 16, 64, device=device, seed=seed) for seed in (1, 2)]
    grade_pending(attempt, norm, [*calls, call_of(norm, 3, 128, device=device, seed=3)])


CRITERIA = {
    "values": values,
    "small": small,
    "dtypes": dtypes,
    "widths": widths,
    "strides": strides,
    "second-call": second_call,
}
