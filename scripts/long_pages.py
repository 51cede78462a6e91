"""Long generated pages: the answers of their sections on top, long tables split by topic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stepscope.report.format import counted

LONG_PAGE = 140
"""Lines of tables from which a page opens with a summary."""
LONG_TABLE = 25
"""Rows above which a table is split."""
_LEAST_ROWS = 5
"""Rows of a topic, on average."""
_CELL = re.compile(r"(?<!\\)\|")
_LONGEST_ANSWER = 240


class _Rows(NamedTuple):
    """A table in Markdown."""

    titles: list[str]
    alignment: list[str]
    rows: list[list[str]]


def walkable(page: str) -> str:
    """The page with its long tables split by topic and, if it is long, with a summary on top."""
    parts = page.rstrip("\n").split("\n\n")
    rows = sum(part.count("\n") + 1 for part in parts if part.startswith("|"))
    split = [piece for part in parts for piece in _split(part)]
    if rows >= LONG_PAGE:
        # After the title and the origin of the page.
        split.insert(2, _summary(split))
    return "\n\n".join(split) + "\n"


def _summary(parts: Sequence[str]) -> str:
    """A line for each section of the first two levels: its link, and its first finding."""
    lines, taken = [], dict[str, int]()
    for index, part in enumerate(parts):
        heading = re.fullmatch(r"(###?) (.+)", part)
        if heading is None:
            continue
        level, title = len(heading[1]), heading[2]
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = taken[slug] = taken.get(slug, -1) + 1
        link = f"[{title}](#{slug}{f'-{number}' if number else ''})"
        answer = _answer(parts[index + 1 :])
        lines.append(f"{'  ' * (level - 2)}- {link}{f': {answer}' if answer else ''}")
    return "\n".join(lines)


def _answer(following: Sequence[str]) -> str:
    """The first sentence of the first finding before the next heading; empty if there is none, or
    if it is long."""
    for part in following:
        if part.startswith("#"):
            break
        if part.startswith("- "):
            first, *_ = re.split(r"(?<=\.)\s", part.removeprefix("- "), maxsplit=1)
            return first if len(first) <= _LONGEST_ANSWER else ""
    return ""


def _split(part: str) -> Iterator[str]:
    """A table of many rows as one folded table for each topic, everything else unchanged."""
    table = _parsed(part) if part.startswith("|") else None
    column = _topic(table) if table is not None and len(table.rows) > LONG_TABLE else None
    if table is None or column is None:
        yield part
        return
    topics: dict[str, list[list[str]]] = {}
    for row in table.rows:
        topics.setdefault(row[column], []).append(row)
    for topic, rows in topics.items():
        name = f"{table.titles[column]}: {topic}".replace("\\_", "_")
        yield f"<details><summary>{name}, {counted(len(rows), 'row')}</summary>"
        yield "\n".join(
            "| " + " | ".join(cell for index, cell in enumerate(row) if index != column) + " |"
            for row in (table.titles, table.alignment, *rows)
        )
        yield "</details>"


def _topic(table: _Rows) -> int | None:
    """The first column of text whose values divide the rows into a few groups."""
    for column, alignment in enumerate(table.alignment):
        if alignment.endswith(":"):
            continue
        sizes: dict[str, int] = {}
        for row in table.rows:
            sizes[row[column]] = sizes.get(row[column], 0) + 1
        few = 2 <= len(sizes) <= len(table.rows) / _LEAST_ROWS
        if few and max(sizes.values()) <= max(LONG_TABLE, 0.7 * len(table.rows)):
            return column
    return None


def _parsed(text: str) -> _Rows | None:
    rows = [
        [cell.strip() for cell in _CELL.split(line.strip())[1:-1]] for line in text.splitlines()
    ]
    if len(rows) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return None
    return _Rows(rows[0], rows[1], rows[2:])
