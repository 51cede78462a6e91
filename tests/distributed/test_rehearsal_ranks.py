"""A rehearsal on real ranks: a step recorded here, run on two ranks, and through the CLI."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rehearsal_check import STUDY
from rehearsal_check.measure import probe_sizes
from rehearsal_check.view import check_of

from command_line import CommandLine
from quiet_bench import QuietBench
from sample_records import record
from stepscope.analysis.rehearsal.recording import recording_of
from stepscope.records.schema import Record
from stepscope.studies.ddp.cases import ALONE

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
STRATEGIES = (ALONE, "naive", "flat", "overlap", "bucketed 1 MiB")


def is_run_and_predicted(rehearsed: Record) -> None:
    steps = {(s.variant, s.rank) for s in rehearsed.series if s.name == "step" and s.variant}
    assert steps == {(strategy, rank) for strategy in STRATEGIES for rank in (0, 1)}
    (result,) = STUDY.results([rehearsed])
    check, recording = check_of(*result), recording_of(rehearsed)
    assert check is not None
    assert recording is not None
    assert [row.strategy for row in check.comparison.rows] == list(STRATEGIES[1:])
    assert all(row.predicted_ms > recording.compute_ms for row in check.comparison.rows)
    assert check.comparison.channel.line.bytes_per_ms > 0


def test_every_strategy_is_run_with_real_compute_and_predicted() -> None:
    flags = STUDY.flags(
        size=("tiny",),
        context=(8,),
        vocab=256,
        batch=(1,),
        steps=2,
        ranks=(2,),
        bucket_mb=(1.0,),
        rounds=2,
        compute="real",
    )
    (case,) = STUDY.cases(flags)
    done = STUDY.measure(case, QuietBench())
    rehearsed = record(
        study=STUDY.name,
        case=case.key,
        config=case.config,
        series=done.series,
        quantities=done.quantities,
        notes=done.notes,
        attachments=done.attachments,
    )
    assert rehearsed.notes["compute"] == "real"
    is_run_and_predicted(rehearsed)


def test_the_link_is_probed_up_to_the_size_of_all_gradients() -> None:
    assert probe_sizes(100) == (4096, 8192, 16384)
    assert probe_sizes(2**20) == (2**12, 2**16, 2**19, 2**20)
    assert probe_sizes(12_339_712) == (2**12, 2**16, 2**20, 6_169_856, 12_339_712)


def test_waiting_ranks_and_page(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.environment["STEPSCOPE_STUDIES"] = "rehearsal_check"
    cli.environment["PYTHONPATH"] += f"{os.pathsep}{BENCHMARKS}"
    cli.know_ceilings()
    step = (
        "--size",
        "tiny",
        "--context",
        "8",
        "--vocab",
        "256",
        "--batch",
        "1",
        "--steps",
        "2",
        "--device",
        "cpu",
        "--json",
    )
    ranks = ("--ranks", "2", "--bucket-mb", "1", "--rounds", "2", "--compute", "waits")
    done = cli("run", "rehearsal-check", *step, *ranks)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 1}
    (checked,) = cli.records()
    is_run_and_predicted(checked)
    recording = recording_of(checked)
    assert recording is not None
    # Ranks that wait can be late but never early.
    for series in checked.series:
        if series.name == "step" and series.variant:
            assert min(series.values) > 0.9 * recording.compute_ms, series.label
    recorded_step = cli("run", "rehearsal", *step)
    assert recorded_step.returncode == 0, recorded_step.stderr
    recorded = cli.records()[-1]
    rehearsed = cli("rehearse", "--ranks", "8", "--link", "ethernet", "--json")
    assert rehearsed.returncode == 0, rehearsed.stderr
    (facts,) = json.loads(rehearsed.stdout)["rehearsals"]
    assert facts["case"] == recorded.case
    assert facts["gradient_bytes"] == 4 * 590_464
    assert "Predicted overlap" in (cli.out / "rehearsal.html").read_text()
