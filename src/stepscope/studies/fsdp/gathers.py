"""When each weight of an FSDP step is gathered and when it is needed. Loads without torch."""

from __future__ import annotations

from typing import Literal

import msgspec

GATHERS = "gathers"
"""Name of the attachment: the gathers of each rank."""


class Gather(msgspec.Struct, frozen=True, kw_only=True):
    """One gather of a weight, in several steps; times in ms from the start of the step."""

    weight: str
    phase: Literal["forward", "backward"]
    issued: list[float]
    ended: list[float]
    needed: list[float]

    @property
    def margins(self) -> list[float]:
        """Time between the end of the gather and the moment when the weight is needed, per step;
        below zero if the step waits for it."""
        return [needed - ended for needed, ended in zip(self.needed, self.ended, strict=True)]

    @property
    def layer(self) -> str:
        """The block of the weight, or its module outside of the blocks."""
        parts = self.weight.split(".")
        index = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        return ".".join(parts[: index + 1] if index is not None else parts[:-1]) or self.weight


class RankGathers(msgspec.Struct, frozen=True, kw_only=True):
    """The gathers of one rank in the order in which they are needed, and its phases per step."""

    gathers: list[Gather]
    phases: list[list[tuple[float, float, str]]]
