"""benchmarks/fsdp2.py on a CPU: interleaved forms, rounds that continue, and what it concludes."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from command_line import python

ROOT = Path(__file__).resolve().parents[2]


def run(out: Path, *words: str) -> str:
    fixed = "benchmarks/fsdp2.py --tiny --device cpu --row own_decoder --seconds 0.01"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python(
        *shlex.split(fixed), "--out", str(out), *words,
        cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rounds_continue_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    forms = ("--forms", "bare", "fsdp2-reshard", "--policy", "autocast")
    printed = run(out, *forms, "--rounds", "1")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    order = [(line["form"], line["block"]) for line in lines]
    assert order == [("bare", 0), ("fsdp2-reshard", 1), ("fsdp2-reshard", 2), ("bare", 3)]
    assert all(line["median_ms"] > 0 and line["round"] == 0 for line in lines)
    assert [line.split()[0] for line in printed.splitlines()] == ["bare", "fsdp2-reshard"]
    assert run(out, *forms, "--rounds", "1") == printed
    assert len(out.read_text().splitlines()) == len(lines)


def test_it_says_what_fsdp2_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fsdp2

    times = {"bare": 100.0, "accelerate": 80.0, "fsdp2-keep": 105.0, "fsdp2-keep-accelerate": 86.0,
             "fsdp2-keep-compile-blocks": 94.6}  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"form": form, "median_ms": ms, "steps_gib": 1.0} for form, ms in times.items()
    ]
    *_, added, speed = fsdp2.judged(lines)
    assert "6.000 ms to the accelerated model, 5.000 ms to the bare one: +1.25%" in added
    assert speed == "keep: 1.100x the speed of compiled blocks in FSDP2"
