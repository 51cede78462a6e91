"""Real traces, one step each: exact numbers, and the same by an account that shares no reader.

`scripts/cut_trace.py` makes a file and its numbers out of a trace that was recorded.
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
    "synchronisation": "wait",
    "host": "host",
    "queue": "queue",
    "between operators": "between",
}


@pytest.fixture(params=TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def recorded(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.mark.parametrize("planted", [training_step(blocks=3), replayed_step()])
def test_both_accounts_agree_on_kernels_too(tmp_path: Path, planted: ChromeTrace) -> None:
    """As no recorded trace of a CPU has them."""
    path = planted.write(tmp_path / "planted.json.gz")
    test_every_line_is_that_of_counting_the_raw_events(path)
    test_every_part_of_the_model_has_what_its_forward_made(path)


@cache
def work_of(path: Path) -> DeviceWork:
    return device_work(read_trace(path))


@cache
def slow_account(path: Path) -> Account:
    return Account(path)


def ledger_of(path: Path) -> Ledger:
    work = work_of(path)
    (account,) = ledgers(work, find_steps(work))
    return account


def expected(path: Path) -> dict[str, Any]:
    text = path.with_name(path.name.replace(".json.gz", ".expected.json")).read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_numbers_are_those_that_stand_beside_it(recorded: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import cut_trace
    finally:
        sys.path.pop(0)
    told = json.loads(json.dumps(cut_trace.expected(work_of(recorded))))
    assert told == expected(recorded)


def test_every_line_is_that_of_counting_the_raw_events(recorded: Path) -> None:
    slow, account = slow_account(recorded), ledger_of(recorded)
    assert account.wall == slow.end - slow.start
    found: dict[tuple[str, str], int] = {key: ns for key, ns in account.work.items() if ns}
    for phase, cause, length in account.lines():
        if phase == "idle":
            found["idle", CAUSES[cause.partition(":")[0]]] = length
    if account.no_launch:
        found["idle", "no launch"] = account.no_launch
    counted = slow.lines()
    unknown = sum(counted.pop(key) for key in [k for k in counted if not k[0]])
    assert found == dict(counted)
    assert account.no_phase == unknown


def test_every_part_of_the_model_has_what_its_forward_made(recorded: Path) -> None:
    work, slow = work_of(recorded), slow_account(recorded)
    assert len(work) == len(slow.pieces)
    found = sorted(
        (start, end, PHASES[phase], "/".join(work.host.paths[path]))
        for start, end, phase, path in zip(
            work.start.tolist(), work.end.tolist(), work.phase.tolist(), work.path.tolist(),
            strict=True,
        )
    )  # fmt: skip
    told = sorted((p.start, p.end, slow.phase_of(p), slow.module(p.around)) for p in slow.pieces)
    assert found == told


def test_its_ledger_closes_and_its_work_is_attributed(recorded: Path) -> None:
    summary = summarize_file(recorded)
    assert summary.doubt == ""
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.wall_ms)
    assert summary.shares.kind >= 0.98
    if "_graph_" in recorded.name:
        # One launch for all of it: what it runs has no operator, and so no part of the model.
        assert summary.shares.operator == summary.shares.module == 0
    elif "train-step" in recorded.name and summary.on_device:
        assert summary.shares.backward_module >= 0.95


def test_what_is_cut_out_was_recorded_so(recorded: Path) -> None:
    events = json.loads(gzip.decompress(recorded.read_bytes()))["traceEvents"]
    marks = [e["name"] for e in events if e["name"].startswith("ProfilerStep#")]
    assert len(marks) == 1
    assert recorded.stat().st_size < 400_000
