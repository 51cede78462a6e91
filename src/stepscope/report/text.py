"""Write tables and pages as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from stepscope.analysis.verdict import AtMost
from stepscope.errors import printable
from stepscope.report.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Finding,
    Flame,
    Interval,
    Page,
    Spread,
    Table,
    Timeline,
)
from stepscope.report.figure_data import data_table
from stepscope.report.format import cell_text, header
from stepscope.report.verdict import verdict_markdown

MAX_FIGURE_ROWS = 12
"""A figure with more points than this is only named in Markdown, without its data."""

TONES = {"good": "✓", "info": "•", "warn": "⚠"}
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\n")
_RAW_UNITS = {"percent": "fraction", "bytes": "B"}

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#$~&])")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "≤": r"\ensuremath{\leq}",
    "[": "{[}",
    "]": "{]}",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "μ": r"$\mu$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "∞": r"$\infty$",
    "–": "--",
    "−": "$-$",
    "²": r"\textsuperscript{2}",
    "≥": r"\ensuremath{\geq}",
    "′": r"\ensuremath{'}",
    "∗": r"\ensuremath{*}",
    "α": r"\ensuremath{\alpha}",
    "β": r"\ensuremath{\beta}",
    "→": r"\ensuremath{\rightarrow}",
    "⇔": r"\ensuremath{\Leftrightarrow}",
    "√": r"\ensuremath{\surd}",
    "Σ": r"\ensuremath{\Sigma}",
    "…": r"\ldots{}",
    "“": "``",
    "”": "''",
    "₁": r"\textsubscript{1}",
    "₂": r"\textsubscript{2}",
    "₃": r"\textsubscript{3}",
    "ᵀ": r"\textsuperscript{T}",
    "ⁱ": r"\textsuperscript{i}",
    "⁽": r"\textsuperscript{(}",
    "⁾": r"\textsuperscript{)}",
}


def is_numeric(column: Column) -> bool:
    return column.kind not in ("text", "code")


def markdown(table: Table) -> str:
    """Format a pipe table with its title above and its caption below."""
    lines = [f"**{markdown_text(table.title)}**", ""] if table.title else []
    lines += _md_grid(table)
    if table.caption:
        lines += ["", markdown_prose(table.caption)]
    return "\n".join(lines) + "\n"


def markdown_page(page: Page) -> str:
    warning = f"> {TONES['warn']} {markdown_prose(page.banner)}" if page.banner else ""
    answer = verdict_markdown(page.verdict) if page.verdict else ""
    title, subtitle = f"# {markdown_text(page.title)}", markdown_text(page.subtitle)
    parts = [title, subtitle, warning, answer, markdown(page.headline)]
    for section in page.sections:
        parts += [f"## {markdown_text(section.title)}", f"*{markdown_text(section.question)}*"]
        parts += markdown_blocks(section.blocks)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def latex(table: Table) -> str:
    """Format a booktabs `tabular` for \\input into a document."""
    spec = "".join("r" if is_numeric(column) else "l" for column in table.columns)
    lines = [
        f"% {_one_line(table.title)}",
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
        _latex_row([header(column) for column in table.columns]),
        r"\midrule",
        *(_latex_row(row) for row in _texts(table)),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    """Format raw numbers in their base unit; a spread or an interval has separate columns."""
    cells = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    fields = [
        field
        for column, values in zip(table.columns, cells, strict=True)
        for field in _fields(column, values)
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_inert(title) for title, _ in fields])
    writer.writerows(zip(*(values for _, values in fields), strict=True))
    return out.getvalue()


def markdown_blocks(blocks: tuple[Block, ...]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Finding():
                yield f"> {TONES[block.tone]} {markdown_prose(block.sentence)}"
            case Table():
                yield markdown(block)
            case Figure():
                yield _md_figure(block)
            case Timeline() | Flame():
                yield _md_unshown(block)


def _md_figure(figure: Figure) -> str:
    table = data_table(figure)
    if figure.curves and len(table.rows) <= MAX_FIGURE_ROWS:
        return markdown(table)
    return _md_unshown(figure)


def _md_unshown(figure: Figure | Timeline | Flame) -> str:
    caption = f": {markdown_prose(figure.caption)}" if figure.caption else ""
    return f"*Figure, not shown here: {markdown_text(figure.title)}*{caption}"


def _md_grid(table: Table) -> list[str]:
    rules = ["---:" if is_numeric(column) else ":---" for column in table.columns]
    rows = [[markdown_text(header(column)) for column in table.columns], rules]
    rows += [
        [_md_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _md_cell(cell: Cell, column: Column) -> str:
    text = cell_text(cell, column)
    if column.kind == "code" and cell is not None:
        # In a table, `|` ends the cell even inside code.
        safe = text.replace("`", "'").replace("|", r"\|")
        return "<br>".join(f"`{_one_line(line)}`" for line in safe.splitlines())
    # The brackets of an interval do not form a link, but a unit may contain any text.
    return markdown_text(text) if isinstance(cell, str) or column.kind == "rate" else text


def markdown_text(text: str) -> str:
    """Escape text for Markdown and for the HTML inside it."""
    return _MARKDOWN.sub(r"\\\1", _one_line(text))


def markdown_prose(text: str) -> str:
    """Escape text for Markdown, except code in backticks."""
    parts = re.split(r"(`[^`]+`)", _one_line(text))
    return "".join(
        part if index % 2 else _MARKDOWN.sub(r"\\\1", part) for index, part in enumerate(parts)
    )


def _texts(table: Table) -> Iterator[list[str]]:
    for row in table.rows:
        yield [cell_text(cell, column) for cell, column in zip(row, table.columns, strict=True)]


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _latex_row(texts: list[str]) -> str:
    return " & ".join(latex_text(text) for text in texts) + r" \\"


def latex_text(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in _one_line(text))
    return escaped.replace("--", "-{}-")  # A flag: two hyphens would become a dash.


def _fields(column: Column, cells: list[Cell]) -> Iterator[tuple[str, list[object]]]:
    """Columns of the file for one column of the table, with their values."""
    unit = _RAW_UNITS.get(column.kind, column.unit)

    def title(part: str = "") -> str:
        return f"{column.title}{part}" + (f" ({unit})" if unit else "")

    yield title(), [_raw(cell) for cell in cells]
    if any(isinstance(cell, Spread) for cell in cells):
        yield title(" ±"), [cell.plus_minus if isinstance(cell, Spread) else "" for cell in cells]
    if any(isinstance(cell, Interval) for cell in cells):
        yield title(" low"), [cell.low if isinstance(cell, Interval) else "" for cell in cells]
        yield title(" high"), [cell.high if isinstance(cell, Interval) else "" for cell in cells]
    if any(isinstance(cell, AtMost) for cell in cells):
        yield title(" is"), ["at most" if isinstance(cell, AtMost) else "" for cell in cells]


def _raw(cell: Cell) -> object:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return _inert(cell)
    return cell.value if isinstance(cell, Spread | Interval | AtMost) else cell


def _inert(text: str) -> str:
    """Escape text that a spreadsheet would evaluate as a formula."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    safe = "\t".join(map(printable, text.split("\t")))
    return f"'{safe}" if text.startswith(_FORMULA_STARTS) else safe
