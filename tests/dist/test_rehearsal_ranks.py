"""A rehearsal for real: a step recorded here, run on two ranks, and through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_parallel_studies import CpuBench

from command_line import CommandLine
from sample_records import record
from stepscope.records.schema import Record
from stepscope.studies.registry import find_study
from stepscope.studies.rehearsal.checks import check_of
from stepscope.studies.rehearsal.ranks import ALONE, probe_sizes

WAYS = (ALONE, "naive", "flat", "overlap", "bucketed 1 MiB")


def measured(compute: str) -> Record:
    study = find_study("rehearsal")
    flags = study.flags(
        size=("tiny",), context=(8,), batch=(1,), steps=2, check_ranks=(2,), bucket_mb=(1.0,),
        rounds=2, compute=compute,
    )  # fmt: skip
    _, case = study.cases(flags)
    held = study.measure(case.config, CpuBench())
    return record(
        study="rehearsal", case=case.key, config=case.config, series=held.series,
        quantities=held.quantities, notes=held.notes,
    )  # fmt: skip


@pytest.mark.parametrize("compute", ["waits", "real"])
def test_every_way_is_run_and_predicted(compute: str) -> None:
    held = measured(compute)
    assert held.notes["compute"] == compute
    steps = {(s.name, s.rank) for s in held.series if s.name.startswith("step.")}
    assert steps == {(f"step.{way}", rank) for way in WAYS for rank in (0, 1)}
    check = check_of(held)
    assert check is not None
    assert [row.way for row in check.rows] == list(WAYS[1:])
    computed = check.recording.compute_ms
    for row in check.rows:
        assert row.predicted_ms > computed
        # Ranks that wait can be late, never early.
        assert compute == "real" or min(_samples(held, f"step.{row.way}")) > 0.9 * computed
    assert check.channel.alone_link.bytes_per_ms > 0


def _samples(held: Record, name: str) -> list[float]:
    return [value for series in held.series if series.name == name for value in series.values]


def test_the_link_is_probed_up_to_all_gradients() -> None:
    assert probe_sizes(100) == (4096, 4100)
    assert probe_sizes(2**20) == (2**12, 2**16, 2**20)
    sizes = probe_sizes(12_339_712)
    assert sizes == (2**12, 2**16, 2**20, 12_339_712)


def test_from_the_recording_to_the_page(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.know_ceilings()
    words = ("--size", "tiny", "--context", "8", "--batch", "1", "--steps", "2", "--json")
    done = cli("run", "rehearsal", *words, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 1}
    told = cli("rehearse", "--ranks", "8", "--link", "ethernet", "--json")
    assert told.returncode == 0, told.stderr
    (held,) = json.loads(told.stdout)["rehearsals"]
    assert held["gradient_bytes"] == 12_339_712
    assert held["compute_ms"] > 0
    assert "Predicted overlap" in (cli.out / "rehearsal.html").read_text()
