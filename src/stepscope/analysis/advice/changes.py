"""Every change that is known here: when it applies, what it gains and risks, how to write it.

A gain is counted on the device and then limited by the host: where launches are the limit, less
work on the device shortens nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepscope.analysis.advice.facts import Facts

WORTH = 0.03
"""Below this share of the step, or of the peak memory, a change is not advised."""

_FLASH_OVER_PRODUCTS = 1.3
"""Time of a fused attention over that of the products alone: its backward makes the scores anew."""
_FUSED_BY_COMPILER = 0.55
"""Share of the time of memory-bound kernels that fusing them saves."""
_LAUNCHES_BY_COMPILER = 0.6
_NARROW_ELEMENTWISE = 0.35
"""Share of memory-bound time that autocast saves: some of it stays in float32, some is casts."""
_ADAMW_BYTES = 28
"""Read weight, gradient and two moments, write three of them, in float32."""
_NEAR_BANDWIDTH = 1.3
_MEMORY_BOUND = ("elementwise", "reduction", "softmax", "copy/cast")

Judge = Callable[[Facts], "Advice | None"]
_JUDGES: list[Judge] = []


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    title: str
    gain_ms: float
    """Of a step; below zero where it costs time."""
    gain_bytes: int = 0
    why: str
    risk: str
    lines: tuple[str, ...]
    """What to write."""
    setting: dict[str, str] = {}
    """The settings of a model of one's own that make the change; empty where only its author can
    make it."""


def advise(facts: Facts, factors: dict[str, float] | None = None) -> tuple[Advice, ...]:
    """What is worth it, the largest gain first. `factors` correct predictions by past ones."""
    found = []
    for judge in _JUDGES:
        advice = judge(facts)
        if advice is None:
            continue
        factor = (factors or {}).get(advice.code, 1.0)
        advice = msgspec.structs.replace(advice, gain_ms=advice.gain_ms * factor)
        if _worth(advice, facts):
            found.append(advice)
    return tuple(sorted(found, key=lambda one: (-one.gain_ms, one.code)))


def _worth(advice: Advice, facts: Facts) -> bool:
    return advice.gain_ms >= WORTH * facts.step_ms or (
        facts.peak_bytes > 0
        and advice.gain_bytes >= WORTH * facts.peak_bytes
        and advice.gain_ms >= 0
    )


def _judge(judge: Judge) -> Judge:
    _JUDGES.append(judge)
    return judge


def shortened(facts: Facts, less_on_device: float) -> float:
    """How much shorter the step gets when the device has that much less to do."""
    if not facts.on_gpu or facts.issue_ms is None:
        return less_on_device
    return max(0.0, min(less_on_device, facts.step_ms - min(facts.step_ms, facts.issue_ms)))


def _products(facts: Facts, to: str) -> float | None:
    """Time that products save in another format; None where a rate is not known."""
    now, then = facts.rates.get(facts.dtype), facts.rates.get(to)
    if not now or not then or to in facts.lacks:
        return None
    return facts.classes.get("matmul", 0.0) * (1 - now / then)


@_judge
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


@_judge
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


@_judge
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
        lines=("out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",),
    )


@_judge
def _optimizer(facts: Facts) -> Advice | None:
    if facts.fused_optimizer or not facts.bandwidth or not facts.parameters:
        return None
    ideal = _NEAR_BANDWIDTH * facts.parameters * _ADAMW_BYTES / facts.bandwidth * 1e3
    saved = facts.optimizer_ms - ideal
    return Advice(
        code="fused-optimizer",
        title="the optimizer in one kernel",
        # Its launches are gone as well, so the host does not limit this.
        gain_ms=max(0.0, saved),
        why=f"the update takes {facts.optimizer_ms:.3g} ms; moving its bytes once takes"
        f" {ideal:.3g} ms at the bandwidth measured here",
        risk="numerics: none beyond rounding",
        lines=("optimizer = torch.optim.AdamW(model.parameters(), …, fused=True)",),
        setting={"optimizer": "adamw-fused"},
    )


@_judge
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


@_judge
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
    )


@_judge
def _no_wait(facts: Facts) -> Advice | None:
    return Advice(
        code="no-read-back",
        title="no value read back within the step",
        gain_ms=facts.wait_idle_ms,
        why=f"the device is idle for {facts.wait_idle_ms:.3g} ms while the host waits for it"
        " (.item(), .cpu(), print of a tensor, a scaler's check)",
        risk="none: a value is seen some steps later",
        lines=("total += loss.detach()          # add on the device",
               "if step % 100 == 0: print(total.item() / 100)"),
    )  # fmt: skip


@_judge
def _workers(facts: Facts) -> Advice | None:
    if not facts.on_gpu:
        return None
    return Advice(
        code="data-ahead",
        title="batches made ahead by workers",
        # While the device still works on the step before, loading costs nothing.
        gain_ms=min(facts.data_ms, facts.host_idle_ms),
        why=f"the host is in its DataLoader for {facts.data_ms:.3g} ms of a step, and the device"
        f" waits for the host for {facts.host_idle_ms:.3g} ms",
        risk="memory and cores of the host",
        lines=("DataLoader(…, num_workers=8, persistent_workers=True, prefetch_factor=4)",),
    )


@_judge
def _pinned(facts: Facts) -> Advice | None:
    if not facts.on_gpu:
        return None
    return Advice(
        code="pinned-data",
        title="data in pinned memory, copied ahead",
        gain_ms=facts.pageable_ms,
        why=f"copies from pageable memory take {facts.pageable_ms:.3g} ms and stop the host",
        risk="memory of the host",
        lines=("DataLoader(…, pin_memory=True, num_workers=4)",
               "batch = batch.to(device, non_blocking=True)"),
    )  # fmt: skip


@_judge
def _set_to_none(facts: Facts) -> Advice | None:
    return Advice(
        code="set-to-none",
        title="gradients dropped instead of zeroed",
        gain_ms=facts.cleared_ms,
        why=f"filling gradients with zeros takes {facts.cleared_ms:.3g} ms",
        risk="none, unless code reads .grad between steps",
        lines=("optimizer.zero_grad(set_to_none=True)",),
    )


@_judge
def _larger_batch(facts: Facts) -> Advice | None:
    if not facts.on_gpu or facts.batch is None or not facts.memory_bytes:
        return None
    room = facts.memory_bytes * 0.9 - facts.peak_bytes
    if facts.saved_bytes > room:
        return None
    # Twice the samples launch as many kernels: what the device waited for launches is halved for
    # each sample, and so is the update.
    saved = 0.5 * (facts.host_idle_ms + facts.optimizer_ms)
    return Advice(
        code="larger-batch",
        title="twice the batch",
        gain_ms=saved,
        gain_bytes=-facts.saved_bytes,
        why="for each sample the launches and the update cost half; the gain is for as many"
        f" samples as now, and {room / 2**30:.3g} GiB are free",
        risk="optimisation: another batch needs another learning rate; memory",
        lines=(f"batch_size = {2 * facts.batch}",),
        setting={"batch": str(2 * facts.batch)},
    )


def applicable(advice: Sequence[Advice]) -> Iterator[Advice]:
    """Those that can be tried without the model's author."""
    return (one for one in advice if one.setting)
