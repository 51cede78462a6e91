"""Ranks in network namespaces, on a link that is really slow. Bounds only: no gate on time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rehearsal_link.py"
MBIT = 160.0
NOT_PERMITTED = 77


def test_a_slowed_link_is_measured_and_predicted() -> None:
    words = ["--ranks", "2", "--mbit", str(MBIT), "--vocab", "256", "--context", "8", "--batch",
             "1", "--steps", "2", "--rounds", "2", "--bucket-mb", "1", "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=400
    )
    if done.returncode == NOT_PERMITTED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    wire = MBIT / 8 * 1e3
    # Between two ranks a byte of the message crosses the wire once, whatever the machine is doing.
    transfer_ms = told["gradient_bytes"] / wire
    assert told["all_alone_ms"] > 0.9 * transfer_ms
    for name, way in told["ways"].items():
        assert way["measured_ms"] > 0.9 * transfer_ms, name
        assert way["predicted_ms"] > max(told["compute_ms"], 0.9 * transfer_ms), name
    # What leaves after the backward cannot hide behind it.
    late = 0.9 * (told["compute_ms"] + transfer_ms)
    assert min(told["ways"][name]["measured_ms"] for name in ("naive", "flat")) > late
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "stepscope" not in left
