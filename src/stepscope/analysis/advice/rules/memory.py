"""A plan of what the blocks of a model save, recompute and copy to host memory."""

from __future__ import annotations

import msgspec

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import TIGHT, Change, Left, rule
from stepscope.analysis.advice.rules.train_step import STEP
from stepscope.records.plans import PlannedStep

MEMORY = "memory"


def setting_of_plan(planned: PlannedStep) -> dict[str, str]:
    """Return the setting that applies the plan; none if the step stays as it is."""
    if planned.apply is None or not planned.apply.blocks:
        return {}
    return {MEMORY: msgspec.json.encode(planned.apply).decode()}


@rule("memory-plan", "a plan of what the blocks save")
def _plan(facts: Facts) -> Change | Left | None:
    planned = facts.planned("step")
    if planned is None:
        return None
    if not facts.is_tight(TIGHT):
        return Left(f"the peak is below {TIGHT:.0%} of the memory, and recomputation costs time")
    plain, *others = planned.frontier.plans
    fitting = planned.plan
    if fitting is None or fitting.is_plain:
        return Left("the step fits as it is" if others else "no plan of the blocks lowers the peak")
    more_ms = facts.step_ms * (fitting.seconds / plain.seconds - 1)
    return Change(
        after=facts,
        gain_ms=-more_ms,
        gain_bytes=plain.peak - fitting.peak,
        why=f"the peak is {facts.peak_bytes / facts.memory_bytes:.0%} of the memory; the plan:"
        f" {fitting.words}",
        risk=f"time: {more_ms:.3g} ms more; it pays if the freed memory is used",
        lines=plan_lines(facts),
        setting=setting_of_plan(planned),
        excludes=excluded_by(planned),
    )


def plan_lines(facts: Facts) -> tuple[str, ...]:
    """Return the code that applies a plan: of a batch on the device, before the loop."""
    budget = f"{TIGHT * facts.memory_bytes / 2**30:.3g}GiB"
    return (
        "import stepscope",
        f'stepscope.fit(model, optimizer, batch, loss_fn=…, budget="{budget}")',
    )


def excluded_by(planned: PlannedStep) -> tuple[str, ...]:
    """Return the settings with which the plan cannot be combined. Neither a CUDA graph nor compiled
    code copies to host memory."""
    offloads = planned.plan is not None and planned.plan.to_host > 0
    return ("checkpoint", *(("compile", STEP) if offloads else ()))


@setting(MEMORY, without="the model has no blocks of the plan")
def _follow(program: Program, value: str) -> None:
    program.follow_memory_plan(value)
