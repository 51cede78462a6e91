"""docs/cs336.md and the package's answers from the committed records, for every problem of the
CS336 systems assignments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Figure, Finding, Flame, Table, Timeline
from stepscope.report.document import markdown_document
from stepscope.studies.course import PROBLEMS
from stepscope.studies.course.answers import Views, distinct
from stepscope.studies.course.committed import Committed, key_of
from stepscope.studies.course.document import committed_document
from stepscope.studies.course.needs import NEEDS
from stepscope.studies.course.problem import Part

ANSWERS = "src/stepscope/studies/course/h200.json"
_MAX_ROWS = 48
"""Tables with more rows than this stay out of the package; they are on the pages of their study."""
_MAX_POINTS = 2_000

_INTRODUCTION = (
    "Each problem of the 2025 and 2026 systems assignments by its name there, with the question in"
    " our words, the command, and the answer in the committed records of an H200. `stepscope cs336"
    " --edition 2026` measures the same on the machine in front of you and writes this document"
    " with figures, as HTML, Markdown and LaTeX; with `--quick` that takes minutes on two CPU"
    " cores. Several ranks have no record on several GPUs: they share one, over gloo. Problems of"
    " arithmetic have the answer of `stepscope calc`, derived in [accounting](accounting.md)."
    " Generated from `results/` by `python scripts/make_docs.py`.\n\n"
    "A language model of classes of your own, as the first assignment asks for, becomes faster by"
    " one line: [examples/cs336_lm.py](../examples/cs336_lm.py), [accelerate](accelerate.md). The"
    " kernel that the handout teaches Triton with is [examples/weighted_sum.py]"
    "(../examples/weighted_sum.py)."
)


def course_files(results: Path) -> dict[str, str]:
    """The page, and the answers that the package has."""
    answers = committed(results)
    page = committed_document(PROBLEMS, _INTRODUCTION, answers)
    return {
        ANSWERS: _by_line(answers),
        "docs/cs336.md": markdown_document(page, images=False),
    }


def _by_line(answers: dict[str, Committed]) -> str:
    """JSON with one answer on each line."""
    lines = (f'"{key}": {msgspec.json.encode(one).decode()}' for key, one in answers.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def committed(results: Path) -> dict[str, Committed]:
    files: dict[str, Views] = {}
    answers: dict[str, Committed] = {}
    for problem in PROBLEMS:
        for part in problem.parts:
            if found := _answer(part, results, files):
                answers[key_of(problem, part)] = found
    return answers


def _answer(part: Part, results: Path, files: dict[str, Views]) -> Committed | None:
    blocks: list[Block] = []
    used: list[Record] = []
    names: list[str] = []
    for show in part.shows:
        name = NEEDS[show.need].records
        if not name or show.committed is None:
            continue
        if name not in files:
            files[name] = Views(read_records(results / f"{name}.jsonl"))
        records = files[name].records(show, show.committed)
        found = list(files[name].blocks(show, records))
        if found:
            names.append(f"results/{name}.jsonl")
            used += records
            blocks += found
    if not blocks:
        return None
    devices = dict.fromkeys(one.environment.device_name for one in used)
    ranks = {one.config["ranks"] for one in used if "ranks" in one.config}
    source = ", ".join(devices)
    if ranks:
        source += f", {max(ranks)} ranks that share one GPU over gloo"
    return Committed(
        source=source,
        files=tuple(dict.fromkeys(names)),
        blocks=distinct(map(_small, _within_limits(blocks))),
    )


def _within_limits(blocks: list[Block]) -> Iterator[Block]:
    for block in blocks:
        match block:
            case Table() if len(block.rows) > _MAX_ROWS:
                continue
            case Figure() if sum(len(curve.x) for curve in block.curves) > _MAX_POINTS:
                continue
            case Flame():
                continue
            case Timeline() if sum(len(lane.spans) for lane in block.lanes) > _MAX_POINTS:
                continue
            case _:
                yield block


def _small(block: Block) -> Block:
    """The block without what only the page of its records can show."""
    if isinstance(block, Table):
        return msgspec.structs.replace(block, details=())
    if isinstance(block, Finding):
        return msgspec.structs.replace(block, values={}, records=())
    return block
