"""First sections of docs/results/flash.md: what `auto` chooses, and rules against FlexAttention."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import numpy as np
from page_parts import lines_of, origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from attention_regret import Regret, regrets, ruled_regrets

from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.blocks import Column
from stepscope.report.format import percent
from stepscope.report.tables import col, table
from stepscope.report.text import markdown

RACES = "attention-race_h200.jsonl"
MASKS = "attention-masks_h200.jsonl"
REGRETS = "attention-regret_h200.jsonl"
_RIVAL = "sdpa_cudnn"


def sections(results: Path) -> list[str]:
    """Return the parts for which there are records."""
    return [*_of_auto(results), *_of_regret(results), *_of_rules(results)]


def _of_auto(results: Path) -> list[str]:
    path = results / RACES
    if not path.exists():
        return []
    races = [record for record in read_records(path) if _RIVAL in _times(record)]
    times = {record.case: _times(record) for record in races}
    names = ("triton", "hopper", "auto")
    made = table(
        "flash-auto",
        "Speed relative to cuDNN, forward + backward",
        races,
        [
            col("shape", lambda one: one.case.removeprefix("race_").replace("_", " ")),
            col("cuDNN", lambda one: times[one.case][_RIVAL], unit="ms"),
            *(
                col(name, lambda one, name=name: _speed(times[one.case], name), "number")
                for name in names
            ),
            col(
                "auto chooses", lambda one: (one.notes or {}).get("auto", "").removeprefix("takes ")
            ),
        ],
        caption="Above 1: faster than cuDNN through torch. Interleaved on the same tensors, by the"
        " GPU's clock. `hopper` is the warp-specialized forward with cuDNN's backward.",
    )
    mean, count = mean_of_auto(results)
    answer = f"- `auto` is {mean:.3f} times as fast as cuDNN (mean of {count} causal shapes)."
    return ["## What auto chooses", answer, f"From {origin(RACES, races)}", markdown(made).strip()]


class Regrets(NamedTuple):
    """How much slower `auto` is than the fastest implementation, over random shapes."""

    by_run: dict[str, list[Regret]]
    """By the commit of a run, whose rule was not fitted to it but for the first."""
    present: list[float]
    """Of the present rule, which the last run measured, applied to the times of the runs before it,
    to which it is fitted."""

    @property
    def last(self) -> list[Regret]:
        return list(self.by_run.values())[-1]


def regrets_of(lines: list[dict[str, Any]]) -> Regrets:
    runs = {commit: [one for one in lines if one["commit"] == commit] for commit in _commits(lines)}
    by_run = {commit: regrets(run) for commit, run in runs.items()}
    *fitted, _ = runs.values()
    return Regrets(by_run, ruled_regrets([line for run in fitted for line in run]))


def quantile(values: Iterable[float], share: float) -> float:
    return float(np.quantile(list(values), share))


def _of_regret(results: Path) -> list[str]:
    path = results / REGRETS
    if not path.exists():
        return []
    lines = lines_of(path)
    of_all = regrets_of(lines)
    found = of_all.by_run

    def percentile(title: str, name: str, share: float) -> Column:
        return col(
            title,
            lambda one: quantile((getattr(r, name) for r in found[one]), share),
            "percent",
        )

    made = table(
        "flash-regret",
        "How much slower auto is than the fastest implementation, over random shapes",
        list(found),
        [
            col("commit", lambda one: one, key=True),
            col("shapes", lambda one: len(found[one]), "count"),
            percentile("auto, median", "of_auto", 0.5),
            percentile("95th percentile", "of_auto", 0.95),
            percentile("worst", "of_auto", 1.0),
            percentile("choice, 95th percentile", "of_the_choice", 0.95),
            percentile("worst choice", "of_the_choice", 1.0),
            percentile("noise from", "host", 0.05),
            percentile("noise to", "host", 0.95),
        ],
        caption="Forward + backward through the public call; dtypes, head dimensions, lengths,"
        " heads, key heads and masks are random. Auto: the calls of auto against those of the"
        " fastest implementation. Choice: the same with the calls of the implementation that auto"
        " chooses, which run the same code; where it was far behind at first, these are few calls"
        " and take longer than many. Noise: the difference between these two times, 5th to 95th"
        " percentile. The rule of the first run was set by 118 of its 200 shapes; those of the"
        " later runs were set by the runs before them alone. The last run measured the present"
        " rule.",
    )
    present = of_all.present
    text = (
        f"`python benchmarks/attention_regret.py`, `results/{REGRETS}`, {lines[0]['device']}. The"
        f" present rule, applied to the times of the runs that it is fitted to:"
        f" {percent(quantile(present, 0.95))} at the 95th percentile,"
        f" {percent(max(present))} at worst ({len(present)} shapes). `python"
        " scripts/fit_attention_rule.py` tests it on each run with a fit to the others."
    )
    answer = (
        f"- Over {len(of_all.last)} random shapes that the rule was not fitted to,"
        f" calls of `auto` were at most {percent(quantile((r.of_auto for r in of_all.last), 0.95))}"
        " slower than the fastest implementation in 95 % of them, and"
        f" {percent(max(r.of_auto for r in of_all.last))} at worst; by the calls of the"
        " implementation that it chose,"
        f" {percent(quantile((r.of_the_choice for r in of_all.last), 0.95))} and"
        f" {percent(max(r.of_the_choice for r in of_all.last))}."
    )
    return ["## Regret of auto", answer, text, markdown(made).strip()]


def _commits(lines: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(one["commit"] for one in lines))


def mean_of_auto(results: Path) -> tuple[float, int]:
    """Return the geometric mean of auto's speed relative to cuDNN's over the causal shapes of the
    race with 64 and 128 entries per head and equal heads, and their number."""
    speeds = [
        times[_RIVAL] / times["auto"]
        for record in read_records(results / RACES)
        if {_RIVAL, "auto"} <= (times := _times(record)).keys()
        and record.case.endswith(("d64_bfloat16_causal", "d128_bfloat16_causal"))
    ]
    return geometric_mean(speeds), len(speeds)


def _times(record: Record) -> dict[str, float]:
    """Return the median step of each implementation in ms, by the GPU's clock."""
    return {
        str(series.variant): median(series.values)
        for series in record.series
        if series.name == "step" and series.clock == "device"
    }


def _speed(times: dict[str, float], name: str) -> float | None:
    return times[_RIVAL] / times[name] if name in times else None


def _of_rules(results: Path) -> list[str]:
    path = results / MASKS
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = lines_of(path)
    made = table(
        "flash-rules",
        "Attention with rules against FlexAttention, forward + backward",
        lines,
        [
            col("rule", lambda one: one["rule"]),
            col("heads", lambda one: f"{one['heads']}/{one['key_heads']}"),
            col("length", lambda one: one["length"], "count"),
            col("d", lambda one: one["d_head"], "count"),
            col("Stepscope", lambda one: one["us"]["triton"] / 1e3, unit="ms"),
            col("FlexAttention", lambda one: one["us"]["flex"] / 1e3, unit="ms"),
            col("speedup", lambda one: one["us"]["flex"] / one["us"]["triton"], unit="×"),
        ],
        caption="One sequence in bfloat16 with a causal mask, through the public call; the block"
        " mask of FlexAttention and the intervals of the kernels are created before.",
    )
    text = (
        f"`python benchmarks/attention_masks.py`, `results/{MASKS}`, {lines[0]['device']}, torch"
        f" {lines[0]['torch']}."
    )
    speedups = [one["us"]["flex"] / one["us"]["triton"] for one in lines]
    answer = (
        f"- With `ScoreRules` attention is {min(speedups):.2f} to {max(speedups):.2f} times as fast"
        " as FlexAttention."
    )
    return ["## Rules", answer, text, markdown(made).strip()]
