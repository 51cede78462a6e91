"""The H200 table of README.md, from the records: the lines between two comments in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from acceleration_page import SPEEDS, speeds_of
from attention_sections import mean_of_auto
from fp8_page import STEPS, steps_of
from walkthrough_page import first_advice_right

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.outcome import Tried, best_of
from stepscope.advisor.verdict import program_verdict
from stepscope.records.jsonl import read_records
from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import duration, percent
from stepscope.report.text import markdown
from stepscope.report.verdict import verdict_lines
from stepscope.studies.flash import STUDY as FLASH
from stepscope.studies.step import STUDY as STEP
from stepscope.studies.step.rows import StepRace, races
from stepscope.studies.step.view import lead_cell

BEGIN, END = "<!-- one H200: made by scripts/make_docs.py -->", "<!-- until here -->"
VERDICT_BEGIN = "<!-- verdict: made by scripts/make_docs.py -->"
VERDICT_END = "<!-- until here: verdict -->"
_FP8_MODELS = ("Hugging Face Llama 1B", "TransformerLM 2.7b")
_STEP_SIZES = ("small", "8b")
"""Sizes of the built-in model whose steps are shown; docs/step.md has all."""

Row = tuple[Cell, ...]


def with_figures(readme: str, results: Path) -> str:
    """Return the page with the lines between the comments regenerated."""
    return _between(
        _between(readme, BEGIN, END, _figures(results)),
        VERDICT_BEGIN, VERDICT_END, _verdict(results),
    )  # fmt: skip


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


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
    right, counted = first_advice_right(results, "h200")
    return (
        f"{markdown(table).strip()}\n\n"
        "Training steps (batch × tokens) run back to back; attention is forward and backward. The"
        " baseline is the fastest variant that was tried: [accelerate](docs/accelerate.md),"
        " [FP8](docs/precision.md), [steps](docs/step.md), [attention](docs/flash.md). Brackets:"
        f" 95 % interval (99 % in the last row). {right} of {counted} first changes advised for the"
        " examples gained within a third of the prediction ([walkthrough](docs/walkthrough.md))."
    )


def _against(what: str, ms: float, baseline: str, baseline_ms: float) -> Row:
    return what, duration(ms), f"{baseline}, {duration(baseline_ms)}", baseline_ms / ms


def _accelerated(results: Path) -> Iterator[Row]:
    lines = [json.loads(line) for line in (results / SPEEDS).read_text().splitlines()]
    for one in speeds_of(lines):
        if not one.model.startswith("TransformerLM"):
            yield _against(f"{one.model}, bf16", one.ms, one.baseline, one.baseline_ms)


def _in_fp8(results: Path) -> Iterator[Row]:
    """The fastest form of each model against the fastest baseline in the same process."""
    lines = [json.loads(line) for line in (results / STEPS).read_text().splitlines()]
    for model in _FP8_MODELS:
        steps = [step for step in steps_of(lines) if step.row == model and step.peer is not None]
        fastest = min(steps, key=lambda step: step.ms)
        assert fastest.peer is not None
        peer_ms, form = fastest.peer
        yield _against(f"{model}, 4 × 2048, FP8", fastest.ms, form.replace("-", ", "), peer_ms)


def _steps(results: Path) -> Iterator[Row]:
    for race in races(STEP.results(read_records(results / "step_h200.jsonl"))):
        lead, share = race.lead(), race.mfu()
        if lead is not None and race.spec.size in _STEP_SIZES:
            mfu = f", {percent(share)} MFU" if share is not None else ""
            yield (
                _named(race),
                f"{duration(lead.ms)}{mfu}",
                f"torch.compile, {duration(lead.baseline_ms)}",
                lead_cell(lead),
            )


def _named(race: StepRace) -> str:
    spec = race.spec
    return f"TransformerLM {spec.size}, {spec.batch} × {spec.context}, bf16"


def _attention(results: Path) -> Iterator[Row]:
    """Means over shapes with several heads."""
    mean, count = mean_of_auto(results)
    yield f"attention, causal, mean of {count} shapes", "auto", "cuDNN", mean
    blocks = FLASH.view(read_records(results / "flash-race_h200.jsonl"))
    (table,) = (b for b in blocks if isinstance(b, Table) and b.name == "flash-speed")
    for against, shape, measured, *_ in table.rows:
        if against == "sdpa_flash" and str(shape).startswith("mean of"):
            what = f"attention, causal, {shape} shapes"
            yield what, "Triton kernels", "torch's FlashAttention-2", measured


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
