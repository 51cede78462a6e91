"""benchmarks/acceleration.py runs end to end with sizes for a CPU."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from command_line import python

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    # Kernels would run in Triton's interpreter, which takes minutes.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python(
        *shlex.split("benchmarks/acceleration.py --tiny --device cpu"),
        *arguments,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_forms_take_turns_and_missing_ones_are_skipped(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    forms = ["plain", "liger", "stepscope"]
    printed = run("--rows", "own_small", "--forms", *forms, "--seconds", "0.01", "--out", str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["form"], "median_ms" in line) for line in lines] == [
        ("plain", True), ("liger", False), ("stepscope", True), ("stepscope", True),
        ("plain", True),
    ]  # fmt: skip
    assert all(line["median_ms"] > 0 and line["steps"] >= 5 for line in lines if "steps" in line)
    assert lines[1]["skipped"] == "Liger patches classes, which changes other forms: run it alone"
    assert "no tensor is on a CUDA device" in lines[2]["explain"]
    rows = [line.split() for line in printed.splitlines()]
    assert [row[1] for row in rows[1:]] == forms
    assert rows[1][4] == "1.000x"


def test_losses_and_gradients_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    run("--rows", "own_small", "--loss-steps", "8", "--out", str(out))
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert line["loss_steps"] == 8
    assert abs(line["relative_difference"]) < 0.005
    assert 0 < line["largest_gradient_error"] < 0.05
