"""Fused and foreach implementations of the optimizer."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import BETWEEN, Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.limits import ADAMW_BYTES

_UPDATE_BYTES = {"adam": ADAMW_BYTES, "sgd": 20}
"""Bytes per parameter: read weight, gradient and moments; write all but the gradient; float32."""
_NEAR_BANDWIDTH = {True: {"adam": 1.2, "sgd": 1.2}, False: {"adam": 3.2, "sgd": 1.2}}
"""Time of a fused update over that of moving its bytes once, on a GPU (True) or a CPU. Adam's
square roots and divisions limit a CPU: 2.9 to 3.9 times in `results/advise-slow_cpu.jsonl` and for
2.5 million parameters in one or twelve tensors."""
_FUSED_LEFT_ON_CPU = 0.08
"""Share that remains of an update over many small tensors: one call per tensor."""
_FUSED_LAUNCHES = 0.05
_FOREACH = 0.4
"""Share of a tensor-by-tensor update that remains with the foreach implementation."""


@rule("fused-optimizer", "fused optimizer", stage=Stage.KERNELS)
def _optimizer(facts: Facts) -> Change | Left | None:
    each = _UPDATE_BYTES.get(facts.optimizer)
    if facts.fused_optimizer:
        return Left("the optimizer is fused already")
    if each is None:
        return Left(f"{facts.optimizer_name or 'the optimizer'} has no fused implementation")
    if not facts.bandwidth or not facts.parameters:
        return None
    moved = facts.parameters * each / facts.bandwidth * 1e3
    takes = facts.phase_ms("optimizer")
    fused = _NEAR_BANDWIDTH[facts.on_gpu][facts.optimizer] * moved
    if not facts.on_gpu:
        fused = max(fused, _FUSED_LEFT_ON_CPU * takes)
    launches = sum(work.launches for work in facts.phases if work.name == "optimizer")
    after = facts.with_work(
        lambda work: replace(
            work, classes={"optimizer": min(fused, takes)}, launches=work.launches * _FUSED_LAUNCHES
        ),
        ("optimizer",),
    )
    where = " on the device" if facts.on_gpu else _between(facts)
    name = facts.optimizer_name or {"adam": "AdamW", "sgd": "SGD"}[facts.optimizer]
    return Change(
        after=replace(after, fused_optimizer=True),
        why=f"the update takes {takes:.3g} ms{where}"
        + (f" in {launches:.4g} kernels" if launches else "")
        + f"; moving its bytes once takes {moved:.3g} ms at the bandwidth measured here",
        risk="numerics: none beyond rounding"
        if facts.optimizer_of_torch
        else f"numerics: your update rule is assumed to be {name}'s",
        lines=(f"optimizer = torch.optim.{name}(model.parameters(), …, fused=True)",),
        setting={"optimizer": "adamw-fused" if facts.optimizer == "adam" else "sgd-fused"},
    )


def _between(facts: Facts) -> str:
    """A CPU's ledger lists this time on its own line, not on the optimizer's."""
    ms = facts.class_ms(BETWEEN, among=("optimizer",))
    return f", {ms:.3g} ms of it between operators" if ms else ""


@rule("foreach-optimizer", "foreach optimizer (all tensors at once)", stage=Stage.KERNELS)
def _foreach(facts: Facts) -> Change | Left | None:
    if facts.optimizer:
        return Left("the optimizer has a fused implementation, which is faster")
    if not facts.loops_over_tensors:
        return Left("the optimizer does not update tensor by tensor")
    takes = facts.phase_ms("optimizer")

    def at_once(work: PhaseWork) -> PhaseWork:
        every = dict.fromkeys(work.classes, _FOREACH)
        return work.scaled(every, _FUSED_LAUNCHES)

    after = replace(facts.with_work(at_once, ("optimizer",)), loops_over_tensors=False)
    return Change(
        after=after,
        why=f"the update takes {takes:.3g} ms{_between(facts)}, one tensor at a time",
        risk="memory: temporaries as large as the parameters",
        lines=("optimizer = …(model.parameters(), …, foreach=True)",),
        setting={"optimizer": "foreach"},
    )


@setting(
    "optimizer",
    "adamw-fused",
    "sgd-fused",
    without="no optimizer with another implementation is created",
)
def _fuse(program: Program, value: str) -> None:  # noqa: ARG001
    program.fuse_optimizers()


@setting("optimizer", "foreach", without="no optimizer with another implementation is created")
def _update_at_once(program: Program, value: str) -> None:  # noqa: ARG001
    program.use_foreach()
