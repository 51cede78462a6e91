"""Changes of the work that the device does: formats, fused kernels, fewer launches.

A gain is counted on the device and then limited by the host: where launches are the limit, less
work on the device shortens nothing.
"""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import Advice, judge, shortened

_FLASH_OVER_PRODUCTS = 1.3
"""Time of a fused attention over that of the products alone: its backward makes the scores anew."""
_FUSED_BY_COMPILER = 0.55
"""Share of the time of memory-bound kernels that fusing them saves."""
_LAUNCHES_BY_COMPILER = 0.6
_NARROW_ELEMENTWISE = 0.35
"""Share of memory-bound time that autocast saves: some of it stays in float32, some is casts."""
_UPDATE_BYTES = {"adam": 28, "sgd": 20}
"""Read weight, gradient and moments, write all but the gradient, in float32."""
_NEAR_BANDWIDTH = 1.3
_BLOCKS_OF_WHOLE = 0.9
_FOREACH = 0.6
"""Share of an update, tensor by tensor, that going over all at once saves."""
_FUSED_LOSS = 0.6
"""Share of the time from logits to loss and back that one pass over a chunk saves."""
_MEMORY_BOUND = ("elementwise", "reduction", "softmax", "copy/cast")


def _products(facts: Facts, to: str) -> float | None:
    """Time that products save in another format; None where a rate is not known."""
    now, then = facts.rates.get(facts.dtype), facts.rates.get(to)
    if not now or not then or to in facts.lacks:
        return None
    return facts.classes.get("matmul", 0.0) * (1 - now / then)


@judge
def _tf32(facts: Facts) -> Advice | None:
    saved = _products(facts, "tf32") if facts.dtype == "float32" and facts.on_gpu else None
    if saved is None:
        return None
    return Advice(
        code="tf32",
        title="float32 products on tensor cores (TF32)",
        gain_ms=shortened(facts, saved),
        why=f"products take {facts.classes.get('matmul', 0.0):.3g} ms in float32; TF32 is"
        f" {facts.rates['tf32'] / facts.rates['float32']:.3g}× as fast here",
        risk="numerics: products keep 10 bits of the mantissa",
        lines=('torch.set_float32_matmul_precision("high")',),
        setting={"dtype": "tf32"},
    )


@judge
def _bfloat16(facts: Facts) -> Advice | None:
    if facts.dtype not in ("float32", "tf32"):
        return None
    saved = _products(facts, "bfloat16")
    if saved is None:
        return None
    memory_bound = sum(facts.classes.get(kind, 0.0) for kind in _MEMORY_BOUND)
    saved += _NARROW_ELEMENTWISE * memory_bound if facts.on_gpu else 0.0
    if facts.bandwidth:
        # Each weight is read in float32 and written in half of that, in every forward.
        saved -= facts.parameters * 6 / facts.bandwidth * 1e3
    kind = "cuda" if facts.on_gpu else "cpu"
    return Advice(
        code="bfloat16",
        title="bfloat16 autocast",
        gain_ms=shortened(facts, saved),
        gain_bytes=facts.saved_bytes // 3 - 2 * facts.parameters,
        why=f"products take {facts.classes.get('matmul', 0.0):.3g} ms in {facts.dtype}; bfloat16 is"
        f" {facts.rates['bfloat16'] / facts.rates[facts.dtype]:.3g}× as fast here",
        risk="numerics: 8 bits of mantissa in products and activations; weights stay in float32",
        lines=(f'with torch.autocast("{kind}", torch.bfloat16):', "    loss = model(…)"),
        setting={"dtype": "bfloat16"},
    )


@judge
def _flash(facts: Facts) -> Advice | None:
    if facts.attention_ms <= 0:
        return None
    saved = facts.attention_ms - _FLASH_OVER_PRODUCTS * facts.attention_matmul_ms
    return Advice(
        code="fused-attention",
        title="attention as one kernel",
        gain_ms=shortened(facts, saved),
        gain_bytes=facts.score_bytes,
        why=f"attention is written out: {facts.attention_ms:.3g} ms, of which its products are"
        f" {facts.attention_matmul_ms:.3g} ms; it keeps its scores for backward",
        risk="numerics: sums in another order",
        setting={"attention": "fused"},
        lines=("out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",),
    )


@judge
def _optimizer(facts: Facts) -> Advice | None:
    each = _UPDATE_BYTES.get(facts.optimizer)
    if facts.fused_optimizer or each is None or not facts.bandwidth or not facts.parameters:
        return None
    ideal = _NEAR_BANDWIDTH * facts.parameters * each / facts.bandwidth * 1e3
    written = facts.optimizer_of_torch
    name = {"adam": "AdamW", "sgd": "SGD"}[facts.optimizer]
    return Advice(
        code="fused-optimizer",
        title="the optimizer in one kernel",
        # Its launches are gone as well, so the host does not limit this.
        gain_ms=max(0.0, facts.optimizer_ms - ideal),
        why=f"the update takes {facts.optimizer_ms:.3g} ms; moving its bytes once takes"
        f" {ideal:.3g} ms at the bandwidth measured here",
        risk="numerics: none beyond rounding"
        if written
        else f"numerics: your own update rule is taken for {name}'s",
        lines=(f"optimizer = torch.optim.{name}(model.parameters(), …, fused=True)",),
        setting={"optimizer": "adamw-fused" if facts.optimizer == "adam" else "sgd-fused"},
    )


@judge
def _compile(facts: Facts) -> Advice | None:
    if facts.compiled or "compiler" in facts.lacks:
        return None
    memory_bound = sum(facts.classes.get(kind, 0.0) for kind in _MEMORY_BOUND)
    saved = _FUSED_BY_COMPILER * memory_bound + _LAUNCHES_BY_COMPILER * facts.host_idle_ms
    return Advice(
        code="compile",
        title="torch.compile",
        gain_ms=saved,
        why=f"kernels that only move memory take {memory_bound:.3g} ms, and the device waits"
        f" {facts.host_idle_ms:.3g} ms for launches: fused kernels are fewer and move less",
        risk="compile time at the start and for every new shape; numerics: sums in another order",
        lines=("model = torch.compile(model)",),
        setting={"compile": "model"},
    )


@judge
def _compile_blocks(facts: Facts) -> Advice | None:
    whole = _compile(facts)
    if whole is None or facts.blocks < 2:
        return None
    return Advice(
        code="compile-blocks",
        title="torch.compile of each block",
        gain_ms=_BLOCKS_OF_WHOLE * whole.gain_ms,
        why=f"{facts.blocks} blocks are alike, and one is compiled for all: most of what compiling"
        " the whole model gains, for less time to compile",
        risk="numerics: sums in another order",
        lines=("for block in model.blocks:", "    block.compile()"),
        setting={"compile": "block"},
    )


@judge
def _foreach(facts: Facts) -> Advice | None:
    if facts.optimizer or not facts.loops_over_tensors:
        return None
    return Advice(
        code="foreach-optimizer",
        title="the optimizer over all tensors at once",
        gain_ms=_FOREACH * facts.optimizer_ms,
        why=f"the update takes {facts.optimizer_ms:.3g} ms, tensor by tensor",
        risk="memory: temporaries as large as the parameters",
        lines=("optimizer = …(model.parameters(), …, foreach=True)",),
        setting={"optimizer": "foreach"},
    )


@judge
def _fused_loss(facts: Facts) -> Advice | None:
    if facts.loss_ms <= 0:
        return None
    return Advice(
        code="fused-loss",
        title="head and loss by chunks, without all logits",
        gain_ms=shortened(facts, _FUSED_LOSS * facts.loss_ms) if facts.on_gpu else 0.0,
        gain_bytes=facts.logit_bytes,
        why=f"from logits to loss and back takes {facts.loss_ms:.3g} ms, and"
        f" {facts.logit_bytes / 2**20:.4g} MiB of logits are kept in between",
        risk="numerics: sums in another order",
        lines=("from stepscope.model.kernels.linear_cross_entropy import linear_cross_entropy",
               "loss = linear_cross_entropy(hidden, head.weight, targets)"),
    )  # fmt: skip


@judge
def _graph(facts: Facts) -> Advice | None:
    if not facts.on_gpu or facts.host_idle_ms <= 0:
        return None
    return Advice(
        code="cuda-graph",
        title="the step as a CUDA graph",
        gain_ms=0.9 * facts.host_idle_ms,
        why=f"the device waits {facts.host_idle_ms:.3g} ms of a step for launches; a graph has one",
        risk="shapes and addresses must not change; memory of the graph is held apart",
        lines=('model = torch.compile(model, mode="reduce-overhead")',),
        setting={"compile": "graphs"},
    )
