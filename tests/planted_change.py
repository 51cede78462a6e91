"""A change that is not part of the package, loaded through STEPSCOPE_CHANGES=planted_change: flush
denormal numbers to zero, for which a CPU takes many times as long."""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule


@rule("flush-denormals", "denormal numbers flushed to zero")
def _flush(facts: Facts) -> Change | Left | None:
    if facts.on_gpu:
        return Left("the step runs on a GPU, which is as fast for them")
    return Change(
        after=facts.with_work(lambda work: work.scaled(dict.fromkeys(work.classes, 0.5))),
        why=f"operators take {facts.device_ms:.3g} ms, and a CPU is slow for denormal numbers",
        risk="numerics: numbers below 1.2e-38 become zero",
        lines=("torch.set_flush_denormal(True)",),
        setting={"denormals": "flush"},
    )


@setting("denormals", "flush")
def _make(program: Program, value: str) -> None:  # noqa: ARG001
    import torch

    program.applied["denormals"] += torch.set_flush_denormal(True)
