"""The smallest change with which a step fits into a memory, each with its predicted peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.analysis.predict.plan import IN_BACKWARD, WITHIN_BACKWARD, StepPlan
from stepscope.analysis.predict.step import predict, runs_within
from stepscope.errors import UsageError
from stepscope.kernels.activation_policy import KEEPS
from stepscope.model.checkpointing import NONE

MARGIN = 1.02
"""What a peak may be off."""
_FUSED = ("torch-fused", "stepscope-fused", *WITHIN_BACKWARD)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    words: str
    plan: StepPlan
    peak: int


def fits(plan: StepPlan, peak: int, budget: int) -> bool:
    """With the margin, and so that the allocator finds room for every block."""
    return peak * MARGIN <= budget and runs_within(plan, budget)


def changes_that_fit(plan: StepPlan, budget: int, most: int = 4) -> tuple[Change, ...]:
    """Up to so many changes that fit, those that alter the step least first; none where nothing
    fits. The order: what leaves the result as it is and costs no time, then the number format, then
    what costs time, then a smaller batch, then several at once. Of changes to the same fields the
    first that fits is enough."""
    found: list[Change] = []
    done: set[frozenset[str]] = set()
    for words, fields in _candidates(plan):
        if frozenset(fields) in done:
            continue
        try:
            changed = msgspec.structs.replace(plan, **fields)
        except UsageError:
            # Does not go with the rest of the plan.
            continue
        peak = predict(changed).peak.allocated
        if fits(changed, peak, budget):
            found.append(Change(words=words, plan=changed, peak=peak))
            done.add(frozenset(fields))
        if len(found) == most:
            break
    return tuple(found)


def _candidates(plan: StepPlan) -> Iterator[tuple[str, dict[str, Any]]]:
    fused = {"optimizer": "torch-fused"}
    if plan.mode == "train-step" and plan.optimizer not in _FUSED:
        yield "fused AdamW", fused
    else:
        fused = {}
    if plan.fused and plan.mode == "train-step" and not plan.updates_in_backward:
        yield "updates in the backward", {"optimizer": IN_BACKWARD}
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
    if plan.joined and plan.mode != "forward" and plan.keep in KEEPS:
        for keep in KEEPS[KEEPS.index(plan.keep) + 1 :]:
            yield f"keeping {keep} for the backward", {"keep": keep}
    stretches = [k for k in (1, 2, 4, 8, 16) if k < plan.model.n_layers]
    if plan.mode != "forward" and plan.checkpoint == NONE:
        for k in stretches:
            words = "each block" if k == 1 else f"every {k} blocks"
            yield f"checkpointing of {words}", {"checkpoint": str(k)}
        for k in stretches if flash else ():
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
