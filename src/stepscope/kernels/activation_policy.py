"""Activation policies: what fused layers save for backward and what they recompute. No torch."""

from __future__ import annotations

from stepscope.errors import UsageError

ALL, NORMS, GATES, INPUTS = "all", "norms", "gates", "inputs"
KEEPS = (ALL, NORMS, GATES, INPUTS)
"""`all` saves everything. `norms` recomputes the SwiGLU output, and saves unit rows instead of the
residual stream. `gates` also recomputes norms, one pass each. `inputs` also recomputes gate and up
of the feed-forward, one matmul."""


def policy_per_layer(strategy: str, layers: int) -> tuple[str, ...]:
    """Return the policy of each block. `inputs-12` is `inputs` in the first twelve blocks and
    `gates` in the others, whose backward pass runs first and frees them."""
    name, dash, blocks = strategy.partition("-")
    counted = blocks.isascii() and blocks.isdigit() and name == INPUTS
    if name not in KEEPS or (dash and not counted):
        raise UsageError(
            f"activation policy {strategy!r} does not exist",
            f"one of {', '.join(KEEPS)}, or {INPUTS} in the first blocks only, such as {INPUTS}-12",
        )
    if not dash:
        return (name,) * layers
    if int(blocks) > layers:
        raise UsageError(
            f"activation policy {strategy!r} for a model of {layers} blocks",
            f"give at most {INPUTS}-{layers}",
        )
    return (INPUTS,) * int(blocks) + (GATES,) * (layers - int(blocks))


def check_layer_options(fused: bool, fused_projections: bool, policy: str) -> None:
    """Check that `policy` comes with fused projections, and these with fused layers."""
    if fused_projections and not fused:
        raise UsageError("--fused-projections needs fused layers", "add --fused")
    if policy != ALL and not fused_projections:
        raise UsageError(
            f"activation policy {policy!r} needs fused projections",
            "add --fused --fused-projections, or use --checkpoint",
        )
