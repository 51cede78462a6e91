"""Judgement of measured plans in `benchmarks/memory_musts.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from memory_musts import musts


def case(peak: int, ms: float, **more: int) -> dict[str, Any]:
    return {"peak_bytes": peak, "step_ms": ms, **more}


def judged(cases: dict[str, dict[str, Any]]) -> dict[str, bool]:
    named = {name: {"case": name, **line} for name, line in cases.items()}
    return {line["must"]: line["reached"] for line in musts(named)}


def test_each_must_is_judged_by_its_worst_case() -> None:
    budgets = {
        f"fit-{n}": case(100 * n - 1, 20.0 - n, budget_bytes=100 * n, predicted_bytes=100 * n)
        for n in range(1, 9)
    }
    assert all(judged(budgets).values())
    slower = budgets | {"fit-8": budgets["fit-8"] | {"step_ms": 14.0}}
    assert not all(judged(slower).values())
    again = slower | {"fit-8-again": case(1, 12.5)}
    assert all(judged(again).values())
    larger = budgets | {"fit-2": budgets["fit-2"] | {"peak_bytes": 201}}
    assert not judged(larger)["peak over budget"]


def test_a_rival_is_compared_with_the_plan_for_its_peak() -> None:
    rivals = {"checkpoint-1": case(100, 10.0), "compiled-torch-0.5": case(100, 10.0)}
    plans = {"fit-at-checkpoint-1": case(100, 9.0), "compiled-fit-at-torch-0.5": case(103, 11.0)}
    assert judged(rivals) == {}
    found = judged(rivals | plans)
    assert [reached for must, reached in found.items() if "eager" in must] == [True, True]
    assert [reached for must, reached in found.items() if "compiled" in must] == [False, False]


def test_twice_the_context() -> None:
    cases = {"double": case(1, 109.0), "double-plain": case(2, 100.0)}
    assert list(judged(cases).values()) == [False]
