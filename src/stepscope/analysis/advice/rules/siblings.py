"""Modules that a loop calls with the same input, such as heads of an attention, as one batch."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts, PhaseWork, Siblings
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule

_OPERATOR_MS = 0.02
"""Time of an operator on a CPU besides its arithmetic: dispatch, autograd node and allocation. In
`benchmarks/advice_programs/head_loop.py` on a 2.5 GHz Xeon, one operator fewer saves 27 µs."""

_HEADS = (
    "# one matmul for all: make the projections of the heads one layer",
    "q, k, v = self.qkv(x).view(B, T, 3, heads, d).permute(2, 0, 3, 1, 4)",
    "y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
)
_MODULES = (
    "# one matmul for all: stack the weights of the modules, or make them one layer",
    "weights, buffers = torch.func.stack_module_state(modules)",
    "y = torch.vmap(functools.partial(torch.func.functional_call, modules[0]), (0, None))(",
    "    (weights, buffers), (x,))",
)


@rule("batched-modules", "modules of a loop as one batch", stage=Stage.KERNELS)
def _batched(facts: Facts) -> Change | Left | None:
    if not facts.siblings:
        return Left("no loop of the model calls several modules, each with its own weights")
    if facts.compiled:
        return Left("the model is compiled")
    most = max(facts.siblings, key=lambda one: sum(one.operators.values()))
    total = sum(sum(one.operators.values()) for one in facts.siblings)
    return Change(
        after=replace(facts.with_work(lambda work: _fewer(work, facts)), siblings=()),
        why=f"{most.where} calls {most.modules} modules one after the other; such loops launch"
        f" {total:,.0f} operators in a step, and one batch needs a fraction of them",
        risk="numerics: another summation order",
        setting={"siblings": "batched"},
        excludes=("compile", "step"),
        lines=_HEADS if most.heads else _MODULES,
    )


def _fewer(work: PhaseWork, facts: Facts) -> PhaseWork:
    """Return a phase without the operators that one batch for all modules saves."""
    saved = sum(_saved(one, work.name) for one in facts.siblings)
    if facts.on_gpu:
        return replace(work, launches=max(0.0, work.launches - saved))
    return work.less(min(saved * _OPERATOR_MS, work.device_ms / 2))


def _saved(loop: Siblings, phase: str) -> float:
    return loop.operators.get(phase, 0.0) * (1 - 1 / loop.modules)


@setting(
    "siblings",
    "batched",
    switchable=True,
    without="no modules of an nn.ModuleList are called in order with the same tensor",
)
def _make(program: Program, value: str) -> None:  # noqa: ARG001
    program.batch_siblings()
