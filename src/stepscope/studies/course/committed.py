"""Answers in the committed records of an H200, as blocks that are part of the package.

`h200.json` is written by `scripts/make_docs.py` from `results/`, which an installed Stepscope does
not have.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

from stepscope.report.blocks import Block, Data
from stepscope.studies.course.problem import Part, Problem

FILE = "h200.json"


class Committed(Data, frozen=True):
    """Blocks from committed records that answer a part."""

    source: str
    """Device, and the number of ranks where there are several."""
    files: tuple[str, ...]
    blocks: tuple[Block, ...]


def key_of(problem: Problem, part: Part) -> str:
    return f"{problem.name}.{problem.parts.index(part) + 1}"


@cache
def committed_answers() -> dict[str, Committed]:
    """Answers by problem and number of the part."""
    text = resources.files("stepscope.studies.course").joinpath(FILE).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Committed])
