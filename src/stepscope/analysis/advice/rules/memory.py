"""A plan of what the blocks of a model save, recompute and copy to host memory."""

from __future__ import annotations

from stepscope.analysis.advice.program import Program, setting

MEMORY = "memory"


@setting(MEMORY, without="the model has no blocks of the plan")
def _follow(program: Program, value: str) -> None:
    program.follow_memory_plan(value)
