"""The H200 table of README.md, from the records: the lines between two comments in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from stepscope.studies.views.builders import ratio_cell

BEGIN, END = "<!-- one H200: made by scripts/make_docs.py -->", "<!-- until here -->"
VERDICT_BEGIN = "<!-- verdict: made by scripts/make_docs.py -->"
VERDICT_END = "<!-- until here: verdict -->"
_PEERS = {"sdpa_flash": "torch's FlashAttention-2", "sdpa_cudnn": "cuDNN"}

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
            Column(title="interleaved", kind="number"),
        ),
        rows=(*_steps(results), *_attention(results), *_advised(results)),
    )
    right, counted = first_advice_right(results, "h200")
    return (
        f"{markdown(table).strip()}\n\n"
        "Training steps run back to back, as in training, against the fastest variant of"
        " torch.compile that was tried ([all of them](docs/step.md)); interleaved: single samples"
        " in alternation, each from an idle device. Brackets: 95 % interval (99 % in the last row)."
        f" {right} of {counted} first pieces of advice for the examples gained within a third of"
        " the prediction ([walkthrough](docs/walkthrough.md))."
    )


def _steps(results: Path) -> Iterator[Row]:
    for race in races(STEP.results(read_records(results / "step_h200.jsonl"))):
        lead, ratio, share = race.lead(), race.ratio(), race.mfu()
        if lead is not None and ratio is not None:
            mfu = f", {percent(share)} MFU" if share is not None else ""
            yield (
                _named(race),
                f"{duration(lead.ms)}{mfu}",
                f"torch.compile, {duration(lead.baseline_ms)}",
                lead_cell(lead),
                ratio_cell(ratio),
            )


def _named(race: StepRace) -> str:
    spec = race.spec
    return f"training step of {spec.size}, context {spec.context:,}, batch {spec.batch}"


def _attention(results: Path) -> Iterator[Row]:
    """Means over shapes with several heads."""
    blocks = FLASH.view(read_records(results / "flash-race_h200.jsonl"))
    (table,) = (b for b in blocks if isinstance(b, Table) and b.name == "flash-speed")
    for against, shape, measured, *_ in table.rows:
        if against in _PEERS and str(shape).startswith("mean of"):
            what = f"attention, causal, forward and backward, {shape} shapes"
            yield what, "Triton kernels", _PEERS[str(against)], None, measured


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
            None,
            Interval(value=1 / ratio.value, low=1 / ratio.high, high=1 / ratio.low),
        )
