"""What a process that watches a script is told to do."""

from __future__ import annotations

import msgspec


class Order(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    """A script, or with `module` the name of a module."""
    module: bool = False
    words: tuple[str, ...] = ()
    """The script's own arguments."""
    warmup: int
    timed: int
    traced: int
    memory: bool
    stop: bool = False
    """End the script once its steps are recorded."""
    channel: int | None = None
    """Where it is told to go on, when it takes turns with another run of the same script."""
    settings: dict[str, str] = {}
    """What is changed in it from outside."""

    @property
    def name(self) -> str:
        return self.target if self.module else self.target.rpartition("/")[2]
