"""Criteria of RMSNorm, and the mistakes that explain a wrong result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.grading.criteria.attempt import Attempt, Cause
from stepscope.grading.criteria.implementation import EPS, Norm
from stepscope.grading.criteria.interpreter import Launches

_LARGE_EPS = 1e-2
_COMMON_EPS = (1e-6, 1e-5, 1e-8, 1e-12)


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    grad: Tensor
    eps: float

    @property
    def shown(self) -> str:
        shape = "×".join(map(str, self.x.shape))
        return f"{shape}, {str(self.x.dtype).removeprefix('torch.')}"

    def to(self, dtype: torch.dtype) -> Inputs:
        x, weight, grad = (t.detach().to(dtype) for t in (self.x, self.weight, self.grad))
        return Inputs(x, weight, grad, self.eps)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Input and weight as leaves of a new graph."""
        return self.x.detach().requires_grad_(), self.weight.detach().requires_grad_()


def inputs(
    norm: Norm,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    size: float = 1.0,
    eps: float = EPS,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(*shape, generator=generator) for _ in range(2))
    weight = 1.0 + 0.5 * torch.randn(shape[-1], generator=generator)
    x, weight, grad = (
        t.to(device=device, dtype=dtype) for t in (x * size + 0.3 * size, weight, grad)
    )
    return Inputs(x, weight, grad, eps if norm.eps is None else norm.eps)


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype)


def reference(given: Inputs) -> dict[str, Tensor]:
    x, weight = given.leaves()
    output = formula(x, weight, given.eps)
    dx, dweight = torch.autograd.grad(output, (x, weight), given.grad)
    return {"output": output.detach(), "dx": dx, "dweight": dweight}


def grade(
    attempt: Attempt, norm: Norm, given: Inputs, *, what: str = "", may_refuse: bool = False
) -> None:
    what = what or given.shown
    exact, near = reference(given.to(torch.float64)), reference(given)
    with attempt.calling(what, may_refuse=may_refuse):
        x, weight = given.leaves()
        output: Any = norm.call(x, weight, given.eps)
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            attempt.fault("wrong-type", f"the result is a {kind} instead of a tensor for {what}")
            return
        right = attempt.compare(
            "output",
            what,
            output,
            exact["output"],
            near["output"],
            mistakes(given),
            given.x.dtype,
        )
        if not right:
            return
        gradients = torch.autograd.grad(output, (x, weight), given.grad, allow_unused=True)
        for name, gradient in zip(("dx", "dweight"), gradients, strict=True):
            attempt.compare(
                name,
                what,
                gradient,
                exact[name],
                near[name],
                gradient_mistakes(given, name),
                given.x.dtype,
            )


def mistakes(given: Inputs) -> Iterator[Cause]:
    """Common wrong forward passes."""
    low = given
    given = given.to(torch.float64)
    x, weight, eps = given.x, given.weight, given.eps
    square = x.pow(2).mean(-1, keepdim=True)

    def cause(code: str, text: str, value: Tensor) -> Cause:
        return Cause(code, text, value)

    yield cause("missing-eps", "eps is not added", x * torch.rsqrt(square) * weight)
    yield cause(
        "missing-eps",
        "eps is added to the root instead of the mean square",
        x / (square.sqrt() + eps) * weight,
    )
    for other in _COMMON_EPS:
        if other != eps:
            yield cause(
                "wrong-eps", f"eps is {other:g} instead of {eps:g}", formula(x, weight, other)
            )
    yield cause("missing-weight", "the weight is ignored", formula(x, torch.ones_like(weight), eps))
    yield cause("missing-weight", "1 is added to the weight", formula(x, 1 + weight, eps))
    centered = x - x.mean(-1, keepdim=True)
    layer = formula(centered, weight, eps)
    yield cause("mean-subtracted", "the mean is subtracted, as in LayerNorm", layer)
    yield cause(
        "sum-not-mean",
        "the squares are summed, not averaged",
        x * torch.rsqrt(square * x.shape[-1] + eps) * weight,
    )
    yield cause(
        "no-root", "it is divided by the mean square without the root", x / (square + eps) * weight
    )
    if low.x.dtype in (torch.float16, torch.bfloat16):
        yield cause(
            "low-precision",
            "the mean square is accumulated in the dtype of the input; cast to float32 first",
            _in_low_precision(low),
        )


def _in_low_precision(given: Inputs) -> Tensor:
    x, weight, _, eps = given
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight).double()


def gradient_mistakes(given: Inputs, name: str) -> Iterator[Cause]:
    given = given.to(torch.float64)
    x, weight, grad, eps = given
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


def values(attempt: Attempt, norm: Norm, device: Any) -> None:
    for shape in ((16, 64), (4, 8, 64)):
        if not attempt.faults:
            grade(attempt, norm, inputs(norm, *shape, device=device))


def small(attempt: Attempt, norm: Norm, device: Any) -> None:
    given = inputs(norm, 16, 64, device=device, size=1e-3)
    grade(attempt, norm, given, what="rows of 0.001")
    if norm.eps is None and not attempt.faults:
        wide = inputs(norm, 16, 64, device=device, size=0.1, eps=_LARGE_EPS)
        grade(attempt, norm, wide, what=f"eps {_LARGE_EPS}")
    if not attempt.faults:
        zeros = given._replace(x=torch.zeros_like(given.x))
        with attempt.calling("zero rows"):
            output = norm.call(zeros.x, zeros.weight, zeros.eps)
            if not torch.equal(output, torch.zeros_like(output)):
                attempt.fault("missing-eps", "zero rows do not give zeros: eps is not added")


def dtypes(attempt: Attempt, norm: Norm, device: Any) -> None:
    """Long rows, and values whose squares overflow float16."""
    for dtype, size in ((torch.float16, 1.0), (torch.float16, 400.0), (torch.bfloat16, 1.0)):
        given = inputs(norm, 8, 1024, dtype=dtype, device=device, size=size)
        what = f"{given.shown}{'' if size == 1.0 else f', values around {size:g}'}"
        trial = Attempt(attempt.folder)
        with Launches() as launches:
            grade(trial, norm, given, what=what, may_refuse=True)
        if dtype == torch.bfloat16 and launches.interpreted:
            attempt.note("bfloat16 is not graded: Triton's interpreter computes it incorrectly")
            continue
        attempt.faults += trial.faults
        attempt.notes += trial.notes
        if trial.faults:
            return


def widths(attempt: Attempt, norm: Norm, device: Any) -> None:
    for shape in ((5, 100), (33, 17), (3, 1), (7, 1025)):
        before = len(attempt.notes)
        grade(attempt, norm, inputs(norm, *shape, device=device), may_refuse=True)
        if attempt.faults or len(attempt.notes) > before:
            return


def strides(attempt: Attempt, norm: Norm, device: Any) -> None:
    given = inputs(norm, 16, 64, device=device)
    transposed = given._replace(x=given.x.t().contiguous().t())
    grade(attempt, norm, transposed, what="transposed inputs")
    if not attempt.faults:
        every = inputs(norm, 16, 128, device=device)
        view = given._replace(x=every.x[:, ::2])
        grade(attempt, norm, view, what="every second column of a tensor")
    if not attempt.faults:
        ones = given.grad.new_ones(()).expand(given.grad.shape)
        grade(attempt, norm, given._replace(grad=ones), what="the gradient of a sum")


def second_call(attempt: Attempt, norm: Norm, device: Any) -> None:
    pending = []
    calls = [inputs(norm, 16, 64, device=device, seed=seed) for seed in (1, 2)]
    for given in (*calls, inputs(norm, 3, 128, device=device, seed=3)):
        with attempt.calling(given.shown):
            leaves = given.leaves()
            pending.append((given, leaves, norm.call(*leaves, given.eps)))
    if attempt.faults:
        return
    for given, leaves, output in pending:
        trial, what = Attempt(attempt.folder), f"{given.shown}, one of three pending calls"
        exact, near = reference(given.to(torch.float64)), reference(given)
        with trial.calling(what):
            grads = torch.autograd.grad(output, leaves, given.grad, allow_unused=True)
            results = {"output": output, "dx": grads[0], "dweight": grads[1]}
            for name, actual in results.items():
                trial.compare(name, what, actual, exact[name], near[name])
        if trial.faults:
            alone = Attempt(attempt.folder)
            grade(alone, norm.fresh(), given)
            fault = trial.faults[0]
            if alone.faults:
                attempt.faults.append(fault)
            else:
                why = "The same call alone is right: something is kept from call to call"
                attempt.fault("stale-result", f"{fault.text}. {why}", **fault.values)
            return


CRITERIA = {
    "values": values,
    "small": small,
    "dtypes": dtypes,
    "widths": widths,
    "strides": strides,
    "second-call": second_call,
}
