"""The index of a folder of runs: every run with its answer, its page and how to compare it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from stepscope.analysis.verdict import Verdict
from stepscope.errors import StepscopeError, printable
from stepscope.files import read_limited, replace_file
from stepscope.report.answer import sentences
from stepscope.report.format import duration, number
from stepscope.report.html import standalone

_ENTRY = "run.json"
MAX_ENTRY_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}")
_LONGEST_MS = 1e12


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of one run in the index."""

    run: str
    title: str
    subtitle: str
    answer: str = ""
    subject: str = ""
    """What the step is of."""
    step_ms: float | None = None


def entry_of(run: str, title: str, subtitle: str, verdict: Verdict | None) -> RunEntry:
    step = verdict.step.value if verdict is not None and verdict.step is not None else None
    answer = " ".join(sentences(verdict)) if verdict is not None else ""
    return RunEntry(
        run=run,
        title=title,
        subtitle=subtitle,
        answer=answer,
        subject=verdict.subject if verdict is not None else "",
        step_ms=step,
    )


def write_entry(folder: Path, entry: RunEntry) -> None:
    text = printable(msgspec.json.encode(entry).decode())
    replace_file(folder / _ENTRY, [text.encode()])


def read_entries(out: Path) -> list[RunEntry]:
    """The newest first; a file that is not an entry is left out."""
    entries = []
    for path in out.glob(f"*/{_ENTRY}"):
        try:
            entry = msgspec.json.decode(read_limited(path, MAX_ENTRY_BYTES, ""), type=RunEntry)
        except (OSError, StepscopeError, msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        # The name becomes part of an address and of a command line.
        if entry.run == path.parent.name and _NAME.fullmatch(entry.run):
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.run, reverse=True)


def _against(entry: RunEntry, latest: RunEntry) -> str:
    """The step of the latest run of the same subject against that of an earlier one; empty if one
    is unknown."""
    if not entry.step_ms or not latest.step_ms or max(entry.step_ms, latest.step_ms) > _LONGEST_MS:
        return ""
    ratio = entry.step_ms / latest.step_ms
    change = f"{number(ratio, 3)}× as fast" if ratio >= 1 else f"{number(1 / ratio, 3)}× as long"
    return (
        f"The latest run of it takes {duration(latest.step_ms)} instead of"
        f" {duration(entry.step_ms)}: {change}."
    )


def index_page(entries: list[RunEntry]) -> str:
    """Runs with their answers, the newest first; an earlier run of the same title is compared with
    the latest one, and steps only if both are of the same subject."""
    latest: dict[str, RunEntry] = {}
    for entry in entries:
        latest.setdefault(entry.title, entry)
    rows: list[dict[str, Any]] = []
    for entry in entries:
        newer = latest[entry.title]
        earlier, alike = newer is not entry, newer.subject == entry.subject
        rows.append(
            {
                "entry": entry,
                "page": f"{entry.run}/report.html",
                "against": _against(entry, newer) if earlier and alike else "",
                "compare": f"stepscope compare {entry.run} {newer.run}" if earlier else "",
            }
        )
    return standalone("index.html.j2", rows=rows)
