"""The index of a folder of runs: every run with its answer, its page and how to compare it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stepscope.analysis.verdict import Verdict
from stepscope.report.format import duration, number
from stepscope.report.html import standalone
from stepscope.report.verdict import sentences

_ENTRY = "run.json"


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of one run in the index."""

    run: str
    title: str
    subtitle: str
    answer: str = ""
    step_ms: float | None = None


def entry_of(run: str, title: str, subtitle: str, verdict: Verdict | None) -> RunEntry:
    step = verdict.step.value if verdict is not None and verdict.step is not None else None
    answer = " ".join(sentences(verdict)) if verdict is not None else ""
    return RunEntry(run=run, title=title, subtitle=subtitle, answer=answer, step_ms=step)


def write_entry(folder: Path, entry: RunEntry) -> None:
    (folder / _ENTRY).write_bytes(msgspec.json.encode(entry))


def read_entries(out: Path) -> list[RunEntry]:
    """The newest first; a file that is not an entry is left out."""
    entries = []
    for path in out.glob(f"*/{_ENTRY}"):
        try:
            entries.append(msgspec.json.decode(path.read_bytes(), type=RunEntry))
        except (OSError, msgspec.DecodeError):
            continue
    return sorted(entries, key=lambda entry: entry.run, reverse=True)


def _against(entry: RunEntry, latest: RunEntry) -> str:
    """The step of the latest run against that of an earlier one; empty if one is unknown."""
    if not entry.step_ms or not latest.step_ms:
        return ""
    ratio = entry.step_ms / latest.step_ms
    return (
        f"The latest run, {latest.title}: {duration(latest.step_ms)} instead of"
        f" {duration(entry.step_ms)}, {number(ratio, 3)}× as fast."
    )


def index_page(entries: list[RunEntry]) -> str:
    rows: list[dict[str, Any]] = [
        {
            "entry": entry,
            "page": f"{entry.run}/report.html",
            "against": _against(entry, entries[0]) if index else "",
            "compare": f"stepscope compare {entry.run} {entries[0].run}" if index else "",
        }
        for index, entry in enumerate(entries)
    ]
    return standalone("index.html.j2", rows=rows)
