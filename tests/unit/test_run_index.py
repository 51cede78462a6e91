"""Runs keep their pages, and an index lists them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from stepscope.cli.answer import AnswerOptions
from stepscope.cli.commands.report import write_report
from stepscope.records.jsonl import read_records
from stepscope.report.run_index import RunEntry, index_page, read_entries

RESULTS = Path(__file__).parents[2] / "results"


def test_a_second_run_leaves_the_first_one_alone(tmp_path: Path) -> None:
    first = read_records(RESULTS / "advise-slow_cpu.jsonl")
    second = tuple(msgspec.structs.replace(one, run="20990101-000000-ffff") for one in first)
    write_report(first, AnswerOptions(out=tmp_path, json=True))
    kept = tmp_path / first[0].run / "report.html"
    before = kept.read_text()
    write_report(second, AnswerOptions(out=tmp_path, json=True))
    assert kept.read_text() == before
    latest = (tmp_path / "report.html").read_text()
    assert latest == (tmp_path / second[0].run / "report.html").read_text()
    entries = read_entries(tmp_path)
    assert [entry.run for entry in entries] == [second[0].run, first[0].run]
    assert entries[0].answer.startswith("A step takes")
    index = (tmp_path / "index.html").read_text()
    assert f'href="{first[0].run}/report.html"' in index
    shown = re.sub(r"</?span>", "", index)
    assert f"stepscope compare {first[0].run} {second[0].run}" in shown


def test_only_runs_of_one_subject_are_compared() -> None:
    def entry(run: str, title: str, step_ms: float, subject: str = "step") -> RunEntry:
        return RunEntry(run=run, title=title, subtitle="", subject=subject, step_ms=step_ms)

    page = index_page(
        [
            entry("d", "a.py", 20.0),
            entry("c", "b.py", 5.0),
            entry("b", "a.py", 10.0),
            entry("a", "a.py", 30.0, "another step"),
        ]
    )
    shown = re.sub(r"</?span>", "", page)
    assert re.findall(r"stepscope compare (\w) (\w)", shown) == [("b", "d"), ("a", "d")]
    assert re.findall(r"The latest run of it [^<]+", shown) == [
        "The latest run of it takes 20.0 ms instead of 10.0 ms: 2.00× as long."
    ]


def test_what_is_not_an_entry_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert read_entries(tmp_path) == []
    assert "<h1>Runs</h1>" in index_page([])


def test_records_of_several_runs_have_no_folder(tmp_path: Path) -> None:
    records = read_records(RESULTS / "advise-slow_cpu.jsonl")
    mixed = (*records, *(msgspec.structs.replace(one, run="other") for one in records))
    write_report(mixed, AnswerOptions(out=tmp_path, json=True))
    assert not (tmp_path / "index.html").exists()
