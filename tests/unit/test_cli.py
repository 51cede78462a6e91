"""Commands that read a store, on a store with known records."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prepared_store import Desk, Said, fill, one_line, run_of
from sample_records import record, run
from stepscope.analysis.compare import Comparison
from stepscope.cli import COMMANDS, main
from stepscope.cli.answer import SCREEN
from stepscope.cli.commands import compare as compare_command
from stepscope.cli.commands import doctor as doctor_command
from stepscope.cli.commands.inspect import InspectOptions
from stepscope.cli.scripts import misplaced_options, split_words
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.schema import FailedCheck, Record
from stepscope.records.store import Store
from stepscope.studies.registry import all_studies

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    prepared = Desk(tmp_path / "out", capsys)
    fill(prepared.store, {"base": run_of("base"), "new": run_of("new", step=110.0), "empty": []})
    return prepared


def parsed(output: Said) -> Any:
    assert output.code == 0, output.err
    assert output.out.count("\n") == 1
    return json.loads(output.out)


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        assert all(f"\n  {name} " in text for name in COMMANDS)
        assert all(f"\n  {code} " in text for code in (0, 1, 2, 3, 4, 130))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("stepscope ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f"stepscope {command}" in text
    assert "{None}" not in text
    assert "\nexamples:\n" in text
    summary = text.split("\n\n")[1]
    assert summary[0].isupper()
    for empty in ("(default: '')", "(default: )", "(default: none)", "(default: False)"):
        assert empty not in " ".join(text.split())
    if command in ("inspect", "advise"):
        usage = f"usage: stepscope {command} [-h] [OPTIONS] SCRIPT [ARGUMENTS …]"
        assert text.splitlines()[0] == usage


@pytest.mark.parametrize("study", all_studies())
def test_the_help_of_every_study_documents_its_flags(
    study: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["run", study, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.replace("│", " ").split())
    for flag in all_studies()[study].flags.__struct_fields__:
        assert f"--{flag.replace('_', '-')}" in text
    assert "(default: '')" not in text
    assert "Time limit of each case, in seconds. (default: 600)" in text


def test_flags_after_a_script_are_its_own() -> None:
    words = ["--steps", "3", "train.py", "--steps", "4"]
    assert split_words(words, InspectOptions) == (["--steps", "3"], "train.py", ["--steps", "4"])


def test_options_after_a_script_are_named() -> None:
    words = ["--lr", "1", "--warmup=3", "--stop-early"]
    assert misplaced_options(words, InspectOptions).endswith(": --warmup=3, --stop-early")
    assert misplaced_options(["--lr", "1"], InspectOptions) == ""


def test_show_prints_findings_and_tables(desk: Desk) -> None:
    output = desk("show", "new", "--full")
    assert output.code == 0
    for part in (
        "Backward pass over forward pass",
        "tokens/s",
        "first step takes 300 ms",
    ):
        assert part in " ".join(output.out.split())
    only = desk("show", "new", "--study", "warmup")
    assert "first step" in " ".join(only.out.split())
    assert "Backward pass over" not in " ".join(only.out.split())


def test_show_prints_the_verdict_and_a_line_for_each_study(desk: Desk) -> None:
    said = desk("show", "new")
    assert said.code == 0
    lines = said.out.splitlines()
    assert len(lines) <= SCREEN
    assert lines[1].startswith("A step takes 110 ms.")
    titles = [line.partition(":")[0] for line in lines if ": " in line]
    assert titles[-3:] == ["Benchmark", "Warm-up", "All tables"]


def test_show_prints_all_of_one_record(desk: Desk) -> None:
    with Store(desk.store) as store:
        record = store.records("new")[1]
    assert json.loads(desk("show", record.id).out)["id"] == record.id
    (value,) = parsed(desk("show", record.id, "--json"))["records"]
    assert value["case"] == record.case
    assert value["failed_checks"] == []
    facts = parsed(desk("show", "new", "--json"))
    assert len(facts["records"]) == 4
    assert facts["verdict"]["step_ms"] == pytest.approx(110)


def test_show_takes_the_name_of_a_study(desk: Desk) -> None:
    named = desk("show", "warmup")
    assert named.code == 0
    assert named.out == desk("show", "new", "--study", "warmup").out
    assert "first step" in " ".join(named.out.split())


def test_report_writes_both_pages_and_prints_their_paths(desk: Desk) -> None:
    output = desk("report", "new")
    assert output.code == 0
    for name in ("report.html", "report.md"):
        assert str(desk.out / name) in output.out
    html = (desk.out / "report.html").read_text()
    assert html.startswith("<!doctype html>")
    with Store(desk.store) as store:
        assert all(record.id in html for record in store.records("new"))
        assert not any(record.id in html for record in store.records("base"))
    facts = parsed(desk("report", "base", "--json"))
    assert facts.pop("verdict")["next"]
    assert facts == {
        "report": str(desk.out / "report.html"),
        "markdown": str(desk.out / "report.md"),
        "trust": {"good": 3, "noisy": 0, "invalid": 0},
    }
    assert sorted(p.name for p in desk.out.iterdir() if "report" in p.name) == [
        "report.html",
        "report.md",
    ]


def test_a_traced_step_is_exported_for_speedscope(tmp_path: Path, desk: Desk) -> None:
    source = str(RESULTS / "advise-slow_h200.jsonl")
    path = tmp_path / "step.json"
    output = desk("export", source, "--format", "speedscope", "--to", str(path), "--json")
    assert parsed(output) == {"files": [str(path)]}
    exported = json.loads(path.read_text())
    assert [profile["unit"] for profile in exported["profiles"]] == ["milliseconds", "bytes"]
    assert all(profile["samples"] for profile in exported["profiles"])
    refused = desk("export", str(RESULTS / "h200.jsonl"), "--format", "speedscope")
    assert refused.code == 2
    assert "no traced step" in refused.err


def test_export_and_import_preserve_records(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "carried.jsonl"
    assert parsed(desk("export", "new", "--to", str(file), "--json")) == {"files": [str(file)]}
    with Store(desk.store) as store:
        assert read_records(file) == store.records("new")
    elsewhere = tmp_path / "elsewhere"
    other = Desk(elsewhere, desk._capture)
    facts = parsed(other("import", str(file), "--json"))
    assert (facts["added"], facts["skipped"]) == (4, 0)
    facts = parsed(other("import", str(file), "--json"))
    assert (facts["added"], facts["skipped"]) == (0, 4)
    with Store(desk.store) as one, Store(other.store) as two:
        assert one.records("new") == two.records()
    assert desk("report", str(file)).code == 0


def test_export_excludes_cases_and_rounds_samples(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    with Store(desk.store) as store:
        records = store.records("new")
    pattern = f"{records[0].case[:6]}*"
    left = [record for record in records if not record.case.startswith(records[0].case[:6])]
    assert 0 < len(left) < len(records)
    desk("export", "new", "--leave-out", pattern, "--digits", "4", "--to", str(file))
    saved = read_records(file)
    assert [record.id for record in saved] == [record.id for record in left]
    for short, long in zip(saved, left, strict=True):
        assert short.quantities == long.quantities
        for rounded_series, series in zip(short.series, long.series, strict=True):
            assert rounded_series.values == tuple(float(f"{value:.4g}") for value in series.values)
            assert rounded_series.warmup == tuple(float(f"{value:.4g}") for value in series.warmup)
    one_line(desk("export", "new", "--leave-out", "*"), 2, "excludes all of 4 records")
    one_line(desk("export", "new", "--digits", "2"), 2, "2 digits would change")
    one_line(
        desk("export", "new", "--digits", "6", "--format", "csv"), 2, "--digits applies to samples"
    )


def test_export_without_a_path_is_written_next_to_the_store(desk: Desk) -> None:
    assert "wrote" in desk("export", "base").err
    assert len(read_records(desk.out / "base.jsonl")) == 4


@pytest.mark.parametrize(
    ("file_format", "mark"),
    [("markdown", "| --"), ("latex", r"\begin{tab"), ("csv", "size,d_model")],
)
def test_export_prints_one_table_in_every_format(desk: Desk, file_format: str, mark: str) -> None:
    output = desk("export", "new", "--format", file_format, "--table", "benchmark-times")
    assert output.code == 0
    assert mark in output.out
    assert "small" in output.out


def test_export_writes_all_tables(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    files = parsed(desk("export", "new", "--format", "csv", "--to", str(folder), "--json"))["files"]
    names = {"benchmark-times.csv", "benchmark-throughput.csv", "warmup-steps.csv"}
    assert {Path(name).name for name in files} >= names
    rows = list(csv.reader((folder / "benchmark-times.csv").open()))
    assert [row[0] for row in rows] == ["size", "small", "xl"]
    assert "OOM" in rows[2]
    one = tmp_path / "all.md"
    desk("export", "new", "--format", "markdown", "--to", str(one))
    assert one.read_text().count("| --") >= 3


def test_export_of_several_tables_does_not_fit_one_csv(desk: Desk) -> None:
    output = desk("export", "new", "--format", "csv")
    one_line(output, 2, "do not fit into one CSV", "--to", "benchmark-times")


def test_compare_gives_a_verdict_for_every_case(desk: Desk) -> None:
    output = desk("compare", "base", "new")
    assert output.code == 0
    assert "2 slower" in output.out
    result = parsed(desk("compare", "base", "new", "--json"))
    by_case = {c["case"]: c for c in result["comparisons"]}
    slower = by_case["small_c512_b4_float32_reference_train-step"]
    assert slower["verdict"] == "slower"
    assert slower["ratio"]["value"] == pytest.approx(1.1, rel=1e-3)
    lost = by_case["xl_c512_b4_float32_reference_train-step"]
    assert (lost["verdict"], "out of memory" in lost["note"]) == ("not compared", True)
    assert result["beyond_limit"] == []


@pytest.mark.parametrize(("limit", "code"), [("3%", 3), ("0.03", 3), ("15%", 0), ("0.15", 0)])
def test_gate_fails_only_beyond_its_limit(desk: Desk, limit: str, code: int) -> None:
    output = desk("compare", "base", "new", "--fail-above", limit)
    assert output.code == code
    assert (f"beyond {limit}: benchmark small_c512" in output.out) == (code == 3)
    output = desk("compare", "base", "new", "--fail-above", limit, "--json")
    assert (output.code, len(json.loads(output.out)["beyond_limit"])) == (code, 2 if code else 0)
    assert desk("compare", "new", "base", "--fail-above", limit).code == 0


def test_compare_as_a_comment_in_markdown(desk: Desk) -> None:
    output = desk("compare", "base", "new", "--markdown")
    assert (output.code, output.out.splitlines()[0]) == (
        0,
        "### Stepscope: 2 slower, 1 not compared, 1 no difference shown",
    )
    assert output.out.count("| slower |") == 2
    for limit, code, answer in (
        ("3%", 3, "❌ 2 cases lost, or slower by more than 3%"),
        ("15%", 0, "✅ no case is slower by more than 15%"),
    ):
        output = desk("compare", "base", "new", "--markdown", "--fail-above", limit)
        assert (output.code, output.out.splitlines()[0]) == (code, f"### Stepscope: {answer}")


def test_gate_cannot_judge_two_runs_of_a_busy_machine(desk: Desk) -> None:
    """The same benchmark twice, both flagged: a third slower, but no verdict."""
    busy = FailedCheck(code="busy-machine", message="threads waited for a core")
    for name, step in (("one", 100.0), ("two", 133.0)):
        saved = [msgspec.structs.replace(r, failed_checks=(busy,)) for r in run_of(name, step=step)]
        fill(desk.store, {name: saved})
    output = desk("compare", "one", "two")
    assert (output.code, "slower" in output.out) == (0, False)
    output = desk("compare", "one", "two", "--fail-above", "3%")
    assert output.code == 4
    assert "not judged, cannot tell: benchmark small_c512" in output.out
    output = desk("compare", "one", "two", "--fail-above", "3%", "--json")
    assert output.code == 4
    result = json.loads(output.out)
    assert result["beyond_limit"] == []
    assert len(result["cannot_tell"]) == 3
    assert desk("compare", "base", "two", "--fail-above", "3%").code == 4


def test_gate_cannot_judge_samples_that_depend_on_each_other(desk: Desk) -> None:
    """Random walks around the same level: independent samples would be 6 % slower."""

    def wandering(record: Record, seed: int, level: float) -> Record:
        walk = np.cumsum(np.random.default_rng(seed).normal(0.0, 0.006, 30))
        values = tuple((level * np.exp(walk - np.median(walk))).tolist())
        first, *_ = record.series
        return msgspec.structs.replace(
            record, series=(msgspec.structs.replace(first, values=values),), failed_checks=()
        )

    for seed, (name, level) in enumerate({"walk": 100.0, "walk-again": 106.0}.items()):
        fill(desk.store, {name: [wandering(run_of(name)[0], seed, level)]})
    assert desk("compare", "walk", "walk-again").code == 0
    output = desk("compare", "walk", "walk-again", "--fail-above", "3%")
    assert output.code == 4
    assert "not judged, cannot tell: benchmark small_c512" in output.out
    output = desk("compare", "walk", "walk-again", "--fail-above", "3%", "--markdown")
    assert output.code == 4
    assert output.out.startswith("### Stepscope: ⚠️ cannot tell for 1 case")
    result = parsed(desk("compare", "walk", "walk-again", "--json"))
    (comparison,) = result["comparisons"]
    assert re.search(r"base: 30 samples count as \d+", comparison["note"])
    assert comparison["ratio"]["low"] < 1 < comparison["ratio"]["high"]
    fill(desk.store, {"walk-slow": [wandering(run_of("walk-slow")[0], 1, 200.0)]})
    assert desk("compare", "walk", "walk-slow", "--fail-above", "3%").code == 3


def test_certain_slowdown_outweighs_undecided_cases(desk: Desk) -> None:
    busy = FailedCheck(code="busy-machine", message="threads waited for a core")
    first, *rest = run_of("mixed", step=133.0)
    fill(desk.store, {"mixed": [msgspec.structs.replace(first, failed_checks=(busy,)), *rest]})
    output = desk("compare", "base", "mixed", "--fail-above", "3%")
    assert output.code == 3
    assert "beyond 3%: benchmark small_c512" in output.out
    assert "not judged, cannot tell: " in output.out


def test_gate_cannot_judge_too_few_samples(desk: Desk) -> None:
    def few(record: Record) -> Record:
        cut = (msgspec.structs.replace(s, values=s.values[:3]) for s in record.series)
        return msgspec.structs.replace(record, series=tuple(cut))

    fill(desk.store, {"few": [few(record) for record in run_of("few")]})
    assert desk("compare", "base", "few").code == 0
    output = desk("compare", "base", "few", "--fail-above", "3%")
    assert output.code == 4
    assert "not judged, too few samples: " in output.out


def test_compared_times_have_their_unit(desk: Desk) -> None:
    assert "(ms)" in desk("compare", "base", "new").out
    times = Comparison(study="s", case="a", verdict="slower", unit="ms", base=1.0, new=2.0)
    table = compare_command.comparison_table((times,))
    assert [column.unit for column in table.columns[2:4]] == ["ms", "ms"]
    mixed = compare_command.comparison_table((times, msgspec.structs.replace(times, unit="s")))
    assert [row[4] for row in mixed.rows] == ["ms", "s"]
    assert {len(row) for row in mixed.rows} == {len(mixed.columns)}


def test_gate_that_is_not_a_fraction_is_refused(desk: Desk) -> None:
    for text in ("three", "-3%", "3 %", "%", "3"):
        one_line(desk("compare", "base", "new", f"--fail-above={text}"), 2, "--fail-above", "3%")


def test_different_machines_are_compared_with_across(desk: Desk) -> None:
    fill(desk.store, {"a10": run_of("a10", step=400.0, device="NVIDIA A10")})
    one_line(desk("compare", "base", "a10"), 1, "NVIDIA H200 / NVIDIA A10", "--across")
    result = parsed(desk("compare", "base", "a10", "--across", "--json"))["comparisons"]
    assert "own ceiling" in result[0]["note"]


def test_two_records_are_compared_and_a_run_is_not_a_record(desk: Desk) -> None:
    with Store(desk.store) as store:
        base, new = (store.records(name)[1].id for name in ("base", "new"))
    assert len(parsed(desk("compare", base, new, "--json"))["comparisons"]) == 1
    one_line(desk("compare", "base", new), 2, "a run and a single record")


def test_runs_without_a_case_in_common_are_refused(desk: Desk, tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    write_records(run_of("other")[3:], file)
    other = tmp_path / "bench.jsonl"
    write_records(run_of("other")[:2], other)
    one_line(desk("compare", str(file), str(other)), 2, "no measured case in common")


def test_only_an_unfinished_run_lists_how_to_resume(desk: Desk) -> None:
    with Store(desk.store) as store:
        for name, cases in (("more", 1), ("open", 3)):
            store.add_run(run(id=name, cases=cases, command="go on"))
            for case in ("base", "trial"):
                store.add(record(id=f"{name}-{case}", run=name, case=case))
    text = {
        row["run"]: (row["done"], row["cases"], row["resume with"])
        for row in parsed(desk("list", "runs", "--json"))["runs"]
    }
    assert (text["more"], text["open"]) == ((2, 2, ""), (2, 3, "go on"))


def test_list_prints_every_table(desk: Desk) -> None:
    facts = parsed(desk("list", "--json"))
    assert set(facts) >= {"studies", "presets", "sizes", "dtypes", "runs"}
    assert [run["run"] for run in facts["runs"]] == ["empty", "new", "base"]
    assert facts["runs"][1]["done"] == facts["runs"][1]["cases"] == 4
    assert {size["name"] for size in facts["sizes"]} >= {"small", "xl", "2.7b", "10b", "tiny"}
    assert set(parsed(desk("list", "presets", "--json"))) == {"presets"}
    output = desk("list")
    assert all(word in output.out for word in ("benchmark", "quick", "bfloat16", "Runs in"))


class NoWorker:
    def __init__(self, device: str) -> None:
        raise StepscopeError(f"no worker for {device}")


def test_doctor_distinguishes_broken_from_missing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = parsed(desk("doctor", "--json"))
    checks = {check["what"]: check for check in facts["checks"]}
    assert checks["torch"]["verdict"] == checks["output folder"]["verdict"] == "ok"
    assert checks["CPU"]["verdict"] == "ok"
    assert all(c["fix"] for c in checks.values() if c["verdict"] in ("missing", "broken"))
    if checks["GPU"]["verdict"] != "ok":
        for what in ("GPU", "Nsight Systems", "TF32 matmuls", "CUDA graphs", "cuBLAS"):
            assert checks[what]["verdict"] == "not applicable"
            assert checks[what]["found"]

    monkeypatch.setattr(doctor_command, "WorkerProcess", NoWorker)
    output = desk("doctor")
    assert output.code == 1
    assert "no worker for auto" in " ".join(output.out.split())


def test_doctor_detects_an_unwritable_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor_command, "_device", lambda: iter(()))
    output = Desk(tmp_path / "file", capsys)("doctor", "--json")
    (check,) = [c for c in json.loads(output.out)["checks"] if c["what"] == "output folder"]
    assert (output.code, check["verdict"]) == (1, "broken")
    assert "--out" in check["fix"]
