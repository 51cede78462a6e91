"""Benchmark of fused kernels, for docs/results/step.md, from `benchmarks/fused_pieces.py`."""

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
_STEPSCOPE, _COMPILED = "stepscope", "compiled"

Line = dict[str, Any]

_KEPT_FOR = {
    "embedding": "its gradient is summed in a fixed order, so results are bitwise reproducible,"
    " while the compiled one uses atomic additions.",
    "swiglu": "the fused feed-forward uses it.",
}
"""Reasons to keep a kernel that is not faster than the compiler's for every shape."""


def pieces_section(results: Path) -> Iterator[str]:
    if not (results / RECORDS).exists():
        return
    races = races_of(results)
    lines = [line for race in races for line in race]
    here = lines[0]
    yield "## Each piece alone"
    yield (
        f"`python benchmarks/fused_pieces.py --out results/{RECORDS}` on {here['device']}, torch"
        f" {here['torch']}, {commits_of(line['commit'] for line in lines)}: forward and backward"
        " together, all variants interleaved, device time only."
    )
    yield "\n".join(f"- {text}" for text in _findings(races))
    yield markdown(_table(races)).strip()


def races_of(results: Path) -> list[list[Line]]:
    """Return the lines of each piece and shape."""
    races: dict[tuple[str, str], list[Line]] = {}
    for text in (results / RECORDS).read_text().splitlines():
        line = _with_variant(json.loads(text))
        races.setdefault((line["piece"], line["shape"]), []).append(line)
    return list(races.values())


def _with_variant(line: Line) -> Line:
    """Files of older versions have `way`, with `ours` for Stepscope and `written out` for naive."""
    if "way" not in line:
        return line
    variant = line["way"].replace("ours", _STEPSCOPE).replace("written out", "naive")
    return line | {"variant": variant}


def over_stepscope(race: Sequence[Line], variant: str) -> Ratio | None:
    samples = {line["variant"]: line["ms"] for line in race if "ms" in line}
    if _STEPSCOPE not in samples or variant not in samples:
        return None
    return paired_ratio(samples[_STEPSCOPE], samples[variant])


def _findings(races: Sequence[Sequence[Line]]) -> Iterator[str]:
    """Compare with the compiler: a handwritten kernel should be faster than what it generates."""
    for piece in dict.fromkeys(race[0]["piece"] for race in races):
        ratios = {
            race[0]["shape"]: ratio
            for race in races
            if race[0]["piece"] == piece and (ratio := over_stepscope(race, _COMPILED)) is not None
        }
        if ratios:
            listed = ", ".join(f"{ratio.value:.3g} ({shape})" for shape, ratio in ratios.items())
            slower = any(ratio.low <= 1 for ratio in ratios.values())
            reason = f" Kept because {_KEPT_FOR[piece]}" if slower and piece in _KEPT_FOR else ""
            yield f"{piece}: torch.compile's takes {listed} times as long as Stepscope's.{reason}"


def _table(races: Sequence[Sequence[Line]]) -> Table:
    return Table(
        name="pieces",
        title="Stepscope's kernels against eager and torch.compile",
        columns=(
            Column(title="piece"),
            Column(title="shape"),
            Column(title="variant"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="CPU", kind="number", unit="ms", hint="time to issue the work"),
            Column(title="relative time", kind="number", unit="×"),
            Column(title="peak memory", kind="bytes"),
        ),
        rows=tuple(_row(race, line) for race in races for line in race),
        caption="Relative time: time over Stepscope's, the median of the per-round ratios with its"
        " 99 % interval; above 1 Stepscope is faster. If the CPU takes more than 20 ms, the time"
        " may be CPU-bound. Peak memory: beyond the inputs; Stepscope's includes 16-bit copies of"
        " weights, which the optimizer writes (adamw, stepscope with copies).",
    )


def _row(race: Sequence[Line], line: Line) -> tuple[Cell, ...]:
    named = (line["piece"], line["shape"], line["variant"])
    if "lost" in line:
        return (*named, line["lost"], None, None, None)
    ratio = over_stepscope(race, line["variant"])
    over = None if ratio is None else Interval(value=ratio.value, low=ratio.low, high=ratio.high)
    time = summarize(line["ms"]).median
    return (*named, time, line["host_ms"], over, line["peak_bytes"])
