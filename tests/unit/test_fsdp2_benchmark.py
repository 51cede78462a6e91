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


def test_blocks_continue_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    forms = ("--forms", "bare", "fsdp2-reshard", "--settings", "reshard", "--policy", "autocast")
    printed = run(out, *forms)
    lines = out.read_text().splitlines(keepends=True)
    order = [(one["form"], one["block"]) for one in map(json.loads, lines)]
    assert order == [("bare", 0), ("fsdp2-reshard", 1), ("fsdp2-reshard", 2), ("bare", 3)]
    assert all(json.loads(one)["median_ms"] > 0 for one in lines)
    assert [line.split()[1] for line in printed.splitlines()] == ["bare", "fsdp2-reshard"]
    out.write_text("".join(lines[:3]))
    run(out, *forms)
    *before, last = out.read_text().splitlines(keepends=True)
    assert before == lines[:3]
    assert json.loads(last)["block"] == 3
    assert len(out.read_text().splitlines()) == len(lines)
    over = tmp_path / "over.jsonl"
    assert run(over, *forms, "--minutes", "-1") == "\n"
    assert over.read_text() == ""


def test_a_form_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fsdp2

    lines = [
        {"form": "bare", "block": 0, "median_ms": 1.0},
        {"form": "b", "block": 1, "skipped": "x"},
    ]
    assert fsdp2.known_blocks(["bare", "b", "c"], lines) == {0, 1, 4}


def test_it_says_what_fsdp2_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import fsdp2

    times = {"bare": 100.0, "accelerate": 80.0, "fsdp2-keep": 105.0, "fsdp2-keep-accelerate": 86.0,
             "fsdp2-keep-compile-blocks": 94.6, "fsdp2-keep-fp8": 80.0}  # fmt: skip
    lines: list[dict[str, Any]] = [
        {"turn": "0 keep", "form": form, "median_ms": ms, "steps_gib": 1.0}
        for form, ms in times.items()
    ]
    *_, added, speed, in_fp8 = fsdp2.judged(lines)
    assert "6.000 ms to the accelerated model, 5.000 ms to the bare one: +1.25%" in added
    assert "within 2%" in added
    assert speed == "keep: 1.100x the speed of compiled blocks in FSDP2"
    assert in_fp8 == "keep: 1.075x with weights gathered in FP8"
    slower = [x | {"median_ms": 90.0} if x["form"] == "fsdp2-keep-accelerate" else x for x in lines]
    assert any("above 2%" in one for one in fsdp2.judged(slower))
