"""`stepscope import`: add records of another machine to the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from stepscope.cli.common import StoreOptions, json_line, load_file, parse
from stepscope.cli.messages import say
from stepscope.records.jsonl import import_into
from stepscope.records.store import Store
from stepscope.report.format import counted


class ImportOptions(StoreOptions, frozen=True, kw_only=True):
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE [FILE …]")]
    """JSON Lines files of records."""
    json: bool = False
    """Print one line of JSON."""


def main(words: list[str]) -> int:
    options = parse(
        ImportOptions,
        words,
        "import",
        "Add the records of JSON Lines files to the store; records it already has are skipped.",
        ("stepscope import results/h200.jsonl",),
    )
    records = [record for path in options.files for record in load_file(path)]
    with Store(options.store) as store:
        added, skipped = import_into(store, records)
    if options.json:
        print(json_line({"added": added, "skipped": skipped, "store": options.store}))
    else:
        was = "was" if skipped == 1 else "were"
        say(f"{counted(added, 'record')} added to {options.store}, {skipped} {was} already there")
    return 0
