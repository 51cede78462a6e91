"""What fused layers keep for the backward, by name. No torch."""

from __future__ import annotations

from stepscope.errors import UsageError

ALL, GATES, INPUTS = "all", "gates", "inputs"
KEEPS = (ALL, GATES, INPUTS)
"""`all`; `gates`: norms and what is gated are made again, by one pass each; `inputs`: the gates of
the feed-forward as well, by one product."""


def kept(strategy: str, layers: int) -> tuple[str, ...]:
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
