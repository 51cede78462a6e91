"""Real traces, one step each: exact numbers, and the same from an independent ledger.

`scripts/cut_trace.py` cuts a recorded trace to one step and writes its expected numbers.
"""

from __future__ import annotations

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from slow_account import Account
from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.host import PHASES
from stepscope.analysis.trace.ledger import Ledger, ledgers
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.summarize import summarize_file
from stepscope.analysis.trace.work import DeviceWork, device_work
from trace_files import ChromeTrace, replayed_step, training_step

ROOT = Path(__file__).resolve().parents[2]
TRACES = sorted((ROOT / "tests" / "fixtures").glob("*.json.gz"))
CAUSES = {
    "synchronization": "wait",
    "CPU": "CPU",
    "queue": "queue",
    "between operators": "between",
}


@pytest.fixture(params=TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def recorded(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.mark.parametrize("planted", [training_step(blocks=3), replayed_step()])
def test_both_ledgers_agree_on_kernels_too(tmp_path: Path, planted: ChromeTrace) -> None:
    """Recorded CPU traces have no kernels."""
    path = planted.write(tmp_path / "planted.json.gz")
    test_every_line_matches_a_count_of_the_raw_events(path)
    test_every_part_of_the_model_has_the_work_of_its_forward(path)


@cache
def work_of(path: Path) -> DeviceWork:
    return device_work(read_trace(path))


@cache
def slow_account(path: Path) -> Account:
    return Account(path)


def ledger_of(path: Path) -> Ledger:
    work = work_of(path)
    (ledger,) = ledgers(work, find_steps(work))
    return ledger


def expected(path: Path) -> dict[str, Any]:
    text = path.with_name(path.name.replace(".json.gz", ".expected.json")).read_text()
    numbers: dict[str, Any] = json.loads(text)
    return numbers


def test_the_numbers_match_the_expected_file(recorded: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import cut_trace
    finally:
        sys.path.pop(0)
    numbers = json.loads(json.dumps(cut_trace.expected(work_of(recorded))))
    assert numbers == expected(recorded)


def test_every_line_matches_a_count_of_the_raw_events(recorded: Path) -> None:
    slow, ledger = slow_account(recorded), ledger_of(recorded)
    assert ledger.wall == slow.end - slow.start
    lines: dict[tuple[str, str], int] = {key: ns for key, ns in ledger.work.items() if ns}
    for phase, cause, length in ledger.lines():
        if phase == "idle":
            lines["idle", CAUSES[cause.partition(":")[0]]] = length
    if ledger.no_launch:
        lines["idle", "no launch"] = ledger.no_launch
    counted = slow.lines()
    unknown = sum(counted.pop(key) for key in [k for k in counted if not k[0]])
    assert lines == dict(counted)
    assert ledger.no_phase == unknown


def test_every_part_of_the_model_has_the_work_of_its_forward(recorded: Path) -> None:
    work, slow = work_of(recorded), slow_account(recorded)
    assert len(work) == len(slow.pieces)
    attributed = sorted(
        (start, end, PHASES[phase], "/".join(work.host.paths[path]))
        for start, end, phase, path in zip(
            work.start.tolist(),
            work.end.tolist(),
            work.phase.tolist(),
            work.path.tolist(),
            strict=True,
        )
    )
    counted = sorted((p.start, p.end, slow.phase_of(p), slow.module(p.around)) for p in slow.pieces)
    assert attributed == counted


def test_its_ledger_closes_and_its_work_is_attributed(recorded: Path) -> None:
    summary = summarize_file(recorded)
    assert summary.doubt == ""
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms)
    assert summary.shares.kind >= 0.98
    if "_graph_" in recorded.name:
        # One launch for everything: its kernels have no operator and no part of the model.
        assert summary.shares.operator == summary.shares.module == 0
    elif "train-step" in recorded.name and summary.on_device:
        assert summary.shares.backward_module >= 0.95


def test_a_cut_trace_has_one_step(recorded: Path) -> None:
    events = json.loads(gzip.decompress(recorded.read_bytes()))["traceEvents"]
    marks = [e["name"] for e in events if e["name"].startswith("ProfilerStep#")]
    assert len(marks) == 1
    assert recorded.stat().st_size < 400_000
