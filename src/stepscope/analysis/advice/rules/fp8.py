"""FP8 GEMMs in the linear layers of a step, by `stepscope.accelerate(dtype="fp8")`.

The time of the GEMMs follows from the rates that were measured on the machine, that of the casts
around them from its bandwidth, by the rule that chooses the layers (`kernels.fp8.choice`).
"""

from __future__ import annotations

from math import sqrt

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.rules.accelerate import ACCELERATE, COMPILED, accelerated
from stepscope.analysis.advice.rules.dtype import bfloat16
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.kernels.fp8 import choice
from stepscope.kernels.fp8.recipe import DEFAULT

FP8 = "fp8"
"""Value of the setting `dtype`, for which `stepscope.accelerate` is called."""
_GEMMS = {"forward": 1.0, "backward": 2.0}
"""GEMMs of a linear layer over that of its forward pass."""
_LAUNCHES = {"forward": 4.0, "backward": 6.0}
"""Kernels that cast the operands of a layer."""


@rule("fp8", "FP8 linear layers (stepscope.accelerate; changes numerics)", stage=Stage.PIECES)
def _fp8(facts: Facts) -> Change | Left | None:
    if reason := _refused(facts):
        return reason
    in_bf16 = facts
    if facts.dtype != "bfloat16":
        narrow = bfloat16(facts)
        if not isinstance(narrow, Change):
            return narrow
        in_bf16 = narrow.after
    # The same call compiles the model.
    compiled = accelerated(in_bf16)
    before = compiled if isinstance(compiled, Facts) else in_bf16
    estimate = _estimate(facts)
    if estimate is None:
        return None
    after = _with_casts(before, in_bf16.linear_ms, estimate)
    if estimate.gain < choice.MINIMUM_GAIN or gain_ms(before, after) <= 0:
        return Left("the casts of its linear layers would take longer than FP8 GEMMs gain")
    rates = facts.rates
    return Change(
        after=after,
        why=f"the GEMMs of {facts.linear_matmuls / facts.micro_batches:.4g} linear layers take"
        f" {sum(_GEMMS.values()) * in_bf16.linear_ms:.3g} ms in bfloat16; FP8 is"
        f" {rates[FP8] / rates['bfloat16']:.3g}× as fast {facts.rates_basis}, and casts take"
        f" {estimate.casts_s / estimate.bf16_s:.1%} of the time in bfloat16",
        risk="numerics: inputs, weights and gradients of linear layers are rounded to 3 mantissa"
        " bits for their GEMMs; weights and optimizer keep their dtypes. A trial compares a few"
        " losses only: see `stepscope run fp8` for the layers that should stay in bfloat16",
        lines=("import stepscope", 'stepscope.accelerate(model, optimizer, dtype="fp8")'),
        setting={"dtype": FP8},
        excludes=(ACCELERATE, "attention", "compile", "optimizer", "siblings"),
    )


def _refused(facts: Facts) -> Left | None:
    """Return why the step cannot run in FP8; None if it can."""
    if not facts.on_gpu:
        return Left("FP8 matmuls exist on NVIDIA GPUs, not on a CPU")
    if FP8 in facts.lacks:
        return Left("this GPU has no FP8 matmuls: they need compute capability 8.9 or higher")
    if facts.uses_fp8 or facts.dtype == FP8:
        return Left("matmuls run in FP8 already")
    if facts.dtype == "float16":
        return Left("FP8 layers come with bfloat16 autocast, and this step uses float16")
    if facts.compiled:
        return COMPILED
    if not facts.linear_matmuls:
        return Left("no matmuls of linear layers in repeated blocks are traced")
    return None


def _estimate(facts: Facts) -> choice.Estimate | None:
    """Return the times of an average layer, as a square one, over all micro-batches, whose weights
    are cast once; None if an input is missing."""
    bf16, fp8 = facts.rates.get("bfloat16"), facts.rates.get(FP8)
    if not (bf16 and fp8 and facts.bandwidth and facts.parameters and facts.flops):
        return None
    rates = choice.Rates(bf16_flops=bf16, fp8_flops=fp8, bandwidth=facts.bandwidth, launch_s=0.0)
    tokens = round(facts.flops / (6 * facts.parameters))
    width = round(sqrt(facts.parameters * facts.micro_batches / facts.linear_matmuls))
    return choice.estimate(max(1, tokens), max(1, width), max(1, width), DEFAULT, rates)


def _with_casts(facts: Facts, linear_ms: float, estimate: choice.Estimate) -> Facts:
    """Return the step with the GEMMs of its linear layers in FP8, and their casts."""
    gemms, casts = estimate.fp8_s / estimate.bf16_s, estimate.casts_s / estimate.bf16_s

    def cast(work: PhaseWork) -> PhaseWork:
        ms = min(work.classes.get("matmul", 0.0), _GEMMS[work.name] * linear_ms)
        work = work.with_more("matmul", (gemms - 1) * ms).with_more("copy/cast", casts * ms)
        return replace(work, launches=work.launches + _LAUNCHES[work.name] * facts.linear_matmuls)

    attention = facts.attention
    after = facts.with_work(cast, tuple(_GEMMS))
    return replace(
        after,
        attention=attention,
        dtype=FP8,
        autocast=True,
        compiled=True,
        uses_fp8=True,
        linear_ms=gemms * linear_ms,
    )


@setting("dtype", FP8, counted=False)
def _in_fp8(program: Program, dtype: str) -> None:
    program.accelerate(dtype)
