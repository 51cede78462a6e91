"""Walk-through of a slow training loop: docs/results/walkthrough.md, from `advise --verify`.

A file of records has the inspected steps, then every change that was tried.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from page_parts import bullets, origin, shown

from stepscope.advisor.advise.cases import OF_SCRIPTS
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import advice_given
from stepscope.advisor.advise.outcome import Tried, best_of, first_right
from stepscope.advisor.advise.step import RecordedStep
from stepscope.advisor.advise.view import advice_table, not_tried, trial_blocks
from stepscope.advisor.inspect import STUDY as INSPECTED
from stepscope.analysis.advice.changes import Advice, advise
from stepscope.cli.advice_page import advice_page
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Finding, Table
from stepscope.report.format import bytes_, duration, number, percent
from stepscope.report.html import html_page
from stepscope.report.tables import col, table

EXAMPLES = {
    "slow": "The slow example",
    "nano_gpt": "A loop in the style of nanoGPT",
    "vit": "A vision transformer of torch.nn",
    "tuned": "A step that is already tuned",
}
HTML_PAGES = ("advise-slow_h200", "advise-nano_gpt_h200", "advise-vit_h200")
MACHINES = {"h200": "On one H200", "cpu": "On a CPU, at small sizes"}
_LEDGER = ("inspect-ledger",)
_INTRODUCTION = (
    "`examples/slow.py` is a training loop with everything that makes one slow: eager, float32,"
    " naive attention, an optimizer that loops over tensors in Python, a loss that is read back in"
    " every step, data that is created on the host and copied from pageable memory. This page shows"
    " what `stepscope advise --verify` does with it and with other examples, step by step. It is"
    " generated from records; the files of the examples were not changed."
)


def record_files(results: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield machine, example and file of every recorded walk-through."""
    for machine in MACHINES:
        for example in EXAMPLES:
            path = results / f"advise-{example}_{machine}.jsonl"
            if path.exists():
                yield machine, example, path


def walkthrough_pages(results: Path) -> dict[str, str]:
    """Return paths under docs/results/ and texts."""
    files = list(record_files(results))
    if not files:
        return {}
    parts = ["# From a slow step to a fast one", _INTRODUCTION, *shown([_results(files)])]
    for machine, title in MACHINES.items():
        own = [(example, path) for where, example, path in files if where == machine]
        if own:
            walks = [(example, path.name, read_records(path)) for example, path in own]
            parts += [f"## {title}", *_in_short(*first_advice_right(results, machine))]
            for walk in walks:
                parts += _walk(*walk)
    return {"walkthrough.md": "\n\n".join(parts) + "\n"} | {
        f"pages/{path.stem}.html": _html(read_records(path))
        for _, _, path in files
        if path.stem in HTML_PAGES
    }


def _results(files: Sequence[tuple[str, str, Path]]) -> Table:
    """Return the step before and after the changes that were kept, for each example."""
    walks = [(machine, example, read_records(path)) for machine, example, path in files]
    rows = [(machine, example, best_of(_tried(records))) for machine, example, records in walks]
    return table(
        "walkthrough-results",
        "",
        rows,
        [
            col("example", lambda row: EXAMPLES[row[1]]),
            col("machine", lambda row: row[0].upper()),
            col("changes kept", lambda row: ", ".join(_titles(row[2])) or "none advised"),
            col("before", lambda row: row[2] and row[2].base_ms, unit="ms"),
            col("after", lambda row: row[2] and row[2].base_ms * row[2].ratio.value, unit="ms"),
            col("speedup", lambda row: row[2] and 1 / row[2].ratio.value, unit="×"),
        ],
    )


def _titles(best: Tried | None) -> list[str]:
    return [] if best is None else [one.title for one in best.trial.advice]


def _html(records: Sequence[Record]) -> str:
    base = _base(records)
    return html_page(advice_page(RecordedStep(base), records))


def first_advice_right(results: Path, machine: str) -> tuple[int, int]:
    """Return how often the first advice was right, and of how many, over a machine's examples."""
    walks = [read_records(path) for where, _, path in record_files(results) if where == machine]
    counts = [first_right(_advice(_base(records)), _tried(records)) for records in walks]
    return sum(right for right, _ in counts), sum(counted for _, counted in counts)


def _in_short(right: int, counted: int) -> Iterator[str]:
    if counted:
        yield (
            "Of the first three changes that were advised and tried for each example, the measured"
            f" gain of {right} of {counted} was within a third of the prediction."
        )


def _base(records: Sequence[Record]) -> Record:
    return next(record for record in records if record.study == INSPECTED.name)


def _tried(records: Sequence[Record]) -> list[Tried]:
    return [Tried(record) for record in records if record.study == TRIALS]


def _advice(base: Record) -> Sequence[Advice]:
    given = advice_given(base)
    return advise(facts_of(base)) if given is None else given


def _walk(example: str, name: str, records: Sequence[Record]) -> Iterator[str]:
    base, tried = _base(records), _tried(records)
    facts, advice = facts_of(base), _advice(base)
    command = shlex.join([f"examples/{base.config['script']}", *base.config["arguments"]])
    yield f"### {EXAMPLES[example]}"
    yield f"```sh\nstepscope advise --verify {command}\n```"
    yield f"Recorded in {origin(name, records)}"
    if (stem := Path(name).stem) in HTML_PAGES:
        yield f"The page it wrote, to open in a browser: `docs/results/pages/{stem}.html`."
    yield "#### The first page"
    yield (
        f"A step takes {duration(facts.step_ms)} and {bytes_(facts.peak_bytes)} at its peak."
        " Findings for the unchanged script (`stepscope inspect` prints the same):"
    )
    blocks = INSPECTED.view([base])
    yield bullets(blocks)
    yield from shown(_named(blocks, _LEDGER))
    yield "#### Advice"
    if not advice:
        yield "None: no known change is predicted to gain 3 % of the step or more."
        return
    yield from shown([advice_table(advice, facts.step_ms)])
    yield "#### Each change alone, then all together"
    judged = trial_blocks([one.record for one in tried])
    yield bullets(judged)
    yield from shown(_named(judged, ("advise-trials",)))
    if left := not_tried(advice, tried, OF_SCRIPTS):
        yield bullets(left)
    yield from shown(_named(judged, ("advise-lines",)))
    yield from _end(tried)


def _named(blocks: Sequence[Block], names: tuple[str, ...]) -> list[Block]:
    return [b for b in blocks if not isinstance(b, Finding) and b.name.startswith(names)]


def _end(tried: Sequence[Tried]) -> Iterator[str]:
    last = best_of(tried)
    if last is None or last.ratio is None:
        return
    titles = " and ".join(_titles(last))
    yield (
        f"With {titles} a step takes {percent(last.ratio.value)} of its original time:"
        f" {number(1 / last.ratio.value, 3)}× the speed"
        f" ({number(1 / last.ratio.high, 3)} to {number(1 / last.ratio.low, 3)}×)."
    )
