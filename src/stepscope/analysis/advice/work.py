"""Changes of the work that the device does: fused kernels, fewer launches.

Each makes the step as it would be, and the two clocks of `timeline.py` say how long that takes.
Constants are measured on an H200: `benchmarks/advice_backtest.py` holds the rules against records.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.dtypes import ONE_KERNEL_OVER_PRODUCTS
from stepscope.analysis.advice.facts import BETWEEN, OF_MODEL, QUEUE, Facts, PhaseWork
from stepscope.analysis.advice.rule import Advice, Judged, judge
from stepscope.analysis.advice.timeline import gain_ms, host_limits_ms, wall_ms
from stepscope.analysis.kernels.names import MEMORY_BOUND

_ONE_KERNEL_ON_CPU = 1.3
_LEFT_BY_COMPILER = {True: 0.3, False: 0.45}
"""Share of the time of memory-bound kernels that is left when they are fused, on a GPU or not.
Where their order is known, it says more."""
_LAUNCHES_LEFT = 0.4
_FUSED_OVER_LONGEST = 1.1
_LEFT_OF_RUN = 0.2
"""Where the order of the kernels is known: a run of them that only move memory takes, fused, about
as long as its longest alone, which reads and writes most of what all of them do (0.9 to 1.0 times
in the reference model, 1.2 to 1.25 in a GPT with biases). It is one kernel and some of the others:
sums over another dimension, casts of weights. Kernels that are alone gain next to nothing.
Operators of a CPU follow the same rule: the longest, such as GELU's backward, compute more than
they move, and compiled they compute the same."""
_OTHER_ORDER = "numerics: sums in another order"
_UPDATE_BYTES = {"adam": 28, "sgd": 20}
"""Read weight, gradient and moments, write all but the gradient, in float32."""
_NEAR_BANDWIDTH = {True: {"adam": 1.2, "sgd": 1.2}, False: {"adam": 3.2, "sgd": 1.2}}
"""Time of a fused update over that of moving its bytes once, on a GPU or not. The square roots and
divisions of Adam are what limits a CPU: 2.9 to 3.9 times in `results/advise-slow_cpu.jsonl` and for
2.5 million parameters in one or twelve tensors."""
_FUSED_LEFT_ON_CPU = 0.08
"""Share of an update over many small tensors that is left: a call for each of them."""
_FUSED_LAUNCHES = 0.05
_BLOCKS_OF_WHOLE = 0.9
_GRAPH_OF_COMPILED = 0.9
"""A graph that takes more of the compiled step's time is not worth what it forbids."""
_FOREACH = 0.4
"""Share of an update, tensor by tensor, that is left by going over all at once."""
_FUSED_LOSS = 0.6
"""Share of the time from logits to loss and back that one pass over a chunk saves."""


@judge
def _flash(facts: Facts) -> Judged | None:
    if not facts.attention:
        return None
    products = sum(work.classes.get("matmul", 0.0) for work in facts.attention)
    written = sum(work.device_ms for work in facts.attention)
    core = {work.name: work for work in facts.attention}

    def as_one_kernel(work: PhaseWork) -> PhaseWork:
        part = core.get(work.name)
        if part is None:
            return work
        left = {kind: ms - part.classes.get(kind, 0.0) for kind, ms in work.classes.items()}
        made = _over_products(facts) * part.classes.get("matmul", 0.0)
        left["attention"] = left.get("attention", 0.0) + made
        launches = work.launches - part.launches * (1 - _FUSED_LAUNCHES)
        return replace(work, classes=left, launches=max(0.0, launches))

    after = replace(facts.with_work(as_one_kernel), attention=())
    takes = (
        f"{written:.3g} ms, of which its products are {products:.3g} ms; it keeps its scores for"
        " backward"
    )
    advice = Advice(
        code="fused-attention",
        title="attention as one kernel",
        gain_ms=gain_ms(facts, after),
        gain_bytes=facts.lower_peak(facts.score_bytes),
        why=f"attention is not one kernel: {takes}",
        risk=_OTHER_ORDER,
        setting={"attention": "fused"},
        lines=(
            "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "# is_causal, attn_mask and dropout_p as your attention has them",
        ),
    )
    return Judged(_on_fast_path(advice, facts, takes) if facts.attention_called else advice, after)


def _on_fast_path(advice: Advice, facts: Facts, takes: str) -> Advice:
    """Where torch's attention is called already. The fast kernels of a GPU take dropout."""
    causes = "need_weights=True, or a mask or a format that the fast kernels do not take"
    lines: tuple[str, ...] = (
        "attention(q, k, v, need_weights=False)",
        "# is_causal=True in the place of a mask",
    )
    risk = _OTHER_ORDER
    if not facts.on_gpu:
        causes = f"dropout in training, {causes}"
        lines = ("layer.self_attn.dropout = 0.0", "# or dropout_p=0.0 where you call it", *lines)
        risk = f"dropout regularises: without it a model may overfit; {risk}"
    return replace(
        advice,
        code="attention-fast-path",
        title="torch's attention as one kernel",
        why=f"torch's attention is called, but writes it out: {takes}. Likely causes: {causes}",
        risk=risk,
        setting={},
        by_author="only you know whether the training can do without what keeps it from its fast"
        " kernels",
        lines=lines,
    )


def _over_products(facts: Facts) -> float:
    if not facts.on_gpu:
        return _ONE_KERNEL_ON_CPU
    if facts.dtype == "tf32":
        # The kernel stays on FP32 cores, while the products that it replaces do not.
        now, wide = facts.rates.get("tf32"), facts.rates.get("float32")
        faster = now / wide if now and wide else 1.0
        return ONE_KERNEL_OVER_PRODUCTS["float32"] * faster
    return ONE_KERNEL_OVER_PRODUCTS.get(facts.dtype, _ONE_KERNEL_ON_CPU)


@judge
def _optimizer(facts: Facts) -> Judged | None:
    each = _UPDATE_BYTES.get(facts.optimizer)
    if facts.fused_optimizer or each is None or not facts.bandwidth or not facts.parameters:
        return None
    moved = facts.parameters * each / facts.bandwidth * 1e3
    takes = facts.phase_ms("optimizer")
    fused = _NEAR_BANDWIDTH[facts.on_gpu][facts.optimizer] * moved
    if not facts.on_gpu:
        fused = max(fused, _FUSED_LEFT_ON_CPU * takes)
    launches = sum(work.launches for work in facts.phases if work.name == "optimizer")
    after = facts.with_work(
        lambda work: replace(
            work,
            classes={"optimizer": min(fused, takes)},
            launches=work.launches * _FUSED_LAUNCHES,
        ),
        ("optimizer",),
    )
    where = " of the device" if facts.on_gpu else _between(facts)
    name = facts.optimizer_name or {"adam": "AdamW", "sgd": "SGD"}[facts.optimizer]
    advice = Advice(
        code="fused-optimizer",
        title="the optimizer in one kernel",
        gain_ms=gain_ms(facts, after),
        why=f"the update takes {takes:.3g} ms{where}"
        + (f" in {launches:.4g} kernels" if launches else "")
        + f"; moving its bytes once takes {moved:.3g} ms at the bandwidth measured here",
        risk="numerics: none beyond rounding"
        if facts.optimizer_of_torch
        else f"numerics: your own update rule is taken for {name}'s",
        lines=(f"optimizer = torch.optim.{name}(model.parameters(), …, fused=True)",),
        setting={"optimizer": "adamw-fused" if facts.optimizer == "adam" else "sgd-fused"},
    )
    return Judged(advice, replace(after, fused_optimizer=True))


def _between(facts: Facts) -> str:
    """An account of a CPU has this time on a line of its own, and not on the optimizer's."""
    ms = facts.class_ms(BETWEEN, among=("optimizer",))
    return f", {ms:.3g} ms of it between operators" if ms else ""


def _as_compiled(facts: Facts) -> Facts:
    def fused(work: PhaseWork) -> PhaseWork:
        time, launches = _LEFT_BY_COMPILER[facts.on_gpu], _LAUNCHES_LEFT
        if work.runs is not None:
            time = min(1.0, _FUSED_OVER_LONGEST * work.runs.longest)
            launches = 1 - (1 - _LEFT_OF_RUN) * (work.runs.kernels - work.runs.runs)
        found = work.scaled(dict.fromkeys(MEMORY_BOUND, time) | {QUEUE: launches}, launches)
        return replace(found, runs=None)

    return replace(facts.with_work(fused), compiled=True)


@judge
def _compile(facts: Facts) -> Judged | None:
    if facts.compiled or "compiler" in facts.lacks:
        return None
    after = _as_compiled(facts)
    late = host_limits_ms(facts)
    waits = f", and the device waits {late:.3g} ms for launches" if late else ""
    advice = Advice(
        code="compile",
        title="torch.compile",
        gain_ms=gain_ms(facts, after),
        why=f"kernels that only move memory take {facts.class_ms(*MEMORY_BOUND):.3g} ms{waits}:"
        " fused kernels are fewer and move less",
        risk="compile time at the start and for every new shape; numerics: sums in another order",
        lines=("model = torch.compile(model)",),
        setting={"compile": "model"},
    )
    return Judged(advice, after)


@judge
def _compile_blocks(facts: Facts) -> Judged | None:
    whole = _compile(facts)
    if whole is None or facts.blocks < 2:
        return None
    advice = Advice(
        code="compile-blocks",
        title="torch.compile of each block",
        gain_ms=_BLOCKS_OF_WHOLE * whole.advice.gain_ms,
        why=f"{facts.blocks} blocks are alike, and one is compiled for all: most of what compiling"
        " the whole model gains, for less time to compile",
        risk=_OTHER_ORDER,
        lines=(*_each_block(facts), "    block.compile()"),
        setting={"compile": "block"},
    )
    return Judged(advice, whole.after)


def _each_block(facts: Facts) -> tuple[str, ...]:
    if facts.block_list:
        return (f"for block in model.{facts.block_list}:",)
    return ("for block in …:  # the nn.ModuleList of the repeated blocks",)


@judge
def _graph(facts: Facts) -> Judged | None:
    """Torch's own, which come with its compiler: worth it where that alone leaves the host slow.
    Gradients that one graph has made are overwritten by the next forward, so none may be added up.
    """
    if not facts.on_gpu or facts.captured or "compiler" in facts.lacks or facts.micro_batches > 1:
        return None
    compiled = facts if facts.compiled else _as_compiled(facts)
    after = compiled.with_work(lambda work: replace(work, launches=0.0))
    if wall_ms(after) > _GRAPH_OF_COMPILED * wall_ms(compiled):
        return None
    advice = Advice(
        code="cuda-graph",
        title="the step as a CUDA graph",
        gain_ms=gain_ms(facts, after),
        why=f"the host issues for {facts.host_ms:.3g} ms of a step what takes the device"
        f" {facts.device_ms:.3g} ms; a graph is one launch",
        risk="shapes and addresses must not change; memory of the graph is held apart",
        lines=('model = torch.compile(model, mode="reduce-overhead")',),
        setting={"compile": "graphs"},
    )
    return Judged(advice, replace(after, captured=True))


@judge
def _foreach(facts: Facts) -> Judged | None:
    if facts.optimizer or not facts.loops_over_tensors:
        return None
    takes = facts.phase_ms("optimizer")

    def at_once(work: PhaseWork) -> PhaseWork:
        every = dict.fromkeys(work.classes, _FOREACH)
        return work.scaled(every, _FUSED_LAUNCHES)

    after = replace(facts.with_work(at_once, ("optimizer",)), loops_over_tensors=False)
    advice = Advice(
        code="foreach-optimizer",
        title="the optimizer over all tensors at once",
        gain_ms=gain_ms(facts, after),
        why=f"the update takes {takes:.3g} ms{_between(facts)}, tensor by tensor",
        risk="memory: temporaries as large as the parameters",
        lines=("optimizer = …(model.parameters(), …, foreach=True)",),
        setting={"optimizer": "foreach"},
    )
    return Judged(advice, after)


@judge
def _fused_loss(facts: Facts) -> Judged | None:
    if facts.loss_ms <= 0:
        return None
    saved = _FUSED_LOSS * facts.loss_ms if facts.on_gpu else 0.0
    held = [work.name for work in facts.phases if work.name in OF_MODEL and work.classes]
    after = facts.with_work(lambda work: work.less(saved / len(held)), held)
    advice = Advice(
        code="fused-loss",
        title="head and loss by chunks, without all logits",
        gain_ms=gain_ms(facts, after),
        gain_bytes=facts.lower_peak(facts.logit_bytes),
        why=f"from logits to loss and back takes {facts.loss_ms:.3g} ms, and"
        f" {facts.logit_bytes / 2**20:.4g} MiB of logits are kept in between",
        risk=_OTHER_ORDER,
        lines=("from stepscope.kernels.cross_entropy import linear_cross_entropy",
               "loss = linear_cross_entropy(hidden, head.weight, targets)"),
        by_author="the loss has to be given what the head is given, and not its logits",
    )  # fmt: skip
    return Judged(advice, replace(after, loss_ms=0.0, logit_bytes=0))
