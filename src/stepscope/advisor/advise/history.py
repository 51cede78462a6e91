"""History of verified changes in the user's cache; corrects predictions on the same device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.analysis.advice.calibration import Verified
from stepscope.files import append_to_file
from stepscope.records.decoding import from_json


def history_file() -> Path:
    """Path of the history, under XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / "advice.jsonl"


def read_history() -> tuple[Verified, ...]:
    """Read the history. Unreadable lines are skipped: predictions are only less accurate without
    them."""
    try:
        lines = history_file().read_bytes().splitlines()
    except OSError:
        return ()
    entries = []
    for line in lines:
        try:
            entries.append(from_json(line, Verified))
        except msgspec.DecodeError:
            continue
    return tuple(entries)


def add_to_history(verified: Sequence[Verified]) -> None:
    """Append verified changes to the history."""
    path = history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    append_to_file(path, b"".join(msgspec.json.encode(one) + b"\n" for one in verified))
