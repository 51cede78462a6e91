"""Read the public traces in the test data of HolisticTraceAnalysis and TraceLens.

    python benchmarks/public_traces.py HTA_CLONE TRACELENS_CLONE --out results/public-traces.jsonl

Every trace becomes a line: its breakdown from the first to the last kernel, counted as those tools
do (copies are neither computation nor communication), or why it has none; and whether the ledger of
its steps adds up. `results/public-traces-other-tools.json` has the numbers of those tools, and
`scripts/make_docs.py` makes the tables of docs/traces.md from both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.intervals import overlap, union
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.summarize import summarize_work
from stepscope.analysis.trace.work import DeviceWork, device_work
from stepscope.errors import StepscopeError

FOLDERS = {"hta": "tests/data", "tracelens": "tests"}
COPIES = ("Memcpy", "Memset")


def traces(clone: Path, source: str) -> Iterator[Path]:
    """Yield what may be a trace: JSON with events, or compressed JSON."""
    folder = clone / FOLDERS[source]
    yield from sorted(folder.rglob("*.json.gz"))
    for path in sorted(folder.rglob("*.json")):
        if '"traceEvents"' in path.read_text(errors="replace"):
            yield path


def breakdown(work: DeviceWork) -> dict[str, float]:
    """Return milliseconds from the first to the last kernel."""
    names = work.trace.names
    moved = [n for n in np.unique(work.name).tolist() if names[n].startswith(COPIES)]
    sent = work.kind == CLASSES.index("communication")
    computed = ~sent & ~np.isin(work.name, moved)

    def of(kernels: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Ints, Ints]:
        return union(work.start[kernels], work.end[kernels])

    busy, compute, communication = union(work.start, work.end), of(computed), of(sent)
    span = int(work.end.max()) - int(work.start.min())
    found = {
        "idle_ms": (span - _length(busy)) / 1e6,
        "compute_ms": _length(compute) / 1e6,
        "other_ms": (_length(busy) - _length(compute)) / 1e6,
    }
    if _length(communication):
        hidden = int(overlap(*communication, *compute).sum())
        found["overlap"] = hidden / _length(communication)
    return found


def _length(intervals: tuple[Ints, Ints]) -> int:
    return int((intervals[1] - intervals[0]).sum())


def read(path: Path) -> dict[str, Any]:
    try:
        work = device_work(read_trace(path))
        steps = find_steps(work)
        summary = summarize_work(work, steps, path.name)
    except StepscopeError as error:
        return {"refused": str(error).replace(str(path), path.name)}
    line: dict[str, Any] = {
        "device": summary.device,
        "steps": len(steps),
        "doubt": summary.doubt,
        "rest_ms": sum(one.ms for one in summary.lines) - summary.wall_ms,
    }
    return line | (breakdown(work) if work.on_device else {})


def _rounded(value: Any) -> Any:
    """Milliseconds to a nanosecond, as traces state them."""
    return round(value, 6) + 0.0 if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hta", type=Path)
    parser.add_argument("tracelens", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = []
    for source in FOLDERS:
        clone = getattr(options, source)
        for path in traces(clone, source):
            line = {"source": source, "trace": str(path.relative_to(clone)), **read(path)}
            lines.append(json.dumps({name: _rounded(value) for name, value in line.items()}))
            print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
