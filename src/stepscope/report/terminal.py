"""Print tables and findings to a terminal of any width, or to a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.report.blocks import Column, Figure, Finding, Flame, Section, Table, Timeline
from stepscope.report.format import cell_text, header
from stepscope.report.text import is_numeric
from stepscope.report.wrapping import wrapped, wrapped_code

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

_TONES = {"good": ("✓", "green"), "info": ("•", "cyan"), "warn": ("!", "yellow")}
_GAP = 2
_LEAD = 2 / 3
"""Maximum share of the width for the repeated key columns."""
_NARROWEST_KEY = 20
_KEY_LINES = 4
"""Most lines of a key that every part of a table repeats; with longer ones, rows are numbered."""
_MAX_LINES = 24
"""Most lines of a cell; the page has all of it."""
_WIDEST_WORD = 28
"""Minimum width of a text column (unless all texts are shorter) before the table is split; extra
width is distributed."""
_LINES_OF_PROSE = 4
_BESIDE_PROSE = 24
"""A text of more lines gets a wider column, up to the width of the console less this."""


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; one that is wider than the console is split into parts that repeat the key
    columns, without the columns that are the same in every row."""
    console = console or _console()
    if table.title:
        console.print(_text(table.title, "bold"))
    texts, widths = _measured(table, console.width)
    same: list[str] = []
    if not _fits(widths, console.width):
        table, same = _without_constants(table)
        texts, widths = _measured(table, console.width)
    keys = _keys(table)
    if not _fits(widths, console.width):
        folding = [key for key in keys if _is_text(table, key)]
        widths = _narrowed(widths, folding, keys, console.width)
        if _must_number(table, texts, widths, keys, console.width):
            table, keys = _numbered(table), [0]
            texts, widths = _measured(table, console.width)
    wanted = _wanted(table, texts)
    for number, part in enumerate(_parts(widths, keys, console.width)):
        if number:
            console.print()
        least, most = ([sizes[index] for index in part] for sizes in (widths, wanted))
        least = _shrunk(least, [_is_text(table, index) for index in part], console.width)
        console.print(_grid(table, texts, part, _spread(least, most, console.width)))
    if same:
        console.print(_text(f"In all rows: {', '.join(same)}.", "dim"))
    if table.caption:
        console.print(_text(table.caption, "dim"))


def print_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    from rich.table import Table as Grid

    console = console or _console()
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        sign, color = _TONES[finding.tone]
        lines = wrapped(_visible(finding.sentence), max(1, console.width - len(f"{sign} ")))
        grid.add_row(_text(sign, f"bold {color}"), _text("\n".join(lines), lines=True))
    console.print(grid)


def print_sections(sections: Iterable[Section], console: Console | None = None) -> None:
    """Print every section with its question, findings and tables; of figures only the title."""
    console = console or _console()
    for section in sections:
        _print_rule(section.title, console)
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


def _print_rule(title: str, console: Console) -> None:
    """The title of a section within a line; above it if it is too long, as rich would cut it."""
    from rich.cells import cell_len

    if cell_len(title) + 2 > console.width:
        console.print(_text(title, "bold"))
        title = ""
    console.rule(_text(title, "bold"), align="left")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _text(text: str, style: str = "", *, lines: bool = False) -> Text:
    """Literal text, without markup and without control sequences from the data; `lines` keeps its
    line breaks."""
    from rich.text import Text

    return Text(_visible(text, lines=lines), style=style, overflow="fold")


def _visible(text: str, *, lines: bool = False) -> str:
    kept = "\n" if lines else ""
    return "".join(letter if letter.isprintable() or letter in kept else " " for letter in text)


def _measured(table: Table, console_width: int) -> tuple[list[list[str]], list[int]]:
    """The texts of the cells, and the minimum width of each column."""
    texts = [
        [
            _visible(cell_text(cell, column), lines=column.kind == "code")
            for cell, column in zip(row, table.columns, strict=True)
        ]
        for row in table.rows
    ]
    widest = max(_WIDEST_WORD, console_width - _BESIDE_PROSE)
    return texts, [_width(table, texts, index, widest) for index in range(len(table.columns))]


def _fits(widths: Sequence[int], console_width: int) -> bool:
    return sum(widths) + _GAP * len(widths) <= console_width


def _lead(widths: Sequence[int], keys: Sequence[int]) -> int:
    return sum(widths[key] + _GAP for key in keys)


def _width(table: Table, texts: list[list[str]], index: int, widest: int) -> int:
    """Minimum width of a column: numbers are never folded, texts may be, in a few lines."""
    from rich.cells import cell_len

    words = [(word, _WIDEST_WORD) for word in header(table.columns[index]).split()]
    for row, text in zip(table.rows, texts, strict=True):
        length = max(map(cell_len, text[index].split("\n")))
        limit = length
        if isinstance(row[index], str):
            limit = max(_WIDEST_WORD, length // _LINES_OF_PROSE)
            if table.columns[index].kind == "code":
                limit = max(limit, *map(cell_len, text[index].split()), 1)
            limit = min(limit, widest)
        words.append((text[index], min(limit, length)))
    return max((min(cell_len(word), limit) for word, limit in words), default=1)


def _without_constants(table: Table) -> tuple[Table, list[str]]:
    """The table without columns that are empty or the same in every row, and what these say."""
    kept, same = [], []
    for index, column in enumerate(table.columns):
        cells = {row[index] for row in table.rows}
        if index and cells <= {None, ""}:
            continue
        measured = column.kind not in ("text", "code", "count")
        if index == 0 or measured or len(cells) > 1 or len(table.rows) < 2:
            kept.append(index)
        else:
            same.append(f"{column.title} {cell_text(cells.pop(), column)}")
    return _columns(table, kept), same


def _columns(table: Table, kept: Sequence[int]) -> Table:
    return msgspec.structs.replace(
        table,
        columns=tuple(table.columns[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
    )


def _numbered(table: Table) -> Table:
    """The table with the number of each row as its key, for keys that are too wide to repeat."""
    return msgspec.structs.replace(
        table,
        columns=(Column(title="#", kind="count"), *table.columns),
        rows=tuple((number, *row) for number, row in enumerate(table.rows, start=1)),
    )


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
    return table.columns[index].kind in ("text", "code")


def _must_number(
    table: Table,
    texts: list[list[str]],
    widths: Sequence[int],
    keys: Sequence[int],
    console_width: int,
) -> bool:
    """True if the key columns are too wide or high to be repeated, or leave too little space for
    a long text beside them."""
    lead = _lead(widths, keys)
    if lead > console_width * _LEAD:
        return True
    beside = console_width - lead - _GAP
    return any(
        len(wrapped(row[index], widths[index] if index in keys else beside))
        > (_KEY_LINES if index in keys else _MAX_LINES)
        for row in texts
        for index in range(len(widths))
        if index in keys or _is_text(table, index)
    )


def _narrowed(
    widths: Sequence[int], folding: list[int], keys: list[int], console_width: int
) -> list[int]:
    """Reduce the widths of the key columns, if they leave too little space for other columns."""
    narrowed = list(widths)
    while _lead(narrowed, keys) > console_width * _LEAD:
        widest = max(folding, key=lambda key: narrowed[key], default=None)
        if widest is None or narrowed[widest] <= _NARROWEST_KEY:
            return list(widths)
        narrowed[widest] -= 1
    return narrowed


def _parts(widths: Sequence[int], keys: list[int], console_width: int) -> list[list[int]]:
    """Split the columns into as many grids as the width requires, each with the key columns."""
    columns = range(len(widths))
    if _fits(widths, console_width):
        return [list(columns)]
    lead = _lead(widths, keys)
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


def _shrunk(widths: Sequence[int], text: Sequence[bool], console_width: int) -> list[int]:
    """Reduce the widest columns of text until the columns fit: text wraps, numbers do not."""
    shrunk = list(widths)
    while not _fits(shrunk, console_width):
        widest = max(
            (index for index in range(len(shrunk)) if text[index]),
            key=lambda index: shrunk[index],
            default=None,
        )
        if widest is None or shrunk[widest] <= 1:
            break
        shrunk[widest] -= 1
    return shrunk


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


def _grid(
    table: Table,
    texts: list[list[str]],
    part: list[int],
    widths: Sequence[int],
) -> Grid:
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
    cells = []
    for index, width in zip(part, widths, strict=True):
        lines_of = _code_lines if table.columns[index].kind == "code" else _cell_lines
        written = ("\n".join(lines_of(row[index], width)) for row in texts)
        cells.append([_text(text, lines=True) for text in written])
    for row in zip(*cells, strict=True):
        grid.add_row(*row)
    return grid


def _cell_lines(text: str, width: int) -> list[str]:
    """The lines of a cell, without the middle of a very long one."""
    lines = [text] if len(text) <= width else wrapped(text, width)
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines = [*lines[:half], "…", *lines[half + 1 - _MAX_LINES :]]
    return lines


def _code_lines(text: str, width: int) -> list[str]:
    return [part for line in text.split("\n") for part in wrapped_code(line, width)]


def _wanted(table: Table, texts: list[list[str]]) -> list[int]:
    """Width of each column without folding."""
    from rich.cells import cell_len

    columns = zip(map(header, table.columns), *texts, strict=True)
    return [
        max(cell_len(line) for text in column for line in text.split("\n")) for column in columns
    ]
