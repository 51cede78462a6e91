"""The problems of the assignments: their names, the cases that answer them, and docs/cs336.md."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from stepscope.analysis.accounting import CALCULATIONS
from stepscope.cli import COMMANDS
from stepscope.cli.commands.run import StudyOptions
from stepscope.cli.common import parse
from stepscope.report.blocks import Finding
from stepscope.runner.estimate import TimeLeft, measured_costs
from stepscope.studies.course import EDITIONS, PROBLEMS, Edition, Part, Problem
from stepscope.studies.course.committed import committed_answers, key_of
from stepscope.studies.course.needs import NEEDS
from stepscope.studies.registry import find_study, viewables

ROOT = Path(__file__).parents[2]
HANDOUTS = json.loads((ROOT / "tests" / "fixtures" / "cs336_problems.json").read_text())
MEASURED = {name: need for name, need in NEEDS.items() if not need.committed_only}
PARTS = [(problem, part) for problem in PROBLEMS for part in problem.parts]
SETTINGS = [
    (edition, kind, quick) for edition in EDITIONS for kind in ("cpu", "cuda") for quick in (0, 1)
]
WITHOUT_RECORDS = {
    # Fields and cases that are newer than the records of the GPU.
    ("naive_ddp", ""),
}


def named(pair: tuple[Problem, Part]) -> str:
    problem, part = pair
    return f"{problem.name}{part.label}"


@pytest.mark.parametrize("edition", EDITIONS)
def test_the_problems_are_those_of_the_handout(edition: Edition) -> None:
    handout = HANDOUTS[edition]
    assert len(handout["revision"]) == 40
    own = [problem.name for problem in PROBLEMS if edition in problem.editions]
    assert own == handout["problems"]


@pytest.mark.parametrize("pair", PARTS, ids=named)
def test_a_question_has_an_answer_or_says_what_measures_it(pair: tuple[Problem, Part]) -> None:
    problem, part = pair
    assert part.question.endswith((".", "?"))
    assert part.shows or part.calculation
    for show in part.shows:
        assert show.need not in MEASURED or NEEDS[show.need].study in viewables()
        assert show.findings or show.strategies or show.blocks
    if part.calculation:
        letters = {one.part for one in CALCULATIONS[problem.name].worked().answers}
        assert part.calculation in letters
    if part.command:
        assert shlex.split(part.command)[1] in COMMANDS


def test_letters_are_unique_within_a_problem_and_an_edition() -> None:
    for problem in PROBLEMS:
        for edition in problem.in_documents_of:
            labels = [part.label for part in problem.parts_of(edition)]
            assert len(labels) == len(set(labels))
            assert labels == sorted(labels)
            assert labels


@pytest.mark.parametrize("name", MEASURED)
def test_the_printed_command_measures_the_same_cases(name: str) -> None:
    need = NEEDS[name]
    study = find_study(need.study)
    fields = [("cases", study.flags), ("run", StudyOptions)]
    kind = dataclasses.make_dataclass("StudyRun", fields)
    seen = set()
    for edition, device, quick in SETTINGS:
        command = need.command(edition, device, quick=bool(quick))
        if command in seen:
            continue
        seen.add(command)
        program, run, study_name, *words = shlex.split(command)
        assert (program, run, study_name) == ("stepscope", "run", need.study)
        request = parse(kind, words, f"run {study_name}", "")
        cases = need.cases(edition, device, quick=bool(quick))
        assert cases
        assert cases == study.planned(request.cases)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equal_keys_are_equal_cases(setting: tuple[Edition, str, int]) -> None:
    """All cases of a document are in one run, where a key stands for one case."""
    edition, device, quick = setting
    configs: dict[tuple[str, str], object] = {}
    for need in MEASURED.values():
        for case in need.cases(edition, device, quick=bool(quick)):
            assert configs.setdefault((case.study, case.key), case.config) == case.config


@pytest.mark.parametrize("edition", EDITIONS)
def test_the_quick_document_takes_minutes_on_two_cores(edition: Edition) -> None:
    cases = {
        (case.study, case.key): case
        for need in MEASURED.values()
        for case in need.cases(edition, "cpu", quick=True)
    }
    costs = measured_costs()["cpu"]
    compiled = [key for key in cases if key[0] == "compile"]
    plain = [case for key, case in cases.items() if key not in compiled]
    expected = TimeLeft(plain, {}, costs).seconds()
    assert expected is not None
    # Compiling took 26 to 62 s a case on two cores that were shared with other programs.
    assert costs.start_s + expected + 60 * len(compiled) < 600


@pytest.mark.parametrize("pair", PARTS, ids=named)
def test_committed_answers_are_findings(pair: tuple[Problem, Part]) -> None:
    problem, part = pair
    committed = committed_answers().get(key_of(problem, part))
    if part.calculation:
        return
    if committed is None or not any(isinstance(block, Finding) for block in committed.blocks):
        assert (problem.name, part.label) in WITHOUT_RECORDS
        return
    for block in committed.blocks:
        if isinstance(block, Finding):
            assert block.sentence
    assert committed.source


def test_the_page_has_every_problem() -> None:
    """`make_docs.py --check`, which test_docs.py runs, compares it with the records."""
    index = (ROOT / "docs/cs336.md").read_text().splitlines()
    for problem in PROBLEMS:
        link = f"- [{problem.name}](results/cs336/{problem.name}.md) ("
        (line,) = [line for line in index if line.startswith(link)]
        assert line.endswith((".", "`."))
        assert len(line) < 600
        page = (ROOT / f"docs/results/cs336/{problem.name}.md").read_text()
        assert page.count("```sh") == len(problem.parts)
        for part in problem.parts:
            assert f"({part.label}) " * bool(part.label) in page
