"""The table of families and pieces in docs/accelerate.md, generated from its record: the lines
between two comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stepscope.report.tables import col, table
from stepscope.report.text import markdown

RECORD = "acceleration-matrix.jsonl"
PAGE = "docs/accelerate.md"
BEGIN = "<!-- matrix: made by scripts/acceleration_matrix.py -->"
END = "<!-- until here -->"

Line = dict[str, Any]


def with_matrix(page: str, results: Path) -> str:
    """Return the page with the lines between the comments regenerated."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_matrix(read(results))}\n{END}{after}"


def read(results: Path) -> list[Line]:
    return [json.loads(line) for line in (results / RECORD).read_text().splitlines()]


def _matrix(lines: list[Line]) -> str:
    pieces = list(dict.fromkeys(piece for line in lines for piece in _pieces(line)))
    reasons = list(dict.fromkeys(one["reason"] for line in lines for one in line["left"]))

    def cell(line: Line, piece: str) -> str:
        parts = [str(line["replaced"][piece])] if piece in line["replaced"] else []
        parts += [
            f"{one['count']} left ({reasons.index(one['reason']) + 1})"
            for one in line["left"]
            if one["piece"] == piece
        ]
        return ", ".join(parts) or "–"

    columns = [col("family", lambda line: line["family"])]
    columns += [col(piece, lambda line, piece=piece: cell(line, piece)) for piece in pieces]
    versions = dict.fromkeys(f"{line['library']} {line['version']}" for line in lines)
    text = [
        f"Models with two blocks; {', '.join(versions)}. A number is the count of replaced modules"
        " (a head counts with the module that computes the loss); the reason of “left” is below;"
        " – means that there is no such part, or that a larger piece has it.",
        markdown(table("matrix", "", lines, columns)).strip(),
        "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
    ]
    return "\n\n".join(filter(None, text))


def _pieces(line: Line) -> Iterator[str]:
    yield from line["replaced"]
    yield from (one["piece"] for one in line["left"])
