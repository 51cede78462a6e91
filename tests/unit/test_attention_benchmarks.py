"""Parts of the attention benchmarks that need no GPU: the fit of `auto`'s rule to records, and the
model of the barriers of the Gluon kernel."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention_regret as regret
import gluon_protocol as protocol

TRUE_LIMIT = 1 << 33


def record(shape: regret.Shape, triton: float, sdpa: float) -> dict[str, Any]:
    us = {"auto": sdpa, "triton": triton, "sdpa": sdpa, "sdpa_cudnn": sdpa}
    return {"shape": shape._asdict(), "us": us}


def records() -> list[dict[str, Any]]:
    """Triton is 10 % faster for causal 16-bit inputs of equal heads from a size on, else slower."""
    lines = []
    for shape in regret.shapes(120, seed=1):
        element_bytes, _, causal, grouped = shape.kind()
        wins = (element_bytes, causal, grouped) == (2, True, False)
        wins = wins and shape.multiply_adds() >= TRUE_LIMIT
        lines.append(record(shape, 90.0 if wins else 120.0, 100.0))
    return lines


def test_fitted_rule_has_no_regret_on_its_records_and_finds_the_limit() -> None:
    lines = records()
    rule = regret.fitted(lines)
    assert max(regret.ruled_regret(line, rule) for line in lines) == 0.0
    assert all((kind[0], kind[2], kind[3]) == (2, True, False) for kind in rule)
    sizes = [regret.Shape(**line["shape"]) for line in lines]
    for kind, limit in rule.items():
        work = [shape.multiply_adds() for shape in sizes if shape.kind() == kind]
        below = max((n for n in work if n < TRUE_LIMIT), default=0)
        assert below < limit <= min(n for n in work if n >= TRUE_LIMIT)


def test_regret_of_a_rule_is_that_of_its_choice() -> None:
    shape = regret.Shape("bfloat16", 4, 16, 16, 4096, 64, causal=True)
    line = record(shape, 90.0, 100.0)
    assert regret.ruled_regret(line, {}) == pytest.approx(100 / 90 - 1)
    assert regret.ruled_regret(line, {shape.kind(): 1}) == 0.0
    assert regret.ruled_regret(line, {shape.kind(): math.inf}) == pytest.approx(100 / 90 - 1)


def test_table_and_fit_are_printed_for_any_number_of_records() -> None:
    lines = records()
    text = regret.fit(lines)
    assert "16 bit, head dimension up to 64, causal, equal heads" in text
    assert "never" in text
    assert "120 shapes" in regret.summary(lines)
    assert "too few" in regret.fit(lines[:2])
    assert "no shape" in regret.summary([])


def program(stages: int, groups: int = 2, turns: bool = True, queries: int = 1) -> protocol.Program:
    return protocol.Program([1, 4, 2, 7], stages, groups, turns, queries)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("queries", [1, 2])
def test_barriers_have_no_deadlock_and_no_race(stages, groups, turns, queries) -> None:
    for seed in range(20):
        assert protocol.run(program(stages, groups, turns, queries), random.Random(seed)) > 0


def failures(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> set[str]:
    """Return how runs of a program with a planted error end."""
    monkeypatch.setattr(protocol.Ring, name, function)
    ends = set()
    for seed in range(20):
        try:
            protocol.run(program(2), random.Random(seed))
        except AssertionError as error:
            ends.add(str(error).split()[0])
    return ends


def test_model_finds_a_ring_that_is_too_small() -> None:
    with pytest.raises(AssertionError, match="deadlock"):
        protocol.run(program(1), random.Random(0))


def test_model_finds_a_release_of_the_wrong_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(ring: protocol.Ring, n: int) -> None:
        ring.empty[(n + 1) % ring.size].arrive()

    assert failures(monkeypatch, "release", release)


def test_model_finds_a_producer_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(ring: protocol.Ring, n: int, tile: Any, engine: list[Any]) -> protocol.Process:
        ring.full[n % ring.size].arrive(copies=1)
        ring.holds[n % ring.size] = None
        engine.append((ring, n % ring.size, tile))
        yield None

    assert failures(monkeypatch, "load", load)
