"""Our kernels alone, for docs/step.md, from what `benchmarks/fused_pieces.py` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_parts import commits_of

from stepscope.records.stats import Ratio, paired_ratio, summarize
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.text import markdown

RECORDS = "pieces_h200.jsonl"
_OURS, _COMPILED = "ours", "compiled"

Line = dict[str, Any]

_KEPT_FOR = {
    "embedding": "its gradient is added up in a fixed order, so its bits repeat, where the compiled"
    " one adds atomically; without a compiler it takes the place of torch's own.",
    "swiglu": "the joined feed-forward runs it.",
}
"""Why a kernel stays that is not everywhere faster than what the compiler makes."""


def pieces_section(results: Path) -> Iterator[str]:
    path = results / RECORDS
    if not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    races: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        races.setdefault((line["piece"], line["shape"]), []).append(line)
    here = lines[0]
    yield "## Each piece alone"
    yield (
        f"`python benchmarks/fused_pieces.py --out results/{RECORDS}` on {here['device']}, torch"
        f" {here['torch']}, {commits_of(line['commit'] for line in lines)}: forward and backward"
        " together, all ways in turns, the device's time alone."
    )
    yield "\n".join(f"- {said}" for said in _findings(list(races.values())))
    yield markdown(_table(list(races.values()))).strip()


def _over_ours(race: Sequence[Line], way: str) -> Ratio | None:
    samples = {line["way"]: line["ms"] for line in race if "ms" in line}
    if _OURS not in samples or way not in samples:
        return None
    return paired_ratio(samples[_OURS], samples[way])


def _findings(races: Sequence[Sequence[Line]]) -> Iterator[str]:
    """What is kept by hand has to be faster than what the compiler makes."""
    for piece in dict.fromkeys(race[0]["piece"] for race in races):
        found = {
            race[0]["shape"]: ratio
            for race in races
            if race[0]["piece"] == piece and (ratio := _over_ours(race, _COMPILED)) is not None
        }
        if found:
            told = ", ".join(f"{ratio.value:.3g} ({shape})" for shape, ratio in found.items())
            slower = any(ratio.low <= 1 for ratio in found.values())
            why = f" It stays: {_KEPT_FOR[piece]}" if slower and piece in _KEPT_FOR else ""
            yield f"{piece}: compiled, it takes {told} times as long as ours.{why}"


def _table(races: Sequence[Sequence[Line]]) -> Table:
    return Table(
        name="pieces",
        title="Our kernels against eager and torch.compile",
        columns=(
            Column(title="piece"),
            Column(title="shape"),
            Column(title="way"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="host", kind="number", unit="ms", hint="until it had issued it"),
            Column(title="over ours", kind="number", unit="×"),
            Column(title="peak memory", kind="bytes"),
        ),
        rows=tuple(_row(race, line) for race in races for line in race),
        caption="Over ours: the median of the rounds' ratios with its 99 % interval; above 1, ours"
        " is faster. Where the host takes more than 20 ms, the time may be the host's. Peak memory:"
        " beyond the inputs; ours has 16-bit copies of weights in it, which the optimizer writes"
        " (adamw, ours with copies).",
    )


def _row(race: Sequence[Line], line: Line) -> tuple[Cell, ...]:
    named = (line["piece"], line["shape"], line["way"])
    if "lost" in line:
        return (*named, line["lost"], None, None, None)
    ratio = _over_ours(race, line["way"])
    over = None if ratio is None else Interval(value=ratio.value, low=ratio.low, high=ratio.high)
    time = summarize(line["ms"]).median
    return (*named, time, line["host_ms"], over, line["peak_bytes"])
