"""Claims on attention: speed relative to cuDNN, short lengths, rules, and the regret of `auto`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attention_sections import MASKS, RACES, REGRETS, Regrets, quantile, regrets_of

from claims.records import Claim, lines_of, median_of, records_of, spread
from stepscope.report.format import percent

_GRID = "flash-race_h200.jsonl"
_HOPPER = "hopper-attention_h200.jsonl"
_RIVAL = "sdpa_cudnn"
_LONG_US = 1000
"""Times of the record of regrets that do not depend on the number of calls."""


def _both(results: Path, form: str, head_dims: tuple[int, ...]) -> Iterator[float]:
    """Speeds of forward and backward relative to cuDNN, several heads in bfloat16, in all records
    that have both."""
    for name in (RACES, _GRID):
        for record in records_of(results / name):
            found = re.match(r"race_b\d+_h(\d+)_s\d+_d(\d+)_bfloat16", record.case)
            times = [median_of(record, "step", one, "device") for one in (_RIVAL, form)]
            if found and int(found[1]) > 1 and int(found[2]) in head_dims and None not in times:
                yield times[0] / times[1]  # type: ignore[operator]
    for line in lines_of(results / _HOPPER):
        if line["shape"][3] in head_dims:
            yield line[_RIVAL][0] / line[form][0]


def _forward(results: Path, causal: bool) -> str:
    return spread(
        line[_RIVAL][1] / line["triton"][1]
        for line in lines_of(results / _HOPPER)
        if line["shape"][3] == 128 and line["causal"] == causal
    )


def _d96(results: Path) -> str:
    return spread(
        us[_RIVAL] / us["triton"]
        for line in lines_of(results / REGRETS)
        if line["shape"]["d_head"] == 96
        and {_RIVAL, "triton"} <= (us := line["us"]).keys()
        and us["triton"] > _LONG_US
    )


def _short(results: Path, form: str) -> str:
    """Time of consecutive calls relative to torch's, one head and at most 1024 keys."""
    ratios = []
    for record in records_of(results / _GRID):
        times = [median_of(record, "wall", one, "host") for one in (form, "sdpa")]
        if "_h1_" in record.case and None not in times:
            ratios.append(times[0] / times[1])  # type: ignore[operator]
    return spread(ratios)


def _rules(results: Path) -> str:
    return spread(line["us"]["flex"] / line["us"]["triton"] for line in lines_of(results / MASKS))


def _regrets(results: Path) -> Regrets:
    return regrets_of(list(lines_of(results / REGRETS)))


def _regret(results: Path, name: str, at: float) -> str:
    return percent(quantile((getattr(one, name) for one in _regrets(results).last), at))


def _fitted(results: Path, at: float) -> str:
    return percent(quantile(_regrets(results).present, at))


CLAIMS: dict[str, Claim] = {
    "attention.triton-d128": lambda results: spread(_both(results, "triton", (128,))),
    "attention.hopper": lambda results: spread(_both(results, "hopper", (64, 128))),
    "attention.forward-full": partial(_forward, causal=False),
    "attention.forward-causal": partial(_forward, causal=True),
    "attention.triton-d96": _d96,
    "attention.short-triton": partial(_short, form="triton"),
    "attention.short-auto": partial(_short, form="auto"),
    "attention.rules": _rules,
    "regret.shapes": lambda results: str(len(_regrets(results).last)),
    "regret.auto-p95": partial(_regret, name="of_auto", at=0.95),
    "regret.auto-worst": partial(_regret, name="of_auto", at=1.0),
    "regret.choice-p95": partial(_regret, name="of_the_choice", at=0.95),
    "regret.choice-worst": partial(_regret, name="of_the_choice", at=1.0),
    "regret.fitted-p95": partial(_fitted, at=0.95),
    "regret.fitted-worst": partial(_fitted, at=1.0),
}
