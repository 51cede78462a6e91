"""Print tables and findings to a terminal of any width, or to a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stepscope.report.blocks import Figure, Finding, Flame, Section, Table, Timeline
from stepscope.report.format import cell_text, header
from stepscope.report.text import is_numeric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

_TONES = {"good": ("✓", "green"), "info": ("•", "cyan"), "warn": ("!", "yellow")}
_GAP = 2
_LEAD = 2 / 3
"""Maximum share of the width for the repeated key columns."""
_NARROWEST_KEY = 14
_WIDEST_WORD = 28
"""Minimum width of a text column (unless all texts are shorter) before the table is split; extra
width is distributed."""


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; one that is wider than the console is split into parts that repeat the key
    columns."""
    console = console or _console()
    texts = [
        [_visible(cell_text(cell, column)) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    widths = [_width(table, texts, index) for index in range(len(table.columns))]
    wanted, keys = _wanted(table, texts), _keys(table)
    if sum(widths) + _GAP * len(widths) > console.width:
        widths = _narrowed(widths, [key for key in keys if _is_text(table, key)], keys, console)
    if table.title:
        console.print(_text(table.title, "bold"))
    for number, part in enumerate(_parts(widths, keys, console.width)):
        if number:
            console.print()
        least, most = ([sizes[index] for index in part] for sizes in (widths, wanted))
        console.print(_grid(table, texts, part, _spread(least, most, console.width)))
    if table.caption:
        console.print(_text(table.caption, "dim"))


def print_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    from rich.table import Table as Grid

    console = console or _console()
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        sign, colour = _TONES[finding.tone]
        grid.add_row(_text(sign, f"bold {colour}"), _text(finding.sentence))
    console.print(grid)


def print_sections(sections: Iterable[Section], console: Console | None = None) -> None:
    """Print every section with its question, findings and tables; of figures only the title."""
    console = console or _console()
    for section in sections:
        console.rule(_text(section.title, "bold"), align="left")
        console.print(_text(section.question, "italic"))
        print_findings([block for block in section.blocks if isinstance(block, Finding)], console)
        for block in section.blocks:
            match block:
                case Table():
                    console.print()
                    print_table(block, console)
                case Figure() | Timeline() | Flame():
                    console.print(_text(f"Figure on the page: {block.title}", "dim"))
        console.print()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _text(text: str, style: str = "") -> Text:
    """Literal text, without markup and without control sequences from the data."""
    from rich.text import Text

    return Text(_visible(text), style=style, overflow="fold")


def _visible(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _width(table: Table, texts: list[list[str]], index: int) -> int:
    """Minimum width of a column: numbers are never folded, long texts may be."""
    from rich.cells import cell_len

    words = [(word, _WIDEST_WORD) for word in header(table.columns[index]).split()]
    words += [
        (text[index], _WIDEST_WORD if isinstance(row[index], str) else cell_len(text[index]))
        for row, text in zip(table.rows, texts, strict=True)
    ]
    return max((min(cell_len(word), limit) for word, limit in words), default=1)


def _keys(table: Table) -> list[int]:
    """The leftmost columns that distinguish the rows; measured values are not keys."""
    keys: list[int] = [0] if table.columns else []
    for index, column in enumerate(table.columns):
        distinct = len({tuple(row[key] for key in keys) for row in table.rows})
        if distinct == len(table.rows):
            break
        if column.kind in ("text", "count"):
            wider = {tuple(row[key] for key in (*keys, index)) for row in table.rows}
            if len(wider) > distinct:
                keys.append(index)
    return keys


def _is_text(table: Table, index: int) -> bool:
    return table.columns[index].kind == "text"


def _narrowed(
    widths: Sequence[int], folding: list[int], keys: list[int], console: Console
) -> list[int]:
    """Reduce the widths of the key columns, if they leave too little space for other columns."""
    narrowed = list(widths)
    while sum(narrowed[key] + _GAP for key in keys) > console.width * _LEAD:
        widest = max(folding, key=lambda key: narrowed[key], default=None)
        if widest is None or narrowed[widest] <= _NARROWEST_KEY:
            return list(widths)
        narrowed[widest] -= 1
    return narrowed


def _parts(widths: Sequence[int], keys: list[int], console_width: int) -> list[list[int]]:
    """Split the columns into as many grids as the width requires, each with the key columns."""
    columns = range(len(widths))
    if sum(widths) + _GAP * len(widths) <= console_width:
        return [list(columns)]
    lead = sum(widths[key] + _GAP for key in keys)
    if lead > console_width * _LEAD:
        keys, lead = keys[:1], sum(widths[key] + _GAP for key in keys[:1])
    parts: list[list[int]] = []
    used = console_width
    for index in columns:
        if index in keys:
            continue
        needed = widths[index] + _GAP
        if not parts or used + needed > console_width:
            parts.append(list(keys))
            used = lead
        parts[-1].append(index)
        used += needed
    return [sorted(part) for part in parts] or [list(keys)]


def _spread(widths: Sequence[int], wanted: Sequence[int], console_width: int) -> list[int]:
    """Distribute the remaining width among the columns that want more."""
    spread = [min(width, console_width) for width in widths]
    left = console_width - sum(spread) - _GAP * len(spread)
    while left > 0 and (short := [i for i, width in enumerate(spread) if width < wanted[i]]):
        share = max(1, left // len(short))
        for index in short:
            more = min(share, wanted[index] - spread[index], left)
            spread[index] += more
            left -= more
    return spread


def _grid(table: Table, texts: list[list[str]], part: list[int], widths: Sequence[int]) -> Grid:
    from rich import box
    from rich.table import Table as Grid

    # The box adds one column between cells, so padding is the rest of the gap.
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for index, width in zip(part, widths, strict=True):
        column = table.columns[index]
        grid.add_column(
            _text(header(column)),
            justify="right" if is_numeric(column) else "left",
            # By default, rich shrinks the widest column first and then crops the last.
            min_width=width,
            max_width=width,
            overflow="fold",
        )
    for row in texts:
        grid.add_row(*(_text(row[index]) for index in part))
    return grid


def _wanted(table: Table, texts: list[list[str]]) -> list[int]:
    """Width of each column without folding."""
    from rich.cells import cell_len

    columns = zip(map(header, table.columns), *texts, strict=True)
    return [max(map(cell_len, column)) for column in columns]
