"""Turns of several wrappers on a rank: one in memory at a time, in an order that changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from parallel_records import ddp_record, sharding_record
from stepscope.parallel.heartbeat import HEARTBEAT
from stepscope.records.schema import Quantity
from stepscope.studies.registry import find_study
from stepscope.training.ranks import steps
from stepscope.training.ranks.steps import PER_TURN, WARMUP, interleaved
from view_blocks import coded, codes, rows_of, table_of


class Wrapper:
    """A step with a reference cycle, as hooks make them."""

    alive: ClassVar[list[weakref.ref[Wrapper]]] = []
    ran: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name, self.me, self.calls = name, self, 0
        assert not [one for one in self.alive if one() is not None]
        self.alive.append(weakref.ref(self))

    def __call__(self) -> Mapping[str, float]:
        self.ran.append(self.name)
        self.calls += 1
        return {"step": float(self.calls)}


@pytest.fixture
def world() -> Any:
    gc.collect()
    Wrapper.alive.clear()
    Wrapper.ran.clear()
    numbers: list[int] = []
    return SimpleNamespace(device=torch.device("cpu"), step=numbers.append, numbers=numbers)


def builders(*names: str) -> dict[str, Callable[[], Wrapper]]:
    return {name: lambda name=name: Wrapper(name) for name in names}  # type: ignore[misc]


def test_one_wrapper_is_in_memory_at_a_time(world: Any) -> None:
    samples = interleaved(world, builders("a", "b", "c"), 5, itertools.count(7))
    assert len(Wrapper.alive) == 3 * 3
    # Unrecorded steps come first, and the last turn has the remaining sample.
    first = [float(WARMUP + 1 + n) for n in range(PER_TURN)]
    assert samples == {(name, "step"): [*first, *first, first[0]] for name in ("a", "b", "c")}
    assert world.numbers == list(range(7, 16))
    turns = [name for name, _ in itertools.groupby(Wrapper.ran)]
    assert len({tuple(turns[n : n + 3]) for n in range(0, len(turns), 3)}) > 1


def test_a_slow_machine_takes_fewer_rounds(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_on_rank_0", lambda _, decision: decision)
    monkeypatch.setattr(steps, "TIME_S", 0.0)
    samples = interleaved(world, builders("a", "b"), 50, itertools.count(), began_s=0.0)
    assert {len(taken) for taken in samples.values()} == {PER_TURN}


def test_the_supervisor_sees_progress_within_a_turn(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(HEARTBEAT, "state", seen.append)
    interleaved(world, builders("a"), PER_TURN, itertools.count())
    assert len(seen) == WARMUP + PER_TURN


def compared(**differences: float) -> tuple[Quantity, ...]:
    return (
        Quantity(name="change", value=1e-3, unit="1"),
        Quantity(name="rounding", value=1e-7, unit="1"),
        *(
            Quantity(name="difference", variant=name, rank=rank, value=value * rank, unit="1")
            for name, value in differences.items()
            for rank in (0, 1)
        ),
    )


def test_a_strategy_that_trains_otherwise_is_named() -> None:
    right = find_study("ddp").view([ddp_record(quantities=compared(naive=1e-9, flat=2e-9))])
    match = coded(right, "ddp.correct")
    assert (match.values["difference"], match.values["strategy"]) == (2e-9, "flat")
    assert (match.values["wrong"], match.tone, match.timed) == ("", "good", False)
    rows = {row["strategy"]: row for row in rows_of(table_of(right, "ddp-steps"))}
    assert (rows["flat"]["difference"], rows["overlap"]["difference"]) == (2e-9, None)
    wrong = find_study("ddp").view([ddp_record(quantities=compared(naive=1e-9, flat=2e-5))])
    match = coded(wrong, "ddp.correct")
    assert (match.values["wrong"], match.tone) == ("flat", "warn")
    assert match.text.endswith("the parameters with flat are wrong.")


def test_a_difference_that_is_not_a_number_is_wrong() -> None:
    blocks = find_study("ddp").view([ddp_record(quantities=compared(naive=float("nan")))])
    assert coded(blocks, "ddp.correct").values["wrong"] == "naive"


def test_equal_parameters_are_called_equal() -> None:
    blocks = find_study("sharding").view([sharding_record(quantities=compared(scatter=0.0))])
    assert " are exactly those of one process " in coded(blocks, "sharding.correct").text
    assert "sharding.correct" not in codes(find_study("sharding").view([sharding_record()]))
