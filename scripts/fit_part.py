"""Section of docs/results/memory.md on plans of `stepscope.fit` under budgets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from page_parts import figure_files, lines_of, shown

from stepscope.report.blocks import Curve, Figure
from stepscope.report.tables import col, table
from stepscope.report.text import markdown

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from memory_musts import musts

FIT = "memory-fit_h200.jsonl"
_CURVES = {
    "fit": ("fit-", "plain"),
    "checkpointing": ("checkpoint-",),
    "fit, compiled blocks": ("compiled-fit-",),
    "compiled blocks, checkpointing": ("compiled-checkpoint-",),
    "compiled blocks, torch's budget": ("compiled-torch-",),
}
_GIB = 2**30


def fit_part(results: Path) -> tuple[list[str], dict[str, str]]:
    """Return the section and its figure; empty without a record."""
    lines = lines_of(results / FIT)
    cases = {line["case"]: line for line in lines if "peak_bytes" in line}
    if not cases:
        return [], {}
    figure = _figure(cases)
    return [*_texts(cases), *shown([figure])], figure_files([figure])


def _texts(cases: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    first = next(iter(cases.values()))
    yield "## Plans within a budget"
    yield (
        f"`python benchmarks/memory_fit.py budgets --out results/{FIT}` on {first['device']},"
        f" torch {first['torch']}: a decoder of blocks of the shape of an 8B model. `fit-k`: a"
        " budget between the smallest plan and the step without a plan; `fit-at-…`: the plan for"
        " the measured peak of another case; `double`: twice the context at the budget of `plain`."
    )
    judged = [
        col("asked", lambda each: each["must"]),
        col("cases", lambda each: each["cases"], "count"),
        col("worst", lambda each: each["worst"], "number"),
        col("at most", lambda each: each["at_most"], "number"),
        col("reached", lambda each: "yes" if each["reached"] else "no"),
    ]
    yield markdown(table("fit-musts", "", list(musts(cases)), judged)).strip()
    measured = [
        col("case", lambda each: each["case"]),
        col("budget", lambda each: each.get("budget_bytes"), "bytes"),
        col("predicted peak", lambda each: each.get("predicted_bytes"), "bytes"),
        col("peak", lambda each: each["peak_bytes"], "bytes"),
        col("predicted step", lambda each: each.get("predicted_ms"), unit="ms"),
        col("step", lambda each: each["step_ms"], unit="ms"),
    ]
    yield markdown(table("fit-cases", "", [*cases.values()], measured)).strip()


def _figure(cases: Mapping[str, dict[str, Any]]) -> Figure:
    """Measured time against the measured peak."""
    curves = []
    for label, starts in _CURVES.items():
        those = [one for case, one in cases.items() if case.startswith(starts)]
        those = [one for one in those if not one["case"].endswith("-again")]
        those.sort(key=lambda line: line["peak_bytes"])
        curve = Curve(
            label=label,
            x=tuple(line["peak_bytes"] / _GIB for line in those),
            y=tuple(line["step_ms"] for line in those),
        )
        curves += [curve] if those else []
    return Figure(
        name="fit-budgets",
        title="Time against memory, measured",
        curves=tuple(curves),
        x_label="peak, GiB",
        y_label="step, ms",
    )
