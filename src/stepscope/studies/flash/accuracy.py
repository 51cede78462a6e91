"""Errors against float64 of an implementation and of the reference in the same dtype."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.records.schema import Quantity
from stepscope.studies.attention.workload import RESULTS, AttentionStep, AttentionWorkload

if TYPE_CHECKING:
    from torch import Tensor

    from stepscope.measure.device import Device

LONGEST = 4096
_MAX_SCORES = 16 * LONGEST**2
"""Limit on scores: one float64 tensor of this many takes 2 GiB."""
_CACHED = 64


class Truth(NamedTuple):
    """Results in float64, in CPU memory so that no later peak memory includes them."""

    exact: dict[str, Tensor]
    reference_error: dict[str, float]
    last_place: dict[str, float]
    """One unit in the last place (ULP) of the largest value: the resolution of the dtype."""


def errors(step: AttentionStep, device: Device) -> tuple[Quantity, ...]:
    """Largest errors of output and gradients; empty where float64 would cost too much."""
    work = step.workload
    if work.seq > LONGEST or work.batch * work.heads * work.seq**2 > _MAX_SCORES:
        return ()
    plain = msgspec.structs.replace(work, attention="reference", mode="both")
    truth = _truth(plain, device)
    values: dict[tuple[str, str], float] = {}
    for result, value in step.results().items():
        exact = truth.exact[result].to(value.device)
        values["error", result] = _largest(value.double() - exact)
        values["reference_error", result] = truth.reference_error[result]
        values["last_place", result] = truth.last_place[result]
    # Records contain finite numbers only; a NaN has no error.
    return tuple(
        Quantity(name=name, variant=result, value=value, unit="1")
        for (name, result), value in values.items()
        if math.isfinite(value)
    )


@lru_cache(maxsize=_CACHED)
def _truth(plain: AttentionWorkload, device: Device) -> Truth:
    """Results in float64. The seed is fixed, so every implementation gets the same tensors."""
    import torch

    from stepscope.attention.reference import reference_attention

    step = AttentionStep(plain, device)
    inputs = [x.detach().double().requires_grad_() for x in (step.q, step.k, step.v)]
    output = reference_attention(*inputs, is_causal=plain.causal)
    gradients = torch.autograd.grad(output, inputs, step.grad.double())
    exact = dict(zip(RESULTS, (output.detach(), *gradients), strict=True))
    rounded = step.results()
    return Truth(
        exact={name: value.cpu() for name, value in exact.items()},
        reference_error={
            name: _largest(rounded[name].double() - value) for name, value in exact.items()
        },
        last_place={
            name: _last_place(_largest(value), torch.finfo(step.q.dtype).eps)
            for name, value in exact.items()
        },
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max().item())


def _last_place(value: float, eps: float) -> float:
    return float(eps * 2.0 ** math.floor(math.log2(value))) if value > 0.0 else 0.0
