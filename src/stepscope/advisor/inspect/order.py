"""Instructions for the process that runs and observes a script."""

from __future__ import annotations

import shlex
from typing import Literal

import msgspec

TIMED, TIMED_WITHIN_S = 10, 30.0
"""Steps that are timed unless a number is given, and the time after which there are fewer."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Script to run and what to record of it, passed as JSON."""

    target: str
    """Path of a script, or the name of a module if `module` is set."""
    module: bool = False
    words: tuple[str, ...] = ()
    """The script's own arguments."""
    warmup: int
    timed: int
    traced: int
    memory: bool
    within_s: float = 0.0
    """Seconds for the timed steps of a slow program, and for the traced ones; 0 for no limit."""
    plans: Literal["auto", "yes", "no"] = "no"
    """Plan the memory of a step after the recorded ones; auto: if it is on a GPU."""
    stop: bool = False
    """End the script once its steps are recorded."""
    channel: int | None = None
    """File descriptor of the control socket, if interleaved with another run of the script."""
    ranks: int = 1
    """Processes that run the script on this machine; several are started as torchrun does."""
    optimizers: int = 0
    """Optimizers of a step; 0 if not known."""
    settings: dict[str, str] = {}
    """Settings to change at run time."""
    observe: Literal["steps", "always", "sites", "evidence", "memory"] = "steps"
    """What to record: some steps, all steps for as long as the script runs, the places in the
    source, evidence for `judge`, or a plan of the first step's memory."""
    budget: int = 0
    """Bytes that a plan may need; 0 for the memory of the device."""
    allow: tuple[Literal["host-states"], ...] = ()
    """What a plan may change besides the blocks of the model."""
    every: int = 10
    """Steps of a line, if all steps are observed."""
    prometheus: str = ""
    overlay: str = ""
    """JSON file of sources by path, which are run in place of the files."""

    @property
    def command(self) -> str:
        """The program and its arguments, as the command line of `stepscope` takes them."""
        return shlex.join([*(["-m"] if self.module else []), self.target, *self.words])

    @property
    def name(self) -> str:
        return self.target if self.module else self.target.rpartition("/")[2]
