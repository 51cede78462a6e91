"""docs/results/families.md: models of transformers and timm through the graph backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_parts import lines_of

from stepscope.report.tables import col, table
from stepscope.report.text import markdown

Line = dict[str, Any]
RECORD = "families_cpu.jsonl"
_INTRODUCTION = (
    "Tiny copies of the models of transformers and timm train four steps with changing lengths and"
    ' padding, as they are and through `torch.compile(…, backend="stepscope")` (passes on, regions'
    " run by AOTAutograd without a compiler, float32 on a CPU). Losses, gradients, buffers, random"
    " numbers, outputs in eval mode and generated tokens are compared."
    " `python benchmarks/families.py --resume` runs those that have no line yet. This page is"
    " generated from `results/families_cpu.jsonl` by `python scripts/make_docs.py`."
)


def families_pages(results: Path) -> dict[str, str]:
    """Return path under docs/results/ and text."""
    lines = sorted(lines_of(results / RECORD), key=lambda line: str(line["model"]))
    return {"families.md": "\n\n".join(["# Families of models", *_parts(lines)]) + "\n"}


def _parts(lines: Sequence[Line]) -> Iterator[str]:
    ran = [line for line in lines if line["status"] != "not built"]
    counts = Counter(line["status"] for line in ran)
    yield _INTRODUCTION
    shown = "; ".join(f"{status}: {count}" for status, count in counts.most_common())
    versions = " and ".join(sorted({str(line["torch"]) for line in lines}))
    missing = [line for line in lines if line["status"] == "not built"]
    yield (
        f"{len(ran)} models ran, with torch {versions}: {shown}. {len(missing)} were not built with"
        " tiny sizes."
    )
    applied = Counter(name for line in ran for name in line.get("applied", ()))
    yield (
        "Models in which a pass applied: "
        + ", ".join(f"{name} {count}" for name, count in applied.most_common())
        + "."
    )
    columns = [
        col("model", lambda line: line["model"]),
        col("result", lambda line: line["status"]),
        col("graphs", lambda line: line.get("graphs")),
        col("graph breaks", lambda line: line.get("graph_breaks")),
        col("passes", lambda line: ", ".join(line.get("applied", ()))),
        col("left, or the reason", _why),
    ]
    yield markdown(table("families", "", ran, columns)).strip()
    yield "## Not built"
    both = [col("model", lambda line: line["model"]), col("reason", lambda line: line["reason"])]
    yield markdown(table("missing", "", missing, both)).strip()


def _why(line: Line) -> str:
    reasons = [*line.get("left", ()), *line.get("not_retraced", ()), *line.get("differences", ())]
    return "; ".join(reasons) or str(line.get("reason", ""))
