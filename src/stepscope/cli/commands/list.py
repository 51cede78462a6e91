"""`stepscope list`: studies, presets, sizes, dtypes, attentions and stored runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import tyro

from stepscope.attention.registry import IMPLEMENTATIONS
from stepscope.cli.common import StoreOptions, existing_store, json_line, parse
from stepscope.model import cost
from stepscope.model.config import PRECISIONS
from stepscope.model.sizes import SIZES
from stepscope.records.schema import Run
from stepscope.report.blocks import Cell, Column, Table
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
            table.name: [
                dict(zip((column.title for column in table.columns), row, strict=True))
                for row in table.rows
            ]
            for table in tables
        }
        print(json_line(msgspec.to_builtins(facts)))
        return 0
    from stepscope.report.terminal import print_table

    for table in tables:
        print_table(table)
        print()
    return 0


def _tables(options: ListOptions) -> Iterator[Table]:
    yield Table(
        name="studies",
        title="Studies: stepscope run NAME",
        columns=(Column(title="name"), Column(title="question")),
        rows=tuple((s.name, s.question) for s in all_studies().values()),
    )
    yield Table(
        name="presets",
        title="Presets: stepscope run --preset NAME",
        columns=(Column(title="name"), Column(title="what")),
        rows=tuple(PRESETS.items()),
    )
    fields = ("d_model", "d_ff", "n_layers", "n_heads", "vocab")
    yield Table(
        name="sizes",
        title="Sizes: --size NAME --table YEAR",
        columns=(
            Column(title="table"),
            Column(title="name"),
            *(Column(title=field, kind="count") for field in fields),
            Column(title="parameters", kind="count"),
        ),
        rows=tuple(
            (year, name, *(getattr(size, f) for f in fields), cost.parameters(size).total)
            for year, sizes in SIZES.items()
            for name, size in sizes.items()
        ),
    )
    yield Table(
        name="dtypes",
        title="Dtypes: --dtype NAME",
        columns=(Column(title="name"), Column(title="what")),
        rows=tuple((entry.name, entry.help) for entry in PRECISIONS.values()),
    )
    yield Table(
        name="attentions",
        title="Attention implementations: --attention NAME",
        columns=(Column(title="name"), Column(title="what")),
        rows=tuple((entry.name, entry.description) for entry in IMPLEMENTATIONS.values()),
    )
    if options.what == "runs" or (options.what == "all" and options.store.exists()):
        with existing_store(options) as store:
            rows = tuple(_run_row(run, len(store.finished(run.id))) for run in store.runs())
        yield Table(
            name="runs",
            title=f"Runs in {options.store}",
            columns=(
                Column(title="run"),
                Column(title="created"),
                Column(title="done", kind="count"),
                Column(title="cases", kind="count"),
                Column(title="command", kind="code"),
                Column(title="resume with", kind="code"),
            ),
            rows=rows,
        )


def _run_row(run: Run, done: int) -> tuple[Cell, ...]:
    # Results may have added cases: `advise --verify` plans trials as it goes.
    cases = max(run.cases, done)
    command = run.command.replace(" --resume", "")
    return run.id, run.created[:19], done, cases, command, run.command if done < cases else ""
