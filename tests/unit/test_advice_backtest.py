"""The rules of advice, held against records of an H200 that were made for other questions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_trials_are_predicted_anew_from_their_records() -> None:
    """By the rules of today: the trace is scaled to the timed step since, and a fused update of a
    CPU is limited by its arithmetic."""
    done = subprocess.run(
        [sys.executable, "benchmarks/own_step_backtest.py", "results/advise-slow_cpu.jsonl"],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    by_code = {row[0].removeprefix("| "): row for row in rows}
    assert by_code["fused-optimizer"][4:6] == ["10.74", "right"]
    assert by_code["fused-attention"][2:6] == ["1.648", "1.41", "1.544", "right"]
    assert by_code["compile+fused-attention+fused-optimizer"][4:6] == ["14.09", "right"]
    assert "4 of 4 gains lie in their ranges" in done.stderr


def test_on_an_h200_four_of_five_first_pieces_of_advice_are_right() -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("results/advise-*_h200.jsonl"))
    done = subprocess.run(
        [sys.executable, "benchmarks/own_step_backtest.py", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    right, tried = map(int, re.findall(r"^(\d+) of (\d+) of the first", done.stderr)[0])
    assert tried >= 8
    assert right >= 0.8 * tried


def test_four_of_five_changes_are_predicted_within_a_third() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/advice_backtest.py", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["summary"]) >= {"tf32", "bfloat16", "compile-blocks", "graph", "larger-batch"}
    # A change that gains is not passed over.
    assert sum(one["missed"] for one in told["summary"].values()) <= 1
    advised = sum(one["advised"] for one in told["summary"].values())
    assert advised >= 50
    assert {one["change"] for one in told["peaks"]} == {"bfloat16", "fused-attention"}
    log = (ROOT / "docs" / "log" / "measurements.md").read_text()
    for one in told["summary"].values():
        counts = " | ".join(str(one[name]) for name in ("pairs", "advised", "right", "missed"))
        assert f"| {counts} |" in log
    assert f"{sum(one['right'] for one in told['summary'].values())} of {advised}." in log
    assert told["peaks_near"] >= 0.9 * len(told["peaks"])
