"""Blocks of combinations of changes: one is timed at a time, while others start."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from stepscope.advisor.advise.interleaved import Ready, ScriptEndedError, TurnResult
from stepscope.advisor.inspect.order import Order

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import advice_blocks
from advice_blocks import Blocks, Timed, Wanted

ORDER = Order(target="train.py", warmup=5, timed=1, traced=1, memory=False)


class PlantedProcess:
    """A program of 10 ms per step that waits at its gate."""

    all: ClassVar[list[PlantedProcess]] = []

    def __init__(self, order: Order, settings: dict[str, str]) -> None:
        del order
        self.started = self.settings = settings
        self.stopped = self.passed = False
        self._gate = os.environ[advice_blocks.GATE]
        self.all.append(self)

    def ready(self) -> Ready:
        if not self.passed:
            with open(self._gate) as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                self.passed = True
        if "broken" in self.settings:
            raise ScriptEndedError("the script ended with exit code 1")
        return Ready(step_ms=10.0, losses=[], switchable=["optimizer"])

    def can_switch(self, settings: dict[str, str]) -> bool:
        return settings.items() <= self.started.items()

    def switch(self, settings: dict[str, str]) -> None:
        self.settings = settings

    def send_signal(self, number: signal.Signals) -> None:
        self.stopped = number == signal.SIGSTOP

    def turn(self, steps: int) -> TurnResult:
        del steps
        others = [one for one in self.all if one is not self and one.passed]
        assert all(one.stopped for one in others), "a block is timed alone"
        return TurnResult(step_ms=30.0 if "slow" in self.settings else 10.0, losses=[])

    def __exit__(self, *_: object) -> None:
        self.all.remove(self)


def test_each_combination_is_timed_once_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_blocks, "TrialProcess", PlantedProcess)
    monkeypatch.setattr(advice_blocks, "_DRAINED_S", 0.01)
    starts: list[dict[str, str]] = []
    left: list[dict[str, str]] = [
        {},
        {"dtype": "bfloat16", "optimizer": "fused"},
        {"dtype": "bfloat16"},
        {"accelerate": "accelerate"},
        {"slow": "yes"},
        {"broken": "yes"},
    ]
    done: dict[str, Timed] = {}

    def wanted(settings: dict[str, str]) -> Wanted:
        return Wanted("train", ORDER, settings, 10.0, 1)

    def following(starting: Sequence[Wanted]) -> Wanted | None:
        found = (one for one in map(wanted, left) if not any(s.covers(one) for s in starting))
        if (one := next(found, None)) is not None:
            starts.append(one.settings)
        return one

    def note(one: Wanted, timed: Timed, _: float) -> None:
        left.remove(one.settings)
        done["+".join(one.settings)] = timed

    Blocks(
        following,
        note,
        lambda started: [one for one in map(wanted, left) if started.covers(one)],
        lambda _: 10.0,
        beside=3,
        memory_bytes=10.0,
        until=time.monotonic() + 20,
    ).run()
    assert not left
    assert not PlantedProcess.all, "no process is left behind"
    assert len(starts) == 5, "bfloat16 alone is timed in the process that switches the optimizer"
    assert done["dtype+optimizer"].seconds == pytest.approx(advice_blocks.BLOCK_S)
    assert done["slow"].seconds < advice_blocks.BLOCK_S, "one that is far off ends early"
    assert done["broken"].failed == "the script ended with exit code 1"
