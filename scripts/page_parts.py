"""Helpers of the generated pages: origin of records, tables and figures as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Figure, Finding, Flame, Table, Timeline
from stepscope.report.lanes import lanes_svg
from stepscope.report.plots import svg
from stepscope.report.svg import standalone_svg
from stepscope.report.text import markdown

FIGURES = "figures"
LONG = 60
END = "<!-- until here -->"
"""Comment after a generated part of a page."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a benchmark, one JSON object in each line; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def replaced(page: str, begin: str, text: str) -> str:
    """Return the page with the lines between a comment and the next `END` replaced."""
    before, found, rest = page.partition(begin)
    if not found:
        raise ValueError(f"the page has no comment {begin}")
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n{text}\n{END}{after}"


def origin(name: str, records: Sequence[Record]) -> str:
    here = records[0].environment
    versions = {
        "driver": here.driver,
        "torch": here.torch,
        "Triton": here.triton,
        "cuDNN": here.cudnn,
    }
    known = ", ".join(f"{tool} {version}" for tool, version in versions.items() if version)
    return (
        f"`results/{name}`, {len(records)} record{'s' * (len(records) != 1)}, {here.device_name},"
        f" {known}, {commits_of(str(record.environment.commit) for record in records)}."
    )


def commits_of(commits: Iterable[str]) -> str:
    """List the distinct commits; parts of a file may have been recorded at different times."""
    distinct = dict.fromkeys(commit[:12] for commit in commits)
    return f"commit{'s' * (len(distinct) != 1)} " + ", ".join(f"`{commit}`" for commit in distinct)


def figure_files(blocks: Iterable[Block]) -> dict[str, str]:
    """Return path under docs/results/ and text of every figure."""
    return {
        f"{FIGURES}/{block.name}.svg": standalone_svg(_drawn(block))
        for block in blocks
        if isinstance(block, Figure | Timeline)
    }


def _drawn(block: Figure | Timeline) -> str:
    if isinstance(block, Timeline):
        return lanes_svg(block, prefix=block.name)
    return svg(block, prefix=block.name)


def readable(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield what a page shows. Tables of `LONG` rows and flame graphs are in the page that
    `stepscope report` makes of the records."""
    for block in blocks:
        match block:
            case Flame():
                continue
            case Table() if len(block.rows) >= LONG:
                continue
            case _:
                yield block


def bullets(blocks: Iterable[Block]) -> str:
    return "\n".join(f"- {block.sentence}" for block in blocks if isinstance(block, Finding))


def tables(blocks: Iterable[Block]) -> Iterator[str]:
    return (markdown(block).strip() for block in readable(blocks) if isinstance(block, Table))


def shown(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield tables and figures; a caption that repeats is printed once."""
    printed: set[str] = set()
    for block in readable(blocks):
        if isinstance(block, Finding):
            continue
        if block.caption in printed:
            block = msgspec.structs.replace(block, caption="")
        printed.add(block.caption)
        if isinstance(block, Table):
            yield markdown(block).strip()
        else:
            yield f"![{block.title}]({FIGURES}/{block.name}.svg)"
            yield from filter(None, (block.caption,))
