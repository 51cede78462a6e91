"""Changes of the device's work: fused kernels, fewer launches.

Each rule builds the changed step; the two clocks of `timeline.py` predict its time. Constants were
measured on an H200: `benchmarks/advice_backtest.py` compares the rules with records.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.dtypes import FUSED_OVER_NAIVE_MATMULS
from stepscope.analysis.advice.facts import BETWEEN, QUEUE, Facts, PhaseWork
from stepscope.analysis.advice.rule import Change, rule
from stepscope.analysis.advice.timeline import host_limits_ms, wall_ms
from stepscope.analysis.kernels.names import MEMORY_BOUND
from stepscope.analysis.limits import ADAMW_BYTES

_FUSED_OVER_NAIVE_ON_CPU = 1.3
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
_UPDATE_BYTES = {"adam": ADAMW_BYTES, "sgd": 20}
"""Bytes per parameter: read weight, gradient and moments; write all but the gradient; float32."""
_NEAR_BANDWIDTH = {True: {"adam": 1.2, "sgd": 1.2}, False: {"adam": 3.2, "sgd": 1.2}}
"""Time of a fused update over that of moving its bytes once, on a GPU (True) or a CPU. Adam's
square roots and divisions limit a CPU: 2.9 to 3.9 times in `results/advise-slow_cpu.jsonl` and for
2.5 million parameters in one or twelve tensors."""
_FUSED_LEFT_ON_CPU = 0.08
"""Share that remains of an update over many small tensors: one call per tensor."""
_FUSED_LAUNCHES = 0.05
_BLOCKS_OVER_MODEL = 0.9
_GRAPH_OF_COMPILED = 0.9
"""A graph must at least reduce the compiled step to this share to be worth its restrictions."""
_ACCELERATED = "torch.compile would trace the original layers, which stepscope.accelerate replaces"
_NO_COMPILER = "this machine has no compiler for torch.compile"
_FOREACH = 0.4
"""Share of a tensor-by-tensor update that remains with the foreach implementation."""


@rule("fused-attention", "fused attention")
def _flash(facts: Facts) -> Change | str:
    if not facts.attention:
        return _no_naive_attention(facts)
    matmuls = sum(work.classes.get("matmul", 0.0) for work in facts.attention)
    naive = sum(work.device_ms for work in facts.attention)
    takes = (
        f"{naive:.3g} ms, of which matmuls take {matmuls:.3g} ms; its scores are saved for backward"
    )
    change = Change(
        after=with_fused_attention(facts),
        gain_bytes=facts.lower_peak(facts.score_bytes),
        why=f"attention is naive: it takes {takes}",
        risk=_OTHER_ORDER,
        setting={"attention": "fused"},
        lines=(
            "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "# set is_causal, attn_mask and dropout_p as in your attention",
        ),
    )
    return _on_fast_path(change, facts, takes) if facts.attention_called else change


def with_fused_attention(facts: Facts) -> Facts:
    """Return the step with its naive attention in fused kernels."""
    core = {work.name: work for work in facts.attention}

    def fused(work: PhaseWork) -> PhaseWork:
        part = core.get(work.name)
        if part is None:
            return work
        left = {kind: ms - part.classes.get(kind, 0.0) for kind, ms in work.classes.items()}
        attention_ms = _fused_over_naive(facts) * part.classes.get("matmul", 0.0)
        left["attention"] = left.get("attention", 0.0) + attention_ms
        launches = work.launches - part.launches * (1 - _FUSED_LAUNCHES)
        return replace(work, classes=left, launches=max(0.0, launches))

    saved = max(0, facts.saved_bytes - facts.score_bytes)
    return replace(facts.with_work(fused), attention=(), score_bytes=0, saved_bytes=saved)


def _no_naive_attention(facts: Facts) -> str:
    if facts.class_ms("attention"):
        return "attention runs in a fused kernel already"
    if facts.compiled:
        return "the step is compiled: its kernels do not show which of them are attention"
    return (
        "the program has no attention that could be replaced: no module has a softmax between two"
        " batched matmuls"
    )


def _on_fast_path(change: Change, facts: Facts, takes: str) -> Change:
    """Advise on a call of PyTorch's attention. The fused GPU kernels support dropout."""
    causes = "need_weights=True, or a mask or a dtype that the fused kernels do not support"
    lines: tuple[str, ...] = (
        "attention(q, k, v, need_weights=False)",
        "# is_causal=True instead of a mask",
    )
    risk = _OTHER_ORDER
    if not facts.on_gpu:
        causes = f"dropout in training, {causes}"
        lines = ("layer.self_attn.dropout = 0.0", "# or dropout_p=0.0 where you call it", *lines)
        risk = f"dropout regularises: without it a model may overfit; {risk}"
    return replace(
        change,
        code="attention-fast-path",
        title="PyTorch's fused attention kernels",
        why="PyTorch's attention is called, but falls back to its naive implementation:"
        f" it takes {takes}. Likely causes: {causes}",
        risk=risk,
        setting={},
        by_author="only you know if the training can do without the option that prevents the fused"
        " kernels",
        lines=lines,
    )


def _fused_over_naive(facts: Facts) -> float:
    """Time of fused attention over that of the matmuls of naive attention."""
    if not facts.on_gpu:
        return _FUSED_OVER_NAIVE_ON_CPU
    if facts.dtype == "tf32":
        # The fused kernel runs on FP32 cores, while the matmuls that it replaces use TF32.
        now, wide = facts.rates.get("tf32"), facts.rates.get("float32")
        faster = now / wide if now and wide else 1.0
        return FUSED_OVER_NAIVE_MATMULS["float32"] * faster
    return FUSED_OVER_NAIVE_MATMULS.get(facts.dtype, _FUSED_OVER_NAIVE_ON_CPU)


@rule("fused-optimizer", "fused optimizer")
def _optimizer(facts: Facts) -> Change | str:
    each = _UPDATE_BYTES.get(facts.optimizer)
    if facts.fused_optimizer:
        return "the optimizer is fused already"
    if each is None:
        return f"{facts.optimizer_name or 'the optimizer'} has no fused implementation"
    if not facts.bandwidth or not facts.parameters:
        return ""
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


def _as_compiled(facts: Facts) -> Facts:
    def fused(work: PhaseWork) -> PhaseWork:
        time, launches = _LEFT_BY_COMPILER[facts.on_gpu], _LAUNCHES_LEFT
        if work.runs is not None:
            time = min(1.0, _FUSED_OVER_LONGEST * work.runs.longest)
            launches = 1 - (1 - _LEFT_OF_RUN) * (work.runs.kernels - work.runs.runs)
        compiled = work.scaled(dict.fromkeys(MEMORY_BOUND, time) | {QUEUE: launches}, launches)
        return replace(compiled, runs=None)

    return replace(facts.with_work(fused), compiled=True)


@rule("compile", "torch.compile")
def _compile(facts: Facts) -> Change | str:
    if reason := _not_compilable(facts):
        return reason
    after = _as_compiled(facts)
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


def _not_compilable(facts: Facts) -> str:
    if facts.compiled:
        return "the model is compiled already"
    if facts.accelerated:
        return _ACCELERATED
    return _NO_COMPILER if "compiler" in facts.lacks else ""


@rule("compile-blocks", "torch.compile of each block")
def _compile_blocks(facts: Facts) -> Change | str:
    model = _compile(facts)
    if isinstance(model, str):
        return model
    if facts.blocks < 2:
        return "the model has no nn.ModuleList of repeated blocks"
    return Change(
        after=model.after,
        gain_ms=_BLOCKS_OVER_MODEL * model.advice.gain_ms,
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


@rule("cuda-graph", "torch.compile with CUDA graphs", last=True)
def _graph(facts: Facts) -> Change | str:
    """The compiler's CUDA graphs, if the compiled step is still host-bound.

    The next forward pass overwrites the gradients of a graph, which rules out gradient
    accumulation.
    """
    if not facts.on_gpu:
        return "the step runs on a CPU"
    if facts.captured:
        return "the step is a CUDA graph already"
    if facts.accelerated:
        return _ACCELERATED
    if "compiler" in facts.lacks:
        return _NO_COMPILER
    if facts.micro_batches > 1:
        return "gradient accumulation: the next forward pass overwrites the gradients of a graph"
    compiled = facts if facts.compiled else _as_compiled(facts)
    after = compiled.with_work(lambda work: replace(work, launches=0.0))
    if wall_ms(after) > _GRAPH_OF_COMPILED * wall_ms(compiled):
        return "a compiled step does not wait for the CPU"
    return Change(
        after=replace(after, captured=True),
        why=f"the host takes {facts.host_ms:.3g} ms to launch a step that takes the device"
        f" {facts.device_ms:.3g} ms; a graph is one launch",
        risk="shapes and addresses must not change; the graph has its own memory pool",
        lines=('model = torch.compile(model, mode="reduce-overhead")',),
        setting={"compile": "graphs"},
        excludes=("step",),
    )


@rule("foreach-optimizer", "foreach optimizer (all tensors at once)")
def _foreach(facts: Facts) -> Change | str:
    if facts.optimizer:
        return "the optimizer has a fused implementation, which is faster"
    if not facts.loops_over_tensors:
        return "the optimizer does not update tensor by tensor"
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
