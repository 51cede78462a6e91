"""Smallest changes with which a step fits into memory, each with its predicted peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.analysis.predict.plan import IN_BACKWARD, WITHIN_BACKWARD, StepPlan
from stepscope.analysis.predict.step import predict, runs_within
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import KEEPS
from stepscope.model.checkpointing import NONE
from stepscope.records.plans import Frontier, Plan

MARGIN = 1.02
"""Margin for the error of a predicted peak."""
_FUSED = ("torch-fused", "stepscope-fused", *WITHIN_BACKWARD)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A changed plan that fits."""

    words: str
    plan: StepPlan
    peak: int


def within(found: Frontier, budget: int) -> Plan | None:
    """Return the fastest plan that fits."""
    return next((plan for plan in found.plans if plan.peak * MARGIN <= budget), None)


def fits(plan: StepPlan, peak: int, budget: int) -> bool:
    """Return True if the peak fits with its margin and the allocator can place every block."""
    return peak * MARGIN <= budget and runs_within(plan, budget)


def changes_that_fit(plan: StepPlan, budget: int, most: int = 4) -> tuple[Change, ...]:
    """Return up to `most` changes that fit, those that alter the step least first.

    The order: changes that keep the result and cost no time, then the dtype, then changes that
    cost time, then a smaller batch, then several at once. Of changes to the same fields only the
    first that fits is returned.
    """
    fitting: list[Change] = []
    done: set[frozenset[str]] = set()
    for words, fields in _candidates(plan):
        if frozenset(fields) in done:
            continue
        try:
            changed = msgspec.structs.replace(plan, **fields)
        except UsageError:
            # Incompatible with the rest of the plan.
            continue
        peak = predict(changed).peak.allocated
        if fits(changed, peak, budget):
            fitting.append(Change(words=words, plan=changed, peak=peak))
            done.add(frozenset(fields))
        if len(fitting) == most:
            break
    return tuple(fitting)


def _candidates(plan: StepPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    fused = {"optimizer": "torch-fused"}
    if plan.mode == "train-step" and plan.optimizer not in _FUSED:
        yield "fused AdamW", fused
    else:
        fused = {}
    if plan.fused and plan.mode == "train-step" and not plan.updates_in_backward:
        yield "optimizer-in-backward AdamW", {"optimizer": IN_BACKWARD}
    flash: dict[str, Any] = {}
    if plan.attention == "reference":
        flash = {"attention": "sdpa"}
        yield "flash attention", flash
        if fused:
            flash |= fused
            yield "fused AdamW and flash attention", flash
    with_flash = "fused AdamW, flash attention" if fused else "flash attention"
    bf16: dict[str, Any] = {}
    if plan.dtype in ("float32", "tf32"):
        bf16 = {"dtype": "bfloat16"}
        yield "bfloat16 autocast", bf16
        if flash:
            yield f"{with_flash} and bfloat16 autocast", flash | bf16
    if plan.fused_projections and plan.mode != "forward" and plan.activation_policy in KEEPS:
        for policy in KEEPS[KEEPS.index(plan.activation_policy) + 1 :]:
            yield f"activation policy {policy}", {"activation_policy": policy}
    segments = [k for k in (1, 2, 4, 8, 16) if k < plan.model.n_layers]
    if plan.mode != "forward" and plan.checkpoint == NONE:
        for k in segments:
            words = "each block" if k == 1 else f"every {k} blocks"
            yield f"checkpointing of {words}", {"checkpoint": str(k)}
        for k in segments if flash else ():
            words = "each block" if k == 1 else f"every {k} blocks"
            yield f"{with_flash} and checkpointing of {words}", flash | {"checkpoint": str(k)}
    smallest = {} if plan.checkpoint != NONE or plan.mode == "forward" else {"checkpoint": "1"}
    batch = plan.batch // 2
    while batch >= 1:
        yield f"batch {batch}", {"batch": batch}
        if flash:
            yield f"{with_flash} and batch {batch}", flash | {"batch": batch}
        batch //= 2
    if plan.mode == "train-step":
        narrow = flash | fused | {"dtype": "bfloat16-pure"}
        words = "weights and optimizer state in bfloat16"
        words += ", fused AdamW" * bool(fused) + ", flash attention" * bool(flash)
        yield words, narrow
        if smallest:
            yield f"{words}, checkpointing", narrow | smallest
        yield f"{words}, batch 1", narrow | {"batch": 1}
        yield f"{words}, checkpointing, batch 1", narrow | smallest | {"batch": 1}
