"""Every study: its presets, and its view of any records."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from fp8_records import training_record
from grading_records import criterion_record
from mixed_records import COLD, FAILURES, mixed_records
from own_records import inspected_record, own_record, tried
from parallel_records import (
    collective_record,
    ddp_record,
    fsdp_record,
    leaderboard_record,
    sharding_record,
)
from precision_records import autocast_record, sum_record
from rehearsal_records import recorded_record
from sample_records import environment
from step_records import (
    compile_record,
    rung_record,
)
from stepscope.cli.answer import SCREEN
from stepscope.cli.commands import show
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Record
from stepscope.report import html
from stepscope.report.blocks import Figure, Table
from stepscope.report.text import markdown_page
from stepscope.studies.page import answers, make_page, study_sections
from stepscope.studies.presets import PRESETS, preset_cases
from stepscope.studies.registry import all_studies, find_study, viewables
from study_records import (
    attention_record,
    benchmark_record,
    checkpointing_record,
    flash_record,
    memory_record,
    profile_record,
    warmup_record,
)
from technique_records import technique_record
from view_blocks import figures_of, findings_of

ON_CPU = environment(device_kind="cpu", device_name="Xeon", driver=None, power_limit_w=None)
ON_GPU = environment()
NEED_A_STEP = {"own", "inspect", "advise"}
"""Studies of a step that only a user can provide."""


def test_every_study_is_tested_here() -> None:
    assert set(mixed_records()) == set(viewables())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("where", [ON_CPU, ON_GPU], ids=["cpu", "cuda"])
def test_every_preset_has_cases_of_every_study_with_distinct_keys(
    preset: str, where: object
) -> None:
    cases = preset_cases(preset, where)  # type: ignore[arg-type]
    assert {case.study for case in cases} == set(all_studies()) - NEED_A_STEP
    assert len({(case.study, case.key) for case in cases}) == len(cases) > 0


def test_a_case_that_two_parts_of_a_preset_share_occurs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once = preset_cases("quick", ON_CPU)
    for study in all_studies().values():
        share = study.presets(ON_CPU).get("quick", ())
        monkeypatch.setattr(study, "presets", lambda _, share=share: {"quick": (*share, *share)})
    assert preset_cases("quick", ON_CPU) == once


def test_one_study_has_its_share_of_a_preset_in_the_same_order() -> None:
    every = preset_cases("h200", environment())
    share = preset_cases("h200", environment(), "profile")
    assert share == tuple(case for case in every if case.study == "profile")
    assert {case.config["context"] for case in share[:18]} == {512}
    assert {case.config["context"] for case in share[18:28]} == {128}


def test_the_quick_preset_compiles_nothing_on_a_cpu_and_fits() -> None:
    for case in preset_cases("quick", ON_CPU):
        assert "compiler" not in case.needs
        assert case.config.get("subject", "toy") in ("toy", "tiny")
        assert case.config.get("size", "tiny") in ("tiny", "mini", "midi")
        assert case.config.get("seq", 0) <= 512


def test_a_preset_or_study_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"preset 'quik' does not exist.*perhaps you meant quick"):
        preset_cases("quik", ON_CPU)
    with pytest.raises(UsageError, match=r"study 'bench' does not exist.*benchmark"):
        find_study("bench")


def pages_hold(records: list[Record]) -> None:
    """Check every block: rows as wide as their table, and both pages can be written."""
    for study in dict.fromkeys(record.study for record in records):
        for block in viewables()[study].view([r for r in records if r.study == study]):
            if isinstance(block, Table):
                assert {len(row) for row in block.rows} <= {len(block.columns)}, block.name
            if isinstance(block, Figure):
                assert all(len(c.x) == len(c.y) for c in block.curves), block.name
    page = make_page(records)
    shown, text = html.html_page(page), markdown_page(page).replace("\\", "")
    assert "<b>no</b>" not in shown
    for record in records:
        assert record.case in shown
        assert record.case in text


@pytest.mark.parametrize("study", viewables())
class TestViews:
    def test_of_records_with_every_outcome(self, study: str) -> None:
        records = mixed_records()[study]
        assert {record.status for record in records} == {"ok", *FAILURES}
        pages_hold(records)

    def test_of_a_single_record(self, study: str) -> None:
        for record in mixed_records()[study]:
            pages_hold([record])

    def test_of_no_record_that_is_ok(self, study: str) -> None:
        records = [record for record in mixed_records()[study] if record.status != "ok"]
        pages_hold(records)
        assert not figures_of(viewables()[study].view(records))

    def test_on_a_cpu_without_ceilings(self, study: str) -> None:
        make = {
            "benchmark": benchmark_record,
            "warmup": lambda **how: warmup_record(COLD, **how),
            "attention": attention_record,
            "profile": profile_record,
            "memory": memory_record,
            "checkpointing": checkpointing_record,
            "accumulation": sum_record,
            "autocast": autocast_record,
            "fp8": training_record,
            "flash": flash_record,
            "compile": compile_record,
            "step": rung_record,
            "allreduce": collective_record,
            "ddp": ddp_record,
            "sharding": sharding_record,
            "fsdp": fsdp_record,
            "leaderboard": leaderboard_record,
            "rehearsal": recorded_record,
            "techniques": technique_record,
            "own": own_record,
            "inspect": inspected_record,
            "advise": tried,
            "check": criterion_record,
        }
        pages_hold([make[study](environment=ON_CPU, ceilings=())])


def test_a_page_without_records_is_refused() -> None:
    with pytest.raises(StepscopeError, match="no records to show"):
        make_page([])


def test_the_summary_of_every_study_fits_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record for of_study in mixed_records().values() for record in of_study]
    write_records(records, tmp_path / "all.jsonl")
    assert show.main([str(tmp_path / "all.jsonl")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN
    assert sum("Benchmark" in line for line in lines) == 1
    assert any(re.match(r"\d+ more: ", line) for line in lines)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_summary_has_full_answers_where_they_fit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    records = mixed_records()["ddp"] + mixed_records()["sharding"]
    monkeypatch.chdir(tmp_path)
    write_records(records, Path("two.jsonl"))
    assert show.main(["two.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    expected = [f"{title}: {text}" for title, text in answers(list(study_sections(records)))]
    assert len(expected) == 2
    assert any(len(answer) > width for answer in expected)
    for answer in expected:
        assert answer in text


def test_what_the_machine_lacks_is_one_finding() -> None:
    ran = benchmark_record()
    lacking = [
        msgspec.structs.replace(ran, id=f"x{n}", case=f"x{n}", status="skipped", reason=reason)
        for n, reason in enumerate(["no GPU; use another", "no GPU; use another", "no TF32: old"])
    ]
    (section,) = [s for s in make_page([ran, *lacking]).sections if s.name == "machine"]
    (finding,) = findings_of(section.blocks)
    assert finding.text == "3 of 4 cases cannot run here: no GPU (2); no TF32 (1)."


def test_the_page_of_viewables_has_their_sections_in_order() -> None:
    records = [record for of_study in mixed_records().values() for record in of_study]
    pages_hold(records)
    names = [section.name for section in make_page(records[::-1]).sections]
    assert names == [
        "inspect",
        "own",
        "advise",
        "check",
        "benchmark",
        "warmup",
        "profile",
        "memory",
        "checkpointing",
        "accumulation",
        "autocast",
        "fp8",
        "attention",
        "flash",
        "compile",
        "step",
        "allreduce",
        "ddp",
        "sharding",
        "fsdp",
        "leaderboard",
        "rehearsal",
        "techniques",
        "machine",
        "records",
    ]
