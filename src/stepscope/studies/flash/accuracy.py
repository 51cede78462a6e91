"""Errors against float64, of an implementation and of the reference in the same dtype."""

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
_MOST_SCORES = 16 * LONGEST**2
"""In float64 one tensor of scores then takes 2 GiB."""
_KEPT = 64


class Truth(NamedTuple):
    """Results in float64, in host memory so that no later peak has them inside."""

    exact: dict[str, Tensor]
    reference_error: dict[str, float]
    last_place: dict[str, float]
    """One unit in the last place of the largest value: no format can do better."""


def errors(step: AttentionStep, device: Device) -> tuple[Quantity, ...]:
    """Largest errors of output and gradients; nothing where float64 would cost too much."""
    work = step.workload
    if work.seq > LONGEST or work.batch * work.heads * work.seq**2 > _MOST_SCORES:
        return ()
    plain = msgspec.structs.replace(work, attention="reference", mode="both")
    truth = _truth(plain, device)
    found: dict[tuple[str, str], float] = {}
    for result, value in step.results().items():
        exact = truth.exact[result].to(value.device)
        found["error", result] = _largest(value.double() - exact)
        found["reference_error", result] = truth.reference_error[result]
        found["last_place", result] = truth.last_place[result]
    # A record holds finite numbers only: what is not a number has no distance from the truth.
    return tuple(
        Quantity(name=name, variant=result, value=value, unit="1")
        for (name, result), value in found.items()
        if math.isfinite(value)
    )


@lru_cache(maxsize=_KEPT)
def _truth(plain: AttentionWorkload, device: Device) -> Truth:
    """The seed is fixed, so the reference draws the tensors that every implementation gets."""
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
