"""Energy of a step by part, for docs/step.md, from the output of `benchmarks/energy_by_part.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_parts import commits_of

from stepscope.report.blocks import Cell, Column, Spread, Table
from stepscope.report.format import duration, number, percent
from stepscope.report.text import markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from energy_parts import (
    BASELINE_MATMULS,
    FULL_STEP,
    GEMMS,
    PARTS,
    Account,
    PartEnergy,
    accounts,
)

RECORDS = "energy-by-part_h200.jsonl"


def energy_section(results: Path) -> Iterator[str]:
    path = results / RECORDS
    if not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ledgers, first = accounts(lines), lines[0]
    yield "## Where the joules go"
    yield (
        f"`python benchmarks/energy_by_part.py --out results/{RECORDS}` on {first['device']}, torch"
        f" {first['torch']}, {commits_of(line['commit'] for line in lines)}: each part of"
        " Stepscope's step separately, as a CUDA graph that is replayed without pauses, and the"
        " full step."
    )
    findings = [text for ledger in ledgers for text in _findings(ledger)]
    if findings:
        yield "\n".join(f"- {text}" for text in findings)
    yield markdown(_table(ledgers, lines)).strip()


def _findings(ledger: Account) -> Iterator[str]:
    step, total, needed = ledger.taken.get(FULL_STEP), ledger.all_parts, ledger.needed
    if step is None or total is None or needed is None:
        return
    shares = ", ".join(
        f"{part} {percent(ledger.taken[part].joules / step.joules)}" for part in PARTS
    )
    text = f"{ledger.race}: of the {number(step.joules, 3)} J of a step: {shares}."
    text += f" The parts add up to {number(total.joules, 3)} J."
    at_limit = ledger.lasts_ms(needed.joules)
    if at_limit is not None:
        text += (
            f" With {needed.part} the step would take {number(needed.joules, 3)} J, at least"
            f" {duration(at_limit)} at {number(ledger.limit_w or 0.0, 3)} W; the step took"
            f" {duration(step.ms)}."
        )
    peers = ledger.taken.get(BASELINE_MATMULS)
    if peers is not None:
        ratio = peers.joules / ledger.taken[GEMMS].joules
        text += f" The baseline's variant of the GEMMs takes {number(ratio, 3)} times the energy."
    yield text


def _table(ledgers: Sequence[Account], lines: Sequence[dict[str, Any]]) -> Table:
    variants: dict[str, dict[str, None]] = {}
    for line in lines:
        variants.setdefault(line["form"], {})[line["race"]] = None
    listed = "; ".join(f"{variant} ({', '.join(races)})" for variant, races in variants.items())
    scaled = dict.fromkeys(
        f"{line['race']} is scaled up from {line['layers']} of {line['of_layers']} blocks."
        for line in lines
        if line["layers"] != line["of_layers"]
    )
    return Table(
        name="energy-by-part",
        title="The parts of a step, measured separately",
        columns=(
            Column(title="case"),
            Column(title="part"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="energy", kind="number", unit="J"),
            Column(title="power", kind="number", unit="W"),
            Column(title="SM clock", kind="number", unit="MHz"),
            Column(title="of the step", kind="percent", hint="share of its energy"),
            Column(title="rate", kind="rate", unit="FLOP/s"),
        ),
        rows=tuple(row for ledger in ledgers for row in _rows(ledger)),
        caption=" ".join(
            (
                "Energy by the device's counter, ± one increment. Other passes: norms with residual"
                " additions, rotary embeddings, SwiGLU. The per-row loss and the embedding are not"
                " in any part. The baseline's variant: a separate GEMM for each weight, including"
                " the casts of weights and their gradients. The parts run one after the other here;"
                " in the step AdamW overlaps with GEMMs, and a pass may find its input in the"
                " cache. A part below the power cap runs at a higher clock than the step, which"
                " costs energy.",
                f"The step: {listed}.",
                *scaled,
            )
        ),
    )


def _rows(ledger: Account) -> Iterator[tuple[Cell, ...]]:
    for row in ledger.rows():
        yield (
            ledger.race,
            row.part,
            row.ms,
            _energy(row),
            row.watts,
            row.clock_mhz,
            ledger.of_the_step(row.joules),
            row.rate,
        )
    for part, reason in ledger.lost.items():
        yield (ledger.race, part, reason, *[None] * 5)


def _energy(row: PartEnergy) -> Cell:
    if row.resolution is None:
        return row.joules
    return Spread(value=row.joules, plus_minus=row.resolution)
