"""Ranks in network namespaces on a real slow link. Checks bounds only, no exact times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rehearsal_link.py"
MBIT = 160.0
NOT_PERMITTED = 77


@pytest.mark.thorough
def test_a_slowed_link_is_measured_and_predicted() -> None:
    arguments = [
        "--ranks",
        "2",
        "--mbit",
        str(MBIT),
        "--vocab",
        "256",
        "--context",
        "8",
        "--batch",
        "1",
        "--steps",
        "2",
        "--rounds",
        "2",
        "--bucket-mb",
        "1",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=400
    )
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    wire = MBIT / 8 * 1e3
    # Between two ranks each byte of the message crosses the wire once.
    transfer_ms = result["gradient_bytes"] / wire
    assert result["all_alone_ms"] > 0.9 * transfer_ms
    for name, row in result["ways"].items():
        assert row["measured_ms"] > 0.9 * transfer_ms, name
        assert row["predicted_ms"] > max(result["compute_ms"], 0.9 * transfer_ms), name
    # Reductions issued after the backward cannot overlap with it.
    late = 0.9 * (result["compute_ms"] + transfer_ms)
    assert min(result["ways"][name]["measured_ms"] for name in ("naive", "flat")) > late
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "stepscope" not in left
