"""The H200 table of README.md, from the records: the lines between two comments in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from acceleration_page import GRAPHS, speeds_of
from attention_sections import mean_of_auto
from fp8_page import STEPS, steps_of
from page_parts import lines_of, replaced
from step_race import STUDY as STEP
from step_race.rows import races
from step_race.view import lead_cell

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.outcome import Tried, best_of
from stepscope.advisor.verdict import program_verdict
from stepscope.records.jsonl import read_records
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import duration
from stepscope.report.text import markdown
from stepscope.report.verdict import verdict_lines

BEGIN = "<!-- one H200: made by scripts/make_docs.py -->"
VERDICT = "<!-- verdict: made by scripts/make_docs.py -->"
Row = tuple[Cell, ...]
T = TypeVar("T")


def with_figures(readme: str, results: Path) -> str:
    """Return the page with the lines between the comments regenerated."""
    return replaced(replaced(readme, BEGIN, _figures(results)), VERDICT, _verdict(results))


def _verdict(results: Path) -> str:
    """The end of the output of `stepscope advise --verify examples/slow.py` on an H200."""
    verdict = program_verdict(read_records(results / "advise-slow_h200.jsonl"))
    assert verdict is not None
    return "\n".join(("```text", *verdict_lines(verdict), "```"))


def _figures(results: Path) -> str:
    table = Table(
        name="one-h200",
        title="",
        columns=(
            Column(title="on one H200"),
            Column(title="Stepscope"),
            Column(title="baseline"),
            Column(title="speedup", kind="number"),
        ),
        rows=(
            *_accelerated(results),
            *_in_fp8(results),
            *_steps(results),
            *_attention(results),
            *_advised(results),
        ),
    )
    return (
        f"{markdown(table).strip()}\n\n"
        "Training steps (batch × tokens, bf16 or FP8) run back to back; attention is forward and"
        " backward. The baseline is the fastest variant"
        " ([accelerate](docs/accelerate.md), [FP8](docs/results/precision.md),"
        " [steps](docs/results/step.md), [attention](docs/results/flash.md)); last row: the"
        " unchanged script. Brackets: 95 %"
        " interval (last row: 99 %)."
    )


def _against(what: str, ms: float, baseline: str, baseline_ms: float) -> Row:
    return what, duration(ms), f"{baseline}, {duration(baseline_ms)}", baseline_ms / ms


def _accelerated(results: Path) -> Iterator[Row]:
    """The first models, and those with the least and the largest gain."""
    speeds = speeds_of(lines_of(results / GRAPHS))
    extremes = {
        one.model: f" ({which})"
        for which, one in _extremes(speeds, lambda one: one.baseline_ms / one.ms)
    }
    for one in dict.fromkeys((*speeds[:4], *(x for x in speeds if x.model in extremes))):
        name = one.model + extremes.get(one.model, "")
        yield _against(name, one.ms, one.baseline, one.baseline_ms)


def _in_fp8(results: Path) -> Iterator[Row]:
    """The fastest form of each model against the fastest baseline in the same process."""
    lines = lines_of(results / STEPS)
    fastest: dict[str, tuple[float, float, str]] = {}
    for step in steps_of(lines):
        if step.peer is not None and step.ms < fastest.get(step.row, (math.inf,))[0]:
            fastest[step.row] = (step.ms, *step.peer)
    for which, (model, (ms, peer_ms, form)) in _extremes(
        list(fastest.items()), lambda one: one[1][1] / one[1][0]
    ):
        yield _against(f"{model}, 4 × 2048, FP8 ({which})", ms, form.replace("-", ", "), peer_ms)


def _steps(results: Path) -> Iterator[Row]:
    raced = races(STEP.results(read_records(results / "step-race_h200.jsonl")))
    leads = [(race.spec, lead) for race in raced if (lead := race.lead()) is not None]
    for which, (spec, lead) in _extremes(leads, lambda one: one[1].value):
        yield (
            f"TransformerLM {spec.size}, {spec.batch} × {spec.context} ({which})",
            duration(lead.ms),
            f"torch.compile, {duration(lead.baseline_ms)}",
            lead_cell(lead),
        )


def _extremes(rows: Sequence[T], speedup: Callable[[T], float]) -> Iterator[tuple[str, T]]:
    """Yield the rows with the least and the largest speedup, which have all others between them."""
    yield f"least of {len(rows)}", min(rows, key=speedup)
    yield f"largest of {len(rows)}", max(rows, key=speedup)


def _attention(results: Path) -> Iterator[Row]:
    """The mean over shapes with several heads."""
    mean, count = mean_of_auto(results)
    yield f"attention, causal, mean of {count} shapes", "auto", "cuDNN", mean


def _advised(results: Path) -> Iterator[Row]:
    tried = [
        Tried(record)
        for record in read_records(results / "advise-slow_h200.jsonl")
        if record.study == TRIALS
    ]
    best = best_of(tried)
    if best is not None and best.ratio is not None and best.base_ms is not None:
        ratio, base = best.ratio, best.base_ms
        yield (
            "examples/slow.py with the changes that advise --verify kept",
            duration(base * ratio.value),
            f"unchanged, {duration(base)}",
            Interval(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low),
        )
