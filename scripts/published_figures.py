"""Our own records as published figures: generates src/stepscope/published/h200.toml.

`python scripts/make_docs.py` writes it together with the pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.records.schema import Record
from stepscope.studies.benchmark import STUDY as BENCHMARK
from stepscope.studies.benchmark.rows import BenchmarkRow, rows_of

KEYS = ("size", "context", "batch", "dtype", "attention", "compile", "optimizer")
PHASES = ("forward", "backward", "both", "step")


def published_h200(records: Sequence[Record], peers: dict[str, Any]) -> str:
    """Medians and peaks of every step that ran, and of the peer measured alongside."""
    steps = [record for record in records if record.study == "benchmark"]
    rows = rows_of(BENCHMARK.results(steps))
    first = steps[0]
    rates = {
        ceiling.name: ceiling.value for ceiling in first.ceilings if ceiling.source == "measured"
    }
    lines = [
        "# Written by scripts/make_docs.py from results/; not edited by hand.",
        f"writeup = {_text('Stepscope on an H200 (results/h200.jsonl)')}",
        f"device = {_text(first.environment.device_name)}",
        f"runs = {_list(dict.fromkeys(record.run for record in steps))}",
        "",
        "[rates]",
        *(f"{_text(name)} = {value!r}" for name, value in rates.items()),
        *_table("benchmark", "benchmark", "ms", "median", (*KEYS,), PHASES, _times(rows)),
        *_table(
            "benchmark, peak memory",
            "memory",
            "B",
            "max_memory_allocated",
            (*KEYS, "mode"),
            ("peak",),
            _peaks(rows),
        ),
        *_table(
            "the course's reference model",
            "benchmark",
            "ms",
            "median",
            (*KEYS,),
            PHASES,
            _of_peers(peers),
            note=peers["source"],
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(
    name: str,
    study: str,
    unit: str,
    statistic: str,
    keys: Sequence[str],
    columns: Sequence[str],
    rows: Iterator[Sequence[Any]],
    note: str = "",
) -> Iterator[str]:
    yield from ("", "[[table]]")
    for field, value in (
        ("name", name),
        ("study", study),
        ("unit", unit),
        ("statistic", statistic),
        ("note", note),
    ):
        if value:
            yield f"{field} = {_text(value)}"
    yield f"keys = {_list(keys)}"
    yield f"columns = {_list(columns)}"
    yield "rows = ["
    for row in rows:
        yield f"    {_list(row)},"
    yield "]"


def _identity(row: BenchmarkRow) -> tuple[Any, ...]:
    return tuple(getattr(row.workload, name) for name in KEYS)


def _times(rows: Sequence[BenchmarkRow]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        phases = (row.forward, row.backward, row.both, row.step)
        if any(phases):
            yield *_identity(row), *(s.median if s else math.nan for s in phases)


def _peaks(rows: Sequence[BenchmarkRow]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        for mode, record in row.by_mode.items():
            peak = record.quantity("peak_bytes")
            if record.status == "ok" and peak is not None:
                yield *_identity(row), mode, peak


def _of_peers(peers: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    variants = {"eager": ("reference", "no", "torch"), "compiled": ("sdpa", "block", "torch-fused")}
    for row in peers["rows"]:
        yield (
            row["size"],
            row["context"],
            4,
            row["dtype"],
            *variants[row["variant"]],
            float(row["forward"]),
            math.nan,
            float(row["both"]),
            float(row["step"]),
        )


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(values: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, str):
            return _text(value)
        return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else repr(value)

    return f"[{', '.join(one(value) for value in values)}]"
