"""Past verifications, kept for this user and used for later predictions on the same device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.analysis.advice.calibration import Verified
from stepscope.records.decoding import from_json


def history_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / "advice.jsonl"


def read_history() -> tuple[Verified, ...]:
    """A line that cannot be read is passed over: a prediction without it is only less good."""
    try:
        lines = history_file().read_bytes().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            found.append(from_json(line, Verified))
        except msgspec.DecodeError:
            continue
    return tuple(found)


def add_to_history(verified: Sequence[Verified]) -> None:
    path = history_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for one in verified:
            file.write(msgspec.json.encode(one) + b"\n")
