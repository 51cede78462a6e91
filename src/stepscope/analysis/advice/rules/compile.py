"""torch.compile: the model, each block, or with CUDA graphs.

Constants were measured on an H200: `benchmarks/advice_backtest.py` compares the rules with records.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import QUEUE, Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.timeline import gain_ms, host_limits_ms, wall_ms
from stepscope.analysis.kernels.classes import MEMORY_BOUND

_LEFT_BY_COMPILER = {True: 0.3, False: 0.45}
"""Share of the time of memory-bound kernels that remains when they are fused, on a GPU (True) or a
CPU. Used if the order of the kernels is unknown."""
_SHOWN_WAIT = 0.01
"""Share of the step from which a wait for the host is mentioned."""
_LAUNCHES_LEFT = 0.4
_FUSED_OVER_LONGEST = 1.1
_LEFT_OF_RUN = 0.2
"""Used if the order of the kernels is known. A fused run of memory-bound kernels takes about as
long as its longest kernel, which reads and writes most of what all of them do (0.9 to 1.0 times in
the reference model, 1.2 to 1.25 in a GPT with biases). Some kernels remain next to the fused one:
sums over another dimension, casts of weights. Single kernels gain next to nothing. Operators on a
CPU follow the same rule: the longest, such as GELU's backward, are compute-bound, and compiling
them does not change that."""
_OTHER_ORDER = "numerics: another summation order"
_BLOCKS_OVER_MODEL = 0.9
_GRAPH_OF_COMPILED = 0.9
"""A graph must at least reduce the compiled step to this share to be worth its restrictions."""
_NO_COMPILER = Left("this machine has no compiler for torch.compile")


def as_compiled(facts: Facts) -> Facts:
    """Return the step with its memory-bound kernels fused by torch.compile."""

    def fused(work: PhaseWork) -> PhaseWork:
        time, launches = _LEFT_BY_COMPILER[facts.on_gpu], _LAUNCHES_LEFT
        if work.runs is not None:
            time = min(1.0, _FUSED_OVER_LONGEST * work.runs.longest)
            launches = 1 - (1 - _LEFT_OF_RUN) * (work.runs.kernels - work.runs.runs)
        compiled = work.scaled(dict.fromkeys(MEMORY_BOUND, time) | {QUEUE: launches}, launches)
        return replace(compiled, runs=None)

    return replace(facts.with_work(fused), compiled=True)


@rule("compile", "torch.compile", stage=Stage.KERNELS)
def _compile(facts: Facts) -> Change | Left | None:
    if reason := _not_compilable(facts):
        return reason
    after = as_compiled(facts)
    late = host_limits_ms(facts)
    shown = late >= _SHOWN_WAIT * facts.step_ms
    waits = f", and the device waits {late:.3g} ms for launches" if shown else ""
    return Change(
        after=after,
        why=f"memory-bound kernels take {facts.class_ms(*MEMORY_BOUND):.3g} ms{waits}:"
        " fusion launches fewer kernels that move fewer bytes",
        risk="compile time at the start and for every new shape; numerics: another summation order",
        lines=("model = torch.compile(model)",),
        setting={"compile": "model"},
    )


def _not_compilable(facts: Facts) -> Left | None:
    if facts.compiled:
        return Left("the model is compiled already")
    return _NO_COMPILER if "compiler" in facts.lacks else None


@rule("compile-blocks", "torch.compile of each block", stage=Stage.KERNELS)
def _compile_blocks(facts: Facts) -> Change | Left | None:
    model = _compile(facts)
    if not isinstance(model, Change):
        return model
    if facts.blocks < 2:
        return Left("the model has no nn.ModuleList of repeated blocks")
    return Change(
        after=model.after,
        gain_ms=_BLOCKS_OVER_MODEL * gain_ms(facts, model.after),
        why=f"the {facts.blocks} blocks are alike, so one compilation serves all of them: most of"
        " the gain of compiling the full model, with less compile time",
        risk=_OTHER_ORDER,
        lines=(*_each_block(facts), "    block.compile()"),
        setting={"compile": "block"},
    )


def _each_block(facts: Facts) -> tuple[str, ...]:
    if facts.block_list:
        return (f"for block in model.{facts.block_list}:",)
    return ("for block in …:  # the nn.ModuleList of the repeated blocks",)


@rule("cuda-graph", "torch.compile with CUDA graphs", stage=Stage.LAUNCHES)
def _graph(facts: Facts) -> Change | Left | None:
    """The compiler's CUDA graphs, if the compiled step is still host-bound.

    The next forward pass overwrites the gradients of a graph, which rules out gradient
    accumulation.
    """
    if not facts.on_gpu:
        return Left("the step runs on a CPU")
    if facts.captured:
        return Left("the step is a CUDA graph already")
    if "compiler" in facts.lacks:
        return _NO_COMPILER
    if facts.micro_batches > 1:
        return Left(
            "gradient accumulation: the next forward pass overwrites the gradients of a graph"
        )
    compiled = facts if facts.compiled else as_compiled(facts)
    after = compiled.with_work(lambda work: replace(work, launches=0.0))
    if wall_ms(after) > _GRAPH_OF_COMPILED * wall_ms(compiled):
        return Left("a compiled step does not wait for the CPU")
    return Change(
        after=replace(after, captured=True),
        why=f"the host takes {facts.host_ms:.3g} ms to launch a step that takes the device"
        f" {facts.device_ms:.3g} ms; a graph is one launch",
        risk="shapes and addresses must not change; the graph has its own memory pool",
        lines=('model = torch.compile(model, mode="reduce-overhead")',),
        setting={"compile": "graphs"},
        excludes=("step",),
    )


@setting("compile", switchable=True, without="no model is called in a step")
def _compile_it(program: Program, mode: str) -> None:
    program.compile(mode)
