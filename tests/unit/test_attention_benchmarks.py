"""Parts of the attention benchmarks that need no GPU: the regret of `auto`'s rule on records, the
fit of the rule, and the model of the barriers of the Gluon kernel."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import attention_regret as regret
import fit_attention_rule
import gluon_protocol as protocol

from stepscope.attention.preference import COSTS, entry_of, largest_of, squared_time

LONG = regret.Shape("bfloat16", 4, 16, 8, 4096, 64, causal=True)
SHORT = LONG._replace(batch=1, length=128)


def record(shape: regret.Shape, chosen: str = "sdpa", **us: float) -> dict[str, Any]:
    return {"shape": shape._asdict(), "us": us, "chosen": chosen}


@pytest.mark.parametrize(
    ("shape", "us", "chosen"),
    [
        (LONG, {"triton": 90.0, "sdpa": 100.0}, "triton"),
        (SHORT, {"triton": 90.0, "sdpa": 100.0}, "sdpa"),
        (LONG._replace(d_head=128), {"hopper": 90.0, "triton": 95.0, "sdpa": 100.0}, "hopper"),
        (LONG._replace(d_head=128), {"triton": 95.0, "sdpa": 100.0}, "sdpa"),
    ],
)
def test_rule_chooses_by_shape_among_what_was_measured(
    shape: regret.Shape, us: dict[str, float], chosen: str
) -> None:
    assert regret.by_rule(shape, us) == chosen


def test_regret_of_auto_and_of_the_rule() -> None:
    lines = [
        record(LONG, auto=99.0, triton=90.0, sdpa=110.0),
        record(SHORT, auto=120.0, triton=80.0, sdpa=100.0),
        record(SHORT, auto=90.0, triton=120.0, sdpa=100.0),
    ]
    found = regret.regrets(lines)
    assert [one.of_auto for one in found] == pytest.approx([0.5, 0.1, 0.0])
    assert [one.of_the_choice for one in found] == pytest.approx([0.25, 110 / 90 - 1, 0.0])
    assert [one.host for one in found] == pytest.approx([0.2, -0.1, -0.1])
    assert "3 shapes: regret of auto 10.0% median" in regret.summary(lines)
    assert "that it chooses 22.2% median" in regret.summary(lines)
    assert "-10.0% to 20.0%" in regret.summary(lines)
    assert "0.0% median, 22.5% at the 95th percentile, 25.0% at worst" in regret.ruled(lines)
    assert "no shape" in regret.summary([])
    assert "no shape" in regret.ruled([record(SHORT, triton=90.0)])


def test_times_of_few_calls_are_not_regrets() -> None:
    line = record(LONG, "triton", auto=99.0, triton=95.0, hopper=140.0, sdpa=120.0)
    times = {form: regret.time_of(line, form) for form in ("triton", "hopper", "sdpa")}
    assert times == {"triton": 95.0, "hopper": None, "sdpa": 120.0}
    assert regret.time_of(line | {"timed": ["auto", "triton"]}, "sdpa") is None
    slow = record(SHORT, "sdpa", auto=150.0, triton=90.0, sdpa=160.0) | {"timed": ["auto"]}
    assert regret.ruled_regrets([slow]) == pytest.approx([150 / 90 - 1])
    assert regret.ruled_regrets([slow | {"chosen": "triton"}]) == []


def test_no_time_is_the_better_of_two() -> None:
    # The same code, timed under two names; the fastest of the others takes 95.
    lucky = record(SHORT, "sdpa", auto=90.0, triton=95.0, sdpa=120.0)
    unlucky = record(SHORT, "sdpa", auto=120.0, triton=95.0, sdpa=90.0)
    assert regret.regrets([lucky])[0].of_the_choice == pytest.approx(120 / 95 - 1)
    assert regret.regrets([unlucky])[0].of_auto == pytest.approx(120 / 90 - 1)
    assert regret.ruled_regrets([lucky]) == pytest.approx([120 / 95 - 1])


def test_the_chosen_implementation_is_timed_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    took = dict.fromkeys(regret.FORMS, 1e-3) | {"sdpa": 5e-3, "triton": 5e-3}

    class Planted:
        def __init__(self, shape: regret.Shape, device: str) -> None:
            pass

        call = staticmethod(lambda form: form)
        chosen = staticmethod(lambda: "sdpa")

    monkeypatch.setattr(regret, "Case", Planted)
    monkeypatch.setattr(regret, "seconds", lambda call, calls: took[call()] / min(calls, 1))
    assert set(regret.FORMS) - set(regret.measure(SHORT, "cpu")["timed"]) == {"triton"}


def test_rule_on_all_records() -> None:
    text = fit_attention_rule.RECORD.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for seed in (0, 1, 2):
        found = regret.ruled_regrets([line for line in lines if line["seed"] == seed])
        assert len(found) >= 190
        assert sorted(found)[int(0.95 * len(found))] < 0.03
        assert max(found) < 0.21


def test_fit_finds_planted_costs() -> None:
    planted = {
        key: costs._replace(
            by_head_dim={
                largest: rate._replace(matmul=1.3 * rate.matmul, rows=0.8 * rate.rows)
                for largest, rate in costs.by_head_dim.items()
            }
        )
        for key, costs in COSTS.items()
    }

    def line(shape: regret.Shape) -> dict[str, Any]:
        sizes, us = shape.sizes(), {}
        for name in fit_attention_rule.NAMES:
            costs = planted.get(entry_of(name, sizes, shape.element_bytes()))
            largest = None if costs is None else largest_of(costs, shape.d_head)
            if costs is not None and largest is not None:
                us[name] = squared_time(costs, costs.by_head_dim[largest], sizes) ** 0.5
        return record(shape, min(us, key=lambda name: us[name]), **us)

    lines = [line(shape) for shape in regret.shapes(500, seed=7)]
    fitted = fit_attention_rule.fit(lines)
    for key, costs in planted.items():
        assert fitted[key].host == pytest.approx(costs.host, rel=0.05)
        for largest, rate in costs.by_head_dim.items():
            assert fitted[key].by_head_dim[largest].matmul == pytest.approx(rate.matmul, rel=0.05)


def test_turns_change_their_order() -> None:
    assert [regret.rotated("abc", turn) for turn in (0, 2, 3)] == [[*"abc"], [*"cab"], [*"cba"]]


def program(stages: int, groups: int = 2, turns: bool = True, queries: int = 1) -> protocol.Program:
    skips = {(1, 0): 1, (2, 0): 1, (3, groups - 2): 2}
    return protocol.Program([1, 4, 2, 7], stages, groups, turns, queries, skips)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("queries", [1, 2])
def test_barriers_have_no_deadlock_and_no_race(stages, groups, turns, queries) -> None:
    for seed in range(20):
        assert protocol.run(program(stages, groups, turns, queries), random.Random(seed)) > 0


def failures(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Any, of: type = protocol.Ring
) -> set[str]:
    """Return how runs of a program with a planted error end."""
    monkeypatch.setattr(of, name, function)
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


def test_model_finds_a_skipped_block_that_is_released_before_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def skip_blocks(one: protocol.Program, w: int, base: int, count: int) -> protocol.Process:
        for n in range(base, base + count):
            yield from one.await_turn(w, n)
            one.pass_turn(w)
            one.k.release(n)
            one.v.release(n)

    assert failures(monkeypatch, "skip_blocks", skip_blocks, of=protocol.Program)


def test_model_finds_a_producer_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(ring: protocol.Ring, n: int, tile: Any, engine: list[Any]) -> protocol.Process:
        ring.full[n % ring.size].arrive(copies=1)
        ring.holds[n % ring.size] = None
        engine.append((ring, n % ring.size, tile))
        yield None

    assert failures(monkeypatch, "load", load)
