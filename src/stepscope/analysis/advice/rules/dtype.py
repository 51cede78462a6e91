"""The dtype of matmuls: TF32, bfloat16 autocast, float32 instead of an emulated dtype.

Times follow from the matmul rates measured on the machine.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import CONVOLUTION, Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule

FUSED_OVER_NAIVE_MATMULS = {"bfloat16": 0.7, "float16": 0.7, "float32": 2.9}
"""Time of fused causal attention over that of the matmuls of naive attention, on a GPU. The fused
kernel skips half of the matmul work; for float32 PyTorch only has a kernel for FP32 cores."""
_CAST_LAUNCHES = {"forward": 1.33, "backward": 1.13}
"""Kernel launches under autocast over those without: weights and float32 results are cast."""
_COMPUTE = ("matmul", "attention")
_EMULATED_OVER_RATE = 20.0
"""Matmul time over that at the dtype's measured rate from which a dtype counts as emulated. Small
matmuls miss their rate by a smaller factor."""
_OVER_RATE_ON_CPU = 2.0
"""Matmul time of a small step over that at the measured rate: 1.5 in
`results/advise-slow_cpu.jsonl`, more for convolutions."""


def with_faster_matmuls(facts: Facts, to: str) -> Facts | None:
    """Return the step with its matmuls in another dtype; None if a rate is unknown."""
    now, then = facts.rates.get(facts.dtype), facts.rates.get(to)
    if not now or not then or to in facts.lacks:
        return None
    faster = {"matmul": now / then}
    if facts.on_gpu and to == "bfloat16" and "float32" in facts.rates:
        # Fused attention already: it runs on FP32 cores, whatever the dtype of other matmuls.
        kernels = FUSED_OVER_NAIVE_MATMULS
        faster["attention"] = kernels[to] / kernels["float32"] * facts.rates["float32"] / then
        # PyTorch allows TF32 in convolutions by default.
        faster[CONVOLUTION] = min(1.0, facts.rates.get("tf32", now) / then)
    changed = facts.with_work(lambda work: work.scaled(faster))
    return replace(changed, dtype=to, linear_ms=facts.linear_ms * now / then)


@rule("tf32", "TF32 matmuls (tensor cores for float32)", stage=Stage.DTYPE)
def _tf32(facts: Facts) -> Change | Left | None:
    if not facts.on_gpu:
        return Left("a CPU has no TF32")
    if facts.dtype != "float32":
        return Left(f"the matmuls are in {facts.dtype} already")
    after = with_faster_matmuls(facts, "tf32")
    if after is None:
        return Left("this GPU has no TF32") if "tf32" in facts.lacks else None
    return Change(
        after=after,
        why=f"float32 matmuls take {facts.class_ms('matmul'):.3g} ms; TF32 is"
        f" {facts.rates['tf32'] / facts.rates['float32']:.3g}× as fast {facts.rates_basis}",
        risk="numerics: matmul inputs are rounded to 10 mantissa bits",
        lines=('torch.set_float32_matmul_precision("high")',),
        setting={"dtype": "tf32"},
    )


@rule("bfloat16", "bfloat16 autocast", stage=Stage.DTYPE)
def bfloat16(facts: Facts) -> Change | Left | None:
    if facts.dtype not in ("float32", "tf32"):
        return Left(f"the matmuls are in {facts.dtype} already")
    after = with_faster_matmuls(facts, "bfloat16")
    if after is None:
        return Left("this machine has no bfloat16") if "bfloat16" in facts.lacks else None

    def cast(work: PhaseWork) -> PhaseWork:
        # Memory-bound kernels take as long as before: some move half the bytes, but the casts
        # between bfloat16 and float32 take about as long as that saves.
        cast_work = work.scaled({}, launches=_CAST_LAUNCHES[work.name])
        return cast_work.with_more("copy/cast", facts.casts_ms)

    attention = after.attention
    after = after.with_work(cast, tuple(_CAST_LAUNCHES))
    after = replace(after, attention=attention, autocast=True)
    kind = "cuda" if facts.on_gpu else "cpu"
    return Change(
        after=after,
        gain_bytes=_saved_bytes_freed(facts),
        why=f"{facts.dtype} matmuls take {facts.class_ms('matmul'):.3g} ms; bfloat16 is"
        f" {facts.rates['bfloat16'] / facts.rates[facts.dtype]:.3g}× as fast {facts.rates_basis}",
        risk="numerics: matmuls and activations have 8 bits of precision; weights stay in float32",
        lines=(f'with torch.autocast("{kind}", torch.bfloat16):', "    loss = model(…)"),
        setting={"dtype": "bfloat16"},
    )


@rule("float32", "float32 instead of autocast", stage=Stage.DTYPE)
def _float32(facts: Facts) -> Change | Left | None:
    """float32 in place of an emulated dtype.

    A machine without hardware for a 16-bit dtype converts every number. Some machines have
    hardware for matmuls in that dtype but not for convolutions, which then run far below the rate.
    """
    now, wide = facts.rates.get(facts.dtype), facts.rates.get("float32")
    if not facts.autocast:
        return Left("autocast is not used")
    if not now or not wide:
        return None
    emulated = not facts.on_gpu and facts.matmuls_over_rate > _EMULATED_OVER_RATE
    if now >= wide and not emulated:
        return Left(f"{facts.dtype} is not slower than float32 on this machine")
    takes = facts.class_ms(*_COMPUTE)
    at_rate = _OVER_RATE_ON_CPU * 1e3 * facts.flops / wide if not facts.on_gpu else 0.0
    left = max(at_rate, takes * now / wide if now < wide else 0.0)
    if left >= takes:
        return Left(f"{facts.dtype} is not slower than float32 in this step")
    changed = facts.with_work(lambda work: work.scaled(dict.fromkeys(_COMPUTE, left / takes)))
    after = replace(changed, dtype="float32", autocast=False)
    kind = "cuda" if facts.on_gpu else "cpu"
    slow = (
        f"float32 is {wide / now:.3g}× as fast"
        if now < wide
        else f"they reach 1/{facts.matmuls_over_rate:.3g} of its matmul rate"
    )
    return Change(
        after=after,
        why=f"matmuls and convolutions take {takes:.3g} ms in {facts.dtype}, which is slow on this"
        f" machine: {slow}",
        risk="memory: activations take twice the bytes",
        lines=(f'with torch.autocast("{kind}", enabled=False):', "    loss = model(…)"),
        setting={"dtype": "float32"},
    )


def _saved_bytes_freed(facts: Facts) -> int:
    """Bytes by which bfloat16 autocast lowers the peak.

    Two thirds of the tensors saved for backward remain: half of each 16-bit tensor, all of each
    float32 tensor. Naive attention saves its scores in float32 for the softmax and again in 16
    bits for the matmul. Every weight has a 16-bit copy.
    """
    saved = facts.saved_bytes - facts.score_bytes
    return facts.lower_peak(saved // 3 - facts.score_bytes // 2 - 2 * facts.parameters)


@setting("dtype", "tf32", counted=False)
def _allow_tf32(program: Program, dtype: str) -> None:  # noqa: ARG001
    import torch

    torch.set_float32_matmul_precision("high")


@setting("dtype", "bfloat16", "float16", without="no model is called in a step")
def _autocast(program: Program, dtype: str) -> None:
    program.autocast(dtype)


@setting("dtype", "float32", without="autocast is not used")
def _disable_autocast(program: Program, dtype: str) -> None:  # noqa: ARG001
    import torch

    plain = torch.autocast.__init__

    def init(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: Any = None,
    ) -> None:
        program.applied["dtype"] += enabled
        plain(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
