"""Changes of the dtype of matmuls: TF32, bfloat16 autocast, float32 instead of an emulated dtype.

Times follow from the rates that were measured on the machine.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import CONVOLUTION, Facts, PhaseWork
from stepscope.analysis.advice.rule import Advice, Judged, judge
from stepscope.analysis.advice.timeline import gain_ms

ONE_KERNEL_OVER_PRODUCTS = {"bfloat16": 0.7, "float16": 0.7, "float32": 2.9}
"""Time of a causal attention in one kernel over that of the products of the same written out, on a
GPU. It leaves out half of the products; in float32 torch has only a kernel for FP32 cores."""
_CAST_LAUNCHES = {"forward": 1.33, "backward": 1.13}
"""Kernels under autocast for each without: casts of weights and of what float32 gives."""
_COMPUTE = ("matmul", "attention")
_EMULATED_OVER_RATE = 20.0
"""Times as long as at the rate of the dtype: small matmuls stay below it by less."""
_OVER_RATE_ON_CPU = 2.0
"""Time of the matmuls of a small step over that at the measured rate: 1.5 in
`results/advise-slow_cpu.jsonl`, more for convolutions."""


def with_faster_matmuls(facts: Facts, to: str) -> Facts | None:
    """The step with its matmuls in another dtype; None where a rate is not known."""
    now, then = facts.rates.get(facts.dtype), facts.rates.get(to)
    if not now or not then or to in facts.lacks:
        return None
    faster = {"matmul": now / then}
    if facts.on_gpu and to == "bfloat16" and "float32" in facts.rates:
        # In one kernel already, on FP32 cores whatever the format of other products.
        kernels = ONE_KERNEL_OVER_PRODUCTS
        faster["attention"] = kernels[to] / kernels["float32"] * facts.rates["float32"] / then
        # Torch lets convolutions use TF32 from the start.
        faster[CONVOLUTION] = min(1.0, facts.rates.get("tf32", now) / then)
    changed = facts.with_work(lambda work: work.scaled(faster))
    return replace(changed, dtype=to)


@judge
def _tf32(facts: Facts) -> Judged | None:
    after = with_faster_matmuls(facts, "tf32") if facts.dtype == "float32" else None
    if after is None or not facts.on_gpu:
        return None
    advice = Advice(
        code="tf32",
        title="float32 products on tensor cores (TF32)",
        gain_ms=gain_ms(facts, after),
        why=f"products take {facts.class_ms('matmul'):.3g} ms in float32; TF32 is"
        f" {facts.rates['tf32'] / facts.rates['float32']:.3g}× as fast here",
        risk="numerics: products keep 10 bits of the mantissa",
        lines=('torch.set_float32_matmul_precision("high")',),
        setting={"dtype": "tf32"},
    )
    return Judged(advice, after)


@judge
def _bfloat16(facts: Facts) -> Judged | None:
    after = with_faster_matmuls(facts, "bfloat16") if facts.dtype in ("float32", "tf32") else None
    if after is None:
        return None

    def cast(work: PhaseWork) -> PhaseWork:
        # Kernels that move memory take as long as before: some have half the bytes, and the casts
        # between those and what stays in float32 take as much.
        found = work.scaled({}, launches=_CAST_LAUNCHES[work.name])
        return found.with_more("copy/cast", facts.casts_ms)

    attention = after.attention
    after = after.with_work(cast, tuple(_CAST_LAUNCHES))
    after = replace(after, attention=attention, autocast=True)
    kind = "cuda" if facts.on_gpu else "cpu"
    advice = Advice(
        code="bfloat16",
        title="bfloat16 autocast",
        gain_ms=gain_ms(facts, after),
        gain_bytes=_less_kept(facts),
        why=f"products take {facts.class_ms('matmul'):.3g} ms in {facts.dtype}; bfloat16 is"
        f" {facts.rates['bfloat16'] / facts.rates[facts.dtype]:.3g}× as fast here",
        risk="numerics: 8 bits of mantissa in products and activations; weights stay in float32",
        lines=(f'with torch.autocast("{kind}", torch.bfloat16):', "    loss = model(…)"),
        setting={"dtype": "bfloat16"},
    )
    return Judged(advice, after)


@judge
def _float32(facts: Facts) -> Judged | None:
    """A machine without units for a short dtype converts every number on the way. Where its
    matmuls have units, its convolutions may have none: then they stay far below the rate."""
    now, wide = facts.rates.get(facts.dtype), facts.rates.get("float32")
    if not facts.autocast or not now or not wide:
        return None
    emulated = not facts.on_gpu and facts.products_over_rate > _EMULATED_OVER_RATE
    if now >= wide and not emulated:
        return None
    takes = facts.class_ms(*_COMPUTE)
    at_rate = _OVER_RATE_ON_CPU * 1e3 * facts.flops / wide if not facts.on_gpu else 0.0
    left = max(at_rate, takes * now / wide if now < wide else 0.0)
    if left >= takes:
        return None
    changed = facts.with_work(lambda work: work.scaled(dict.fromkeys(_COMPUTE, left / takes)))
    after = replace(changed, dtype="float32", autocast=False)
    kind = "cuda" if facts.on_gpu else "cpu"
    slow = (
        f"float32 is {wide / now:.3g}× as fast"
        if now < wide
        else f"they reach a {facts.products_over_rate:.3g}th of its matmul rate"
    )
    advice = Advice(
        code="float32",
        title="float32 instead of autocast",
        gain_ms=gain_ms(facts, after),
        why=f"matmuls and convolutions take {takes:.3g} ms in {facts.dtype}, which is slow here:"
        f" {slow}",
        risk="memory: activations take twice the bytes",
        lines=(f'with torch.autocast("{kind}", enabled=False):', "    loss = model(…)"),
        setting={"dtype": "float32"},
    )
    return Judged(advice, after)


def _less_kept(facts: Facts) -> int:
    """Two thirds of what is kept stays: half of a tensor in 16 bits, all of one in float32. Scores
    of written-out attention stay in float32 for the softmax and are kept once more in 16 bits for
    the product. Every weight has a copy."""
    kept = facts.saved_bytes - facts.score_bytes
    return facts.lower_peak(kept // 3 - facts.score_bytes // 2 - 2 * facts.parameters)
