"""Rule that decides by shape whether a linear layer gains from FP8 GEMMs. No torch.

The GEMMs take about half the time; the casts around them move bytes. The rates are sustained ones
of an H200 at its power limit, step after step, as training runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.kernels.fp8.recipe import BF16, BLOCKWISE, DELAYED, Recipe


@dataclass(frozen=True)
class Rates:
    """Rates of a device that the rule computes with."""

    bf16_flops: float = 650e12
    """Sustained bf16 GEMMs (624 to 691 TFLOP/s)."""
    fp8_flops: float = 1_230e12
    """Sustained FP8 GEMMs (1,172 to 1,327 TFLOP/s)."""
    bandwidth: float = 3.7e12
    """Bytes per second of a cast: 8192×10240 from bf16 to FP8 took 0.068 ms."""
    launch_s: float = 2e-6
    """Start of one more kernel within a captured step."""


RATES = Rates()
MINIMUM_GAIN = 1.05
"""Smallest predicted ratio of the times in bf16 and in FP8."""
_ACTIVATION_BYTES = 2
_WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Estimate:
    """Predicted times of the three GEMMs of a layer, in seconds."""

    bf16_s: float
    fp8_s: float
    """GEMMs of the recipe, without casts."""
    casts_s: float

    @property
    def gain(self) -> float:
        return self.bf16_s / (self.fp8_s + self.casts_s)


def estimate(tokens: int, d_in: int, d_out: int, recipe: Recipe, rates: Rates = RATES) -> Estimate:
    """Return the predicted times of a layer, forward and backward, with one cast of its weight."""
    flops = 2.0 * tokens * d_in * d_out
    in_fp8 = 2 if recipe.weight_gradient == BF16 else 3
    gemms = flops * (in_fp8 / rates.fp8_flops + (3 - in_fp8) / rates.bf16_flops)
    # Scales of current values need a pass before the cast; blocks of 128 are scaled in the cast.
    passes = 1 if recipe.scaling in (DELAYED, BLOCKWISE) else 2
    copies = 1 if recipe.weight_gradient == BF16 else 2
    moved = tokens * (d_in + d_out) * (passes * _ACTIVATION_BYTES + copies)
    weight_passes = 1 if recipe.scaling == BLOCKWISE else 2
    # With one scale, one copy, which the backward pass reads and writes transposed; else both in
    # one pass. The copy in bf16 that they replace is written by the fused update.
    copied = 3 if recipe.one_scale else 2
    moved += d_in * d_out * (weight_passes * _WEIGHT_BYTES + copied - _ACTIVATION_BYTES)
    kernels = 3 * (1 if recipe.scaling == BLOCKWISE else 2 if recipe.scaling == DELAYED else 3)
    kernels += int(recipe.one_scale)
    return Estimate(
        3 * flops / rates.bf16_flops, gemms, moved / rates.bandwidth + kernels * rates.launch_s
    )


def not_worth_it(
    tokens: int, d_in: int, d_out: int, recipe: Recipe, rates: Rates = RATES
) -> str | None:
    """Return why a layer of this shape stays in bf16; None if FP8 is predicted to be faster."""
    times = estimate(tokens, d_in, d_out, recipe, rates)
    if times.gain >= MINIMUM_GAIN:
        return None
    return (
        f"the casts cost more than the GEMMs gain: {tokens}×{d_in}×{d_out} is predicted to take"
        f" {1e6 * times.bf16_s:.0f} µs in bf16, {1e6 * times.fp8_s:.0f} µs in FP8 and"
        f" {1e6 * times.casts_s:.0f} µs for casts"
    )
