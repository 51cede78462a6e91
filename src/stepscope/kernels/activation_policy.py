"""What fused layers keep for the backward, by name. No torch."""

from __future__ import annotations

from stepscope.errors import UsageError

ALL, NORMS, GATES, INPUTS = "all", "norms", "gates", "inputs"
KEEPS = (ALL, NORMS, GATES, INPUTS)
"""`all`; `norms`: what is gated is made again on the way, and of the stream its unit rows are kept;
`gates`: norms are made again too, by one pass each; `inputs`: the gates of the feed-forward as
well, by one product."""


def policy_per_layer(strategy: str, layers: int) -> tuple[str, ...]:
    """What each block keeps. `inputs-12` keeps inputs in the first twelve blocks and gates in the
    others, whose backward comes first and frees them."""
    name, dash, number = strategy.partition("-")
    counted = number.isascii() and number.isdigit() and name == INPUTS
    if name not in KEEPS or (dash and not counted):
        raise UsageError(
            f"keep {strategy!r} does not exist",
            f"{', '.join(KEEPS)}, or {INPUTS} of the first blocks only, such as {INPUTS}-12",
        )
    if not dash:
        return (name,) * layers
    if int(number) > layers:
        raise UsageError(
            f"keep {strategy!r} in a model of {layers} blocks", "name at most that many"
        )
    return (INPUTS,) * int(number) + (GATES,) * (layers - int(number))


def check_layer_options(fused: bool, joined: bool, keep: str) -> None:
    """A choice belongs to joined products, and these to the fused model."""
    if joined and not fused:
        raise UsageError("joined products belong to the fused model", "add --fused")
    if keep != ALL and not joined:
        raise UsageError(
            f"keep is {keep!r} in a step without joined products",
            "add --fused --joined, or use --checkpoint",
        )
