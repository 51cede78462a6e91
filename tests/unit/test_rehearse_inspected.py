"""Rehearsal of an inspected step: phases, even gradients, memory of a rank, many ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from stepscope.analysis.rehearsal.memory import StepMemory, memory_per_rank
from stepscope.analysis.rehearsal.recording import even_recording
from stepscope.analysis.trace.summary import LedgerLine
from stepscope.cli import main
from stepscope.records.jsonl import read_records
from stepscope.records.sharing import Sharing
from stepscope.studies.rehearsal.inspected import inspected_subject
from stepscope.studies.rehearsal.subject import Subject
from stepscope.views.program.rows import ProgramRecord
from stepscope.views.program.setting import setting_of

RESULTS = Path(__file__).resolve().parents[2] / "results"
GPT = RESULTS / "advise-nano_gpt_h200.jsonl"


def subject() -> Subject:
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    found = inspected_subject(record)
    assert found is not None
    return found


def test_the_phases_add_up_to_the_timed_step() -> None:
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    found = subject()
    step = record.find("step")
    assert step is not None
    assert min(step.values) <= found.recording.compute_ms <= max(step.values)
    assert found.recording.gradient_bytes == 4 * int(record.quantity("parameters") or 0)
    assert found.recording.half_ready() == pytest.approx(0.5, abs=0.02)
    setting = setting_of(record)
    assert setting is not None
    assert len(found.recording.gradients) == sum(one.tensors for one in setting.optimizers)
    assert not found.gradients_timed


def test_a_rank_of_several_is_rehearsed_by_what_it_computes() -> None:
    """A tenth of its step waits for others, and FSDP2 leaves it an eighth of the parameters."""
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    summary, setting = ProgramRecord(record).summary, setting_of(record)
    alone = subject()
    assert summary is not None
    assert setting is not None
    assert alone.memory is not None
    waits = LedgerLine(phase="backward", kind="communication", ms=0.1 * summary.wall_ms)
    phases = summary.phases | {"backward": summary.phases["backward"] + waits.ms}
    sharing = Sharing(kind="fsdp2", units=4)
    notes = {
        "profile": replace(
            summary, phases=phases, lines=(*summary.lines, waits), steps=(1.1 * summary.wall_ms,)
        ),
        "setting": replace(setting, sharing=sharing),
    }
    rank = replace(
        record,
        config=record.config | {"ranks": 8},
        attachments=record.attachments | {name: to_builtins(one) for name, one in notes.items()},
    )
    found = inspected_subject(rank)
    assert found is not None
    assert found.memory is not None
    for one, alike in (("forward_ms", 1.0), ("backward_ms", 1.0), ("optimizer_ms", 8.0)):
        expected = alike * getattr(alone.recording, one) / 1.1
        assert getattr(found.recording, one) == pytest.approx(expected, rel=1e-6), one
    assert found.memory.kept == pytest.approx(8 * alone.memory.kept)
    assert found.memory.peak - found.memory.kept == pytest.approx(
        alone.memory.peak - alone.memory.kept
    )


def test_even_gradients_cover_all_parameters_the_last_ones_first() -> None:
    recording = even_recording(10.0, 20.0, 1.0, parameters=1003, gradients=10)
    assert sum(one.item.elements for one in recording.gradients) == 1003
    ready = [one.ready for one in recording.gradients]
    assert ready == sorted(ready, reverse=True)
    assert (ready[0], ready[-1]) == (20.0, 2.0)
    assert recording.compute_ms == 31.0


def test_memory_of_a_rank() -> None:
    step = StepMemory(peak=100.0, parameters=20.0, gradients=20.0, state=40.0)
    assert memory_per_rank(step, "fsdp", 1, 1.0) == 100.0
    assert memory_per_rank(step, "overlap", 8, 1.0) == 100.0
    assert memory_per_rank(step, "bucketed", 8, 1.0) == 120.0
    assert memory_per_rank(step, "sharded", 4, 1.0) == 120.0 - 30.0
    # Activations, a quarter of the rest, and three units.
    assert memory_per_rank(step, "fsdp", 4, 1.0) == 20.0 + 80.0 / 4 + 3.0
    # Gathering everything at once saves nothing.
    assert memory_per_rank(step, "fsdp", 4, 1e9) == 100.0


def test_the_command_predicts_up_to_4096_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rehearse", str(GPT), "--ranks", "8", "4096", "--link", "infiniband"]
    words += ["--strategy", "bucketed", "fsdp", "--bucket-mb", "25", "--out", str(tmp_path)]
    assert main([*words, "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["rehearsals"]
    few, many = facts["predictions"]
    assert (few["ranks"], many["ranks"]) == (8, 4096)
    for strategy in ("bucketed", "fsdp"):
        assert many["strategies"][strategy]["step_ms"] >= few["strategies"][strategy]["step_ms"]
    assert many["strategies"]["fsdp"]["memory_bytes"] < few["strategies"]["fsdp"]["memory_bytes"]
    assert few["strategies"]["fsdp"]["memory_bytes"] < few["strategies"]["bucketed"]["memory_bytes"]
    assert main([*words, "--full"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "assumed to become ready evenly" in output
    assert "memory per rank" in (tmp_path / "rehearsal.html").read_text()


def test_a_record_without_a_trace_is_not_a_step() -> None:
    (record,) = (one for one in read_records(GPT) if one.study == "inspect")
    assert inspected_subject(replace(record, attachments={})) is None
