"""What was asked of plans within budgets, judged by the cases of `memory_budgets.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

BUDGETS = 8


def musts(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What was asked of the plans, each with the worst measured value and whether it is reached."""
    fits = [cases[f"fit-{n}"] for n in range(1, BUDGETS + 1) if _is_measured(cases, f"fit-{n}")]
    if fits:
        over = max(one["peak_bytes"] / one["budget_bytes"] for one in fits)
        yield _must("peak over budget", over, 1.0, len(fits))
        errors = [abs(one["peak_bytes"] / one["predicted_bytes"] - 1) for one in fits]
        yield _must("error of the predicted peak", max(errors), 0.02, len(fits))
        times = [_milliseconds(cases, one["case"]) for one in fits]
        slower = [later / sooner for sooner, later in pairwise(times)]
        if slower:
            words = "time at a budget over that at the next smaller one"
            yield _must(words, max(slower), 1.01, len(fits))
    for prefix in ("", "compiled-"):
        rivals = [name for name in cases if _is_rival(name, prefix) and _is_measured(cases, name)]
        pairs = [(fit_for(name), name) for name in rivals]
        pairs = [pair for pair in pairs if _is_measured(cases, pair[0])]
        if pairs:
            times = [_milliseconds(cases, a) / _milliseconds(cases, b) for a, b in pairs]
            peaks = [cases[a]["peak_bytes"] / cases[b]["peak_bytes"] for a, b in pairs]
            words = f"{prefix.rstrip('-') or 'eager'} blocks, against checkpointing"
            yield _must(f"{words}: time", max(times), 1.0, len(pairs))
            yield _must(f"{words}: peak", max(peaks), 1.01, len(pairs))
    if _is_measured(cases, "double") and _is_measured(cases, "double-plain"):
        ratio = _milliseconds(cases, "double") / _milliseconds(cases, "double-plain")
        yield _must("twice the context: time over that without a plan", ratio, 1.08, 1)


def _must(what: str, worst: float, at_most: float, cases: int) -> dict[str, Any]:
    reached = worst <= at_most
    return {"must": what, "worst": worst, "at_most": at_most, "cases": cases, "reached": reached}


def _is_measured(cases: Mapping[str, Mapping[str, Any]], case: str) -> bool:
    return "peak_bytes" in cases.get(case, {})


def _is_rival(case: str, prefix: str) -> bool:
    return case.startswith((f"{prefix}checkpoint-", f"{prefix}torch-"))


def fit_for(case: str) -> str:
    """The case of the plan for the measured peak of another case."""
    name = case.removeprefix("compiled-")
    return f"{case[: len(case) - len(name)]}fit-at-{name}"


def _milliseconds(cases: Mapping[str, Mapping[str, Any]], case: str) -> float:
    """The shorter of the times of two measurements."""
    measured = (cases[name] for name in (case, f"{case}-again") if _is_measured(cases, name))
    shortest: float = min(one["step_ms"] for one in measured)
    return shortest
