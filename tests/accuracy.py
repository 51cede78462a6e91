"""Accuracy policy of every kernel and implementation.

The exact result is the reference in float64 on the same inputs. The baseline is the error of the
reference in the dtype of the inputs: an implementation may have a stated multiple of that error,
plus one unit in the last place of the largest value, since the error of the reference can be
exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.attention import reference_attention
from stepscope.model import TransformerLM, cross_entropy

OUTPUT_FACTOR = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 2.0}
GRADIENT_FACTOR = {torch.float16: 1.5, torch.bfloat16: 1.5, torch.float32: 2.0}


@dataclass(frozen=True)
class Accuracy:
    """The maximum error of one tensor, and that of the reference in the same dtype."""

    error: float
    reference_error: float
    factor: float
    last_place: float
    """One unit in the last place of the largest value."""

    @property
    def ratio(self) -> float:
        """Error in units of the reference's error, without the last place."""
        if self.error <= self.last_place:
            return 0.0
        beyond = self.error - self.last_place
        return beyond / self.reference_error if self.reference_error else math.inf

    @property
    def holds(self) -> bool:
        # A NaN compares false, and so fails.
        return self.error <= self.factor * self.reference_error + self.last_place

    def __str__(self) -> str:
        return (
            f"error {self.error:.3g}, reference {self.reference_error:.3g}, one unit in the last"
            f" place {self.last_place:.3g}: {self.ratio:.2f}× of at most {self.factor}×"
        )


def check_against_float64(
    function: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor | None,
    **how: Any,
) -> dict[str, Accuracy]:
    """Check output and gradients of `function(q, k, v, **how)` against the policy.

    `grad` is the gradient of the output; without it only the output is checked. `how` has the
    options of `attention`: is_causal, scale, causal_align.
    """
    truth = _results(reference_attention, q, k, v, grad, how, torch.float64)
    # Copies: torch's matmuls do not support every stride.
    copies = [x.contiguous() for x in (q, k, v)]
    reference = _results(reference_attention, *copies, grad, how, q.dtype)
    candidate = _results(function, q, k, v, grad, how, q.dtype)
    for name, actual in candidate.items():
        assert actual.dtype == q.dtype, f"{name} is {actual.dtype}, q is {q.dtype}"
    return hold_to_policy(truth, reference, candidate)


def hold_to_policy(
    truth: dict[str, Tensor], reference: dict[str, Tensor], candidate: dict[str, Tensor]
) -> dict[str, Accuracy]:
    """Check every tensor by name; those whose name starts with "d" are gradients. The dtype of a
    result decides its permitted error."""
    accuracies = {}
    for name, exact in truth.items():
        actual = candidate[name]
        assert actual.shape == exact.shape, f"{name}: {actual.shape}, not {exact.shape}"
        factors = GRADIENT_FACTOR if name.startswith("d") else OUTPUT_FACTOR
        accuracies[name] = Accuracy(
            error=_largest(actual.double() - exact),
            reference_error=_largest(reference[name].double() - exact),
            factor=factors[actual.dtype],
            last_place=_last_place(_largest(exact), actual.dtype),
        )
    missed = [f"{name}: {accuracy}" for name, accuracy in accuracies.items() if not accuracy.holds]
    assert not missed, "; ".join(missed)
    return accuracies


def _results(
    function: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor | None,
    how: dict[str, Any],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    # No copy if the dtype is the same: strides are part of the test.
    inputs = [x.detach().to(dtype).requires_grad_(grad is not None) for x in (q, k, v)]
    output = function(*inputs, **how)
    if grad is None:
        return {"output": output}
    gradients = torch.autograd.grad(output, inputs, grad.to(dtype))
    return {"output": output.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def _largest(x: Tensor) -> float:
    # max() of a tensor with a NaN is NaN.
    return x.abs().max().item() if x.numel() else 0.0


def _last_place(value: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    if not math.isfinite(value):
        return 0.0
    return info.eps * 2.0 ** math.floor(math.log2(max(value, info.tiny)))


def stacked_results(
    model: TransformerLM, batches: Sequence[tuple[Tensor, Tensor]], *, fused_loss: bool
) -> dict[str, Tensor]:
    """Loss and gradients of each batch; the model computes the loss itself, or PyTorch from its
    logits."""
    results: dict[str, list[Tensor]] = {}
    for tokens, targets in batches:
        model.zero_grad()
        loss = model(tokens, targets) if fused_loss else cross_entropy(model(tokens), targets)
        loss.backward()
        results.setdefault("loss", []).append(loss.detach())
        for name, p in model.named_parameters():
            assert p.grad is not None
            results.setdefault(f"d {name}", []).append(p.grad)
    return {name: torch.stack(values) for name, values in results.items()}
