"""docs/cs336.md: every problem of the course has a command that runs and an answer."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from course_page import PROBLEMS, Problem, course_page  # noqa: E402

from stepscope.cli.commands.run import StudyOptions  # noqa: E402
from stepscope.cli.common import parse  # noqa: E402
from stepscope.studies.registry import find_study  # noqa: E402

ASSIGNED = (
    "benchmarking_script",
    "nsys_profile",
    "mixed_precision_accumulation",
    "benchmarking_mixed_precision",
    "memory_profiling",
    "pytorch_attention",
    "torch_compile",
    "flash_forward",
    "flash_backward",
    "flash_benchmarking",
    "distributed_communication_single_node",
    "naive_ddp",
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters",
    "ddp_overlap_individual_parameters_benchmarking",
    "ddp_overlap_bucketed",
    "ddp_overlap_bucketed_benchmarking",
    "communication_accounting",
    "optimizer_state_sharding",
    "optimizer_state_sharding_accounting",
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_the_command_of_a_problem_has_cases(problem: Problem) -> None:
    program, command, name, *words = shlex.split(problem.command)
    assert (program, command) == ("stepscope", "run")
    study = find_study(name)
    fields = [("cases", study.flags), ("run", StudyOptions)]
    request = parse(dataclasses.make_dataclass("StudyRun", fields), words, f"run {name}", "", ())
    assert study.planned(request.cases)


def test_every_problem_is_answered() -> None:
    names = [problem.name for problem in PROBLEMS]
    assert set(ASSIGNED) <= set(names)
    text = course_page(ROOT / "results")
    assert text.count("\n> ") == len(PROBLEMS)
    for name in names:
        assert f"## {name}\n" in text
