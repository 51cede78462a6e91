"""Where a step's joules go, for docs/step.md, from what `benchmarks/energy_by_part.py` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_parts import commits_of

from stepscope.analysis.energy_parts import (
    PARTS,
    PEERS_PRODUCTS,
    PRODUCTS,
    WHOLE,
    Account,
    Taken,
    accounts,
)
from stepscope.report.blocks import Cell, Column, Spread, Table
from stepscope.report.format import duration, number, percent
from stepscope.report.text import markdown

RECORDS = "energy-by-part_h200.jsonl"


def energy_section(results: Path) -> Iterator[str]:
    path = results / RECORDS
    if not path.exists():
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found, here = accounts(lines), lines[0]
    yield "## Where the joules go"
    yield (
        f"`python benchmarks/energy_by_part.py --out results/{RECORDS}` on {here['device']}, torch"
        f" {here['torch']}, {commits_of(line['commit'] for line in lines)}: each part of our step"
        " on its own, as a graph that is replayed without a pause, and the whole step."
    )
    said = [text for account in found for text in _findings(account)]
    if said:
        yield "\n".join(f"- {text}" for text in said)
    yield markdown(_table(found, lines)).strip()


def _findings(account: Account) -> Iterator[str]:
    whole, total, needed = account.taken.get(WHOLE), account.all_parts, account.needed
    if whole is None or total is None or needed is None:
        return
    shares = ", ".join(
        f"{part} {percent(account.taken[part].joules / whole.joules)}" for part in PARTS
    )
    text = f"{account.race}: of the {number(whole.joules, 3)} J of a step: {shares}."
    text += f" Together they take {number(total.joules, 3)} J."
    at_limit = account.lasts_ms(needed.joules)
    if at_limit is not None:
        text += (
            f" With {needed.part} left it would be {number(needed.joules, 3)} J, and not less than"
            f" {duration(at_limit)} at {number(account.limit_w or 0.0, 3)} W, where the step took"
            f" {duration(whole.ms)}."
        )
    peers = account.taken.get(PEERS_PRODUCTS)
    if peers is not None:
        ratio = peers.joules / account.taken[PRODUCTS].joules
        text += f" The peer's form of the products takes {number(ratio, 3)} times the energy."
    yield text


def _table(found: Sequence[Account], lines: Sequence[dict[str, Any]]) -> Table:
    forms: dict[str, dict[str, None]] = {}
    for line in lines:
        forms.setdefault(line["form"], {})[line["race"]] = None
    told = "; ".join(f"{form} ({', '.join(races)})" for form, races in forms.items())
    scaled = dict.fromkeys(
        f"{line['race']} is scaled up from {line['layers']} of {line['of_layers']} blocks."
        for line in lines
        if line["layers"] != line["of_layers"]
    )
    return Table(
        name="energy-by-part",
        title="The parts of a step, each on its own",
        columns=(
            Column(title="case"),
            Column(title="part"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="energy", kind="number", unit="J"),
            Column(title="power", kind="number", unit="W"),
            Column(title="SM clock", kind="number", unit="MHz"),
            Column(title="of the step", kind="percent", hint="of its joules"),
            Column(title="rate", kind="rate", unit="FLOP/s"),
        ),
        rows=tuple(row for account in found for row in _rows(account)),
        caption=" ".join((
            "By the device's own counter, ± one move of it. Other passes: norms with their sums,"
            " rotations, SwiGLU. The loss of each row and the embedding are in no part. The peer's"
            " form: every weight a product of its own, casts of weights and of their gradients with"
            " them. Parts run one after the other here; in the step AdamW runs beside products, and"
            " a pass may find its input in the cache. A part below the power cap keeps a higher"
            " clock than the step has, which costs it energy.",
            f"The step: {told}.",
            *scaled,
        )),
    )  # fmt: skip


def _rows(account: Account) -> Iterator[tuple[Cell, ...]]:
    for row in account.rows():
        yield (
            account.race, row.part, row.ms, _energy(row), row.watts, row.clock_mhz,
            account.of_the_step(row.joules), row.rate,
        )  # fmt: skip
    for part, why in account.lost.items():
        yield (account.race, part, why, *[None] * 5)


def _energy(row: Taken) -> Cell:
    if row.resolution is None:
        return row.joules
    return Spread(value=row.joules, plus_minus=row.resolution)
