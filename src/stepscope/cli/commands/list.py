"""`stepscope list`: studies, presets, sizes, dtypes, attentions and stored runs."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
import tyro

from stepscope.attention.registry import IMPLEMENTATIONS
from stepscope.cli.common import StoreOptions, existing_store, json_line, parse
from stepscope.model import cost
from stepscope.model.config import PRECISIONS
from stepscope.model.sizes import SIZES
from stepscope.report.blocks import Table
from stepscope.report.tables import col, cols, table
from stepscope.studies.presets import PRESETS
from stepscope.studies.registry import all_studies

What = Literal["all", "studies", "presets", "sizes", "dtypes", "attentions", "runs"]


class ListOptions(StoreOptions, frozen=True, kw_only=True):
    what: Annotated[What, tyro.conf.Positional] = "all"
    """List to print."""
    json: bool = False
    """Print one line of JSON instead of tables."""


def main(words: list[str]) -> int:
    options = parse(
        ListOptions,
        words,
        "list",
        "List studies, presets, model sizes, dtypes, attentions, and the runs in the store.",
        ("stepscope list", "stepscope list runs", "stepscope list sizes --json"),
    )
    tables = [t for t in _tables(options) if options.what in ("all", t.name)]
    if options.json:
        facts: dict[str, Any] = {
            each.name: [
                dict(zip((column.title for column in each.columns), row, strict=True))
                for row in each.rows
            ]
            for each in tables
        }
        print(json_line(msgspec.to_builtins(facts)))
        return 0
    from stepscope.report.terminal import print_table

    for each in tables:
        print_table(each)
        print()
    return 0


def _tables(options: ListOptions) -> Iterator[Table]:
    name, what = col("name", itemgetter(0)), col("what", itemgetter(1))
    questions = [(one.name, one.question) for one in all_studies().values()]
    question = col("question", itemgetter(1))
    yield table("studies", "Studies: stepscope run NAME", questions, [name, question])
    yield table("presets", "Presets: stepscope run --preset NAME", PRESETS.items(), [name, what])
    yield table(
        "sizes",
        "Sizes: --size NAME --table YEAR",
        [(year, name, size) for year, sizes in SIZES.items() for name, size in sizes.items()],
        [
            col("table", itemgetter(0)),
            col("name", itemgetter(1)),
            *cols(
                ("d_model", "d_ff", "n_layers", "n_heads", "vocab"),
                lambda row, field: getattr(row[2], field),
                "count",
            ),
            col("parameters", lambda row: cost.parameters(row[2]).total, "count"),
        ],
    )
    dtypes = [(entry.name, entry.help) for entry in PRECISIONS.values()]
    yield table("dtypes", "Dtypes: --dtype NAME", dtypes, [name, what])
    attentions = [(entry.name, entry.description) for entry in IMPLEMENTATIONS.values()]
    title = "Attention implementations: --attention NAME"
    yield table("attentions", title, attentions, [name, what])
    if options.what == "runs" or (options.what == "all" and options.store.exists()):
        with existing_store(options) as store:
            # Results may have added cases: `advise --verify` plans trials as it goes.
            runs = [(run, len(store.finished(run.id))) for run in store.runs()]
        yield table(
            "runs",
            f"Runs in {options.store}",
            runs,
            [
                col("run", lambda row: row[0].id),
                col("created", lambda row: row[0].created[:19]),
                col("done", itemgetter(1), "count"),
                col("cases", lambda row: max(row[0].cases, row[1]), "count"),
                col("command", lambda row: row[0].command.replace(" --resume", ""), "code"),
                col(
                    "resume with",
                    lambda row: row[0].command if row[1] < row[0].cases else "",
                    "code",
                ),
            ],
        )
