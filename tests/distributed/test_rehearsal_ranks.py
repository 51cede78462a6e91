"""A rehearsal for real: a step recorded here, run on two ranks, and through the command line."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import CommandLine
from quiet_bench import QuietBench
from sample_records import record
from stepscope.analysis.rehearsal.recording import recording_of
from stepscope.records.schema import Record
from stepscope.studies.ddp.cases import ALONE
from stepscope.studies.registry import find_study
from stepscope.studies.rehearsal.checks import check_of
from stepscope.studies.rehearsal.measure import probe_sizes

WAYS = (ALONE, "naive", "flat", "overlap", "bucketed 1 MiB")


def is_run_and_predicted(held: Record) -> None:
    steps = {(s.variant, s.rank) for s in held.series if s.name == "step" and s.variant}
    assert steps == {(way, rank) for way in WAYS for rank in (0, 1)}
    (result,) = find_study("rehearsal").results([held])
    check, recording = check_of(*result), recording_of(held)
    assert check is not None
    assert recording is not None
    assert [row.way for row in check.verdict.rows] == list(WAYS[1:])
    assert all(row.predicted_ms > recording.compute_ms for row in check.verdict.rows)
    assert check.verdict.channel.line.bytes_per_ms > 0


def test_every_way_is_run_with_real_compute_and_predicted() -> None:
    study = find_study("rehearsal")
    flags = study.flags(
        size=("tiny",), context=(8,), batch=(1,), steps=2, check_ranks=(2,), bucket_mb=(1.0,),
        rounds=2, compute="real",
    )  # fmt: skip
    _, case = study.cases(flags)
    done = study.measure(case, QuietBench())
    held = record(
        study="rehearsal", case=case.key, config=case.config, series=done.series,
        quantities=done.quantities, notes=done.notes, attachments=done.attachments,
    )  # fmt: skip
    assert held.notes["compute"] == "real"
    is_run_and_predicted(held)


def test_the_link_is_probed_up_to_all_gradients() -> None:
    assert probe_sizes(100) == (4096, 8192, 16384)
    assert probe_sizes(2**20) == (2**12, 2**16, 2**19, 2**20)
    assert probe_sizes(12_339_712) == (2**12, 2**16, 2**20, 6_169_856, 12_339_712)


def test_from_the_recording_through_waiting_ranks_to_the_page(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.know_ceilings()
    words = (
        "--size", "tiny", "--context", "8", "--batch", "1", "--steps", "2", "--check-ranks", "2",
        "--bucket-mb", "1", "--rounds", "2", "--compute", "waits", "--device", "cpu", "--json",
    )  # fmt: skip
    done = cli("run", "rehearsal", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 2}
    recorded, checked = cli.records()
    is_run_and_predicted(checked)
    held = recording_of(checked)
    assert held is not None
    # Ranks that wait can be late, never early.
    for series in checked.series:
        if series.name == "step" and series.variant:
            assert min(series.values) > 0.9 * held.compute_ms, series.label
    told = cli("rehearse", "--ranks", "8", "--link", "ethernet", "--json")
    assert told.returncode == 0, told.stderr
    (facts,) = json.loads(told.stdout)["rehearsals"]
    assert facts["case"] == recorded.case
    assert facts["gradient_bytes"] == 12_339_712
    assert "Predicted overlap" in (cli.out / "rehearsal.html").read_text()
