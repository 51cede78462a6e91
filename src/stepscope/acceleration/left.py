"""What `accelerate` leaves as it is, and why."""

from __future__ import annotations

from typing import NamedTuple


class Left(NamedTuple):
    """A part of a model, or a line of the program, that stays as it is."""

    piece: str
    """The pass, `compile`, `model` or `optimizer`."""
    name: str
    """Name of the module, or line of the program."""
    reason: str
