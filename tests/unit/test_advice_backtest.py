"""The advice rules against records of an H200 that were made for other questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command_line import python

ROOT = Path(__file__).parents[2]


def test_trials_are_predicted_again_from_their_records() -> None:
    """With the current rules, which scale the trace to the timed step and limit a fused update on
    a CPU by its arithmetic."""
    done = python("benchmarks/own_step_backtest.py", "results/advise-slow_cpu.jsonl", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    by_code = {row[0].removeprefix("| "): row for row in rows}
    assert by_code["fused-optimizer"][4:6] == ["10.74", "right"]
    assert by_code["fused-attention"][2:6] == ["1.648", "1.41", "1.544", "right"]
    assert by_code["compile+fused-attention+fused-optimizer"][4:6] == ["14.09", "right"]
    assert "4 of 4 gains are inside their ranges" in done.stderr


def test_four_of_five_first_pieces_of_advice_are_right_on_an_h200() -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("results/advise-*_h200.jsonl"))
    done = python("benchmarks/own_step_backtest.py", *files, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    right, tried = map(int, re.findall(r"^(\d+) of (\d+) of the first", done.stderr)[0])
    assert tried >= 8
    assert right >= 0.8 * tried


def test_four_of_five_changes_are_predicted_within_a_third() -> None:
    done = python("benchmarks/advice_backtest.py", "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["summary"]) >= {"tf32", "bfloat16", "compile-blocks", "graph", "larger-batch"}
    # A change that gains is not missed.
    assert sum(one["missed"] for one in result["summary"].values()) <= 1
    advised = sum(one["advised"] for one in result["summary"].values())
    assert advised >= 50
    assert {one["change"] for one in result["peaks"]} == {"bfloat16", "fused-attention"}
    log = (ROOT / "docs" / "log" / "measurements.md").read_text()
    for one in result["summary"].values():
        counts = " | ".join(str(one[name]) for name in ("pairs", "advised", "right", "missed"))
        assert f"| {counts} |" in log
    assert f"{sum(one['right'] for one in result['summary'].values())} of {advised}." in log
    assert result["peaks_near"] >= 0.9 * len(result["peaks"])
