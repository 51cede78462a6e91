"""`stepscope.TrainStep`: the step as a CUDA graph."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import MODEL_PHASES, Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.rules.accelerate import (
    ACCELERATE,
    CALL,
    NUMERICS,
    OPTIMIZER,
    accelerated,
    bytes_saved,
    what_is_fused,
)
from stepscope.analysis.advice.timeline import host_limits_ms, wall_ms

STEP = "step"
"""Setting that runs the loop as a `TrainStep`."""
_GRAPH_SHOWS = 0.97
"""A graph must reduce the step to this share: otherwise the host is not what limits it."""
_FIXED_SHAPES = "one graph for each shape; the Python code of the step does not run in a replay"


def _as_graph(facts: Facts) -> Facts | Left:
    """Return the step as one CUDA graph."""
    if not facts.on_gpu:
        return Left("the step runs on a CPU")
    if facts.captured:
        return Left("the step is a CUDA graph already")
    if facts.ranks > 1:
        return Left("ranks that capture at different steps would wait for each other's collectives")
    phases = (*MODEL_PHASES, OPTIMIZER)
    after = facts.with_work(lambda work: replace(work, launches=0.0), phases)
    return replace(after, captured=True)


def _step_lines(facts: Facts) -> tuple[str, ...]:
    accumulate = f", accumulate={facts.micro_batches}" if facts.micro_batches > 1 else ""
    return (
        f"step = stepscope.TrainStep(model, optimizer{accumulate})"
        "  # and max_grad_norm=, scheduler=, loss_fn= as in your loop",
        "loss = step(batch)  # forward, backward, clipping, update and zero_grad()",
    )


def _step_setting(facts: Facts) -> tuple[dict[str, str], str]:
    if facts.micro_batches > 1:
        return {}, "the loop accumulates gradients: which calls make a step is yours to say"
    return {STEP: "graph"}, ""


@rule("train-step", "stepscope.TrainStep (the step as a CUDA graph)", stage=Stage.LAUNCHES)
def _train_step(facts: Facts) -> Change | Left | None:
    after = _as_graph(facts)
    if isinstance(after, Left):
        return after
    if wall_ms(after) > _GRAPH_SHOWS * wall_ms(facts):
        return Left("the step does not wait for launches")
    settings, by_author = _step_setting(facts)
    return Change(
        after=after,
        why=f"the device waits {host_limits_ms(facts):.3g} ms for launches, and a graph is one"
        " launch",
        risk=_FIXED_SHAPES,
        lines=("import stepscope", *_step_lines(facts)),
        setting=settings,
        by_author=by_author,
    )


@rule(
    "accelerate-step",
    "stepscope.accelerate and TrainStep (fused, as a CUDA graph)",
    stage=Stage.PIECES,
    parts=True,
)
def _accelerated_step(facts: Facts) -> Change | Left | None:
    """Both together: fused kernels are so short that the host limits the step without a graph."""
    fused, graph = accelerated(facts), _as_graph(facts)
    if not isinstance(fused, Facts):
        return fused
    if isinstance(graph, Left):
        return graph
    after = _as_graph(fused)
    assert isinstance(after, Facts)
    settings, by_author = _step_setting(facts)
    late = host_limits_ms(fused)
    return Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=f"{what_is_fused(facts, fused)}; the device would wait {late:.3g} ms for"
        " their launches, and a graph is one launch",
        risk=f"{NUMERICS}; {_FIXED_SHAPES}",
        lines=("import stepscope", CALL, *_step_lines(facts)),
        setting={ACCELERATE: ACCELERATE} | settings if settings else {},
        by_author=by_author,
        excludes=("attention", "compile", OPTIMIZER, "siblings"),
    )


@setting(STEP, counted=False)
def _make(program: Program, value: str) -> None:  # noqa: ARG001
    program.run_as_train_step()
