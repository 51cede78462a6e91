"""Lines of the user's code: which are named, what they cost, and that observing changes nothing."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from planted_lines import COSTLY, GOOD, planted
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.lines.costs import with_costs
from stepscope.analysis.lines.facts import ATTACHMENT, Lines, Loading, Loop, Place, Site
from stepscope.analysis.lines.observed import WAIT, Observed
from stepscope.analysis.lines.rules import costly_lines, module_loops
from stepscope.analysis.lines.syntax import Source
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.work import device_work
from stepscope.report.blocks import Flame
from stepscope.report.html import html_page
from stepscope.report.verdict import verdict_facts, verdict_lines
from stepscope.studies.page import make_page
from stepscope.views.program.rows import ProgramRecord
from stepscope.views.program.view import inspected_blocks
from trace_files import ADD, SGEMM, ChromeTrace
from view_blocks import tables_of
from watched_programs import only, watching

Run = Callable[[str], dict[str, Any]]


def run(program: str, path: Path) -> dict[str, Any]:
    path.write_text(program)
    torch.manual_seed(0)
    return runpy.run_path(str(path), run_name="__main__")


@pytest.fixture(scope="module")
def costly(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProgramRecord, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("costly")
    with watching(folder):
        names = run(COSTLY, folder / "train.py")
    return only(folder), names


def lines_of(watched: ProgramRecord) -> Lines:
    assert "lines_missing" not in watched.record.notes
    assert watched.lines is not None
    return watched.lines


def numbered(where: str) -> int:
    return int(where.rpartition(":")[2])


def test_each_planted_line_is_named_by_its_rule(
    costly: tuple[ProgramRecord, dict[str, Any]],
) -> None:
    named = costly_lines(lines_of(costly[0]), everything=True)
    found = {(one.code, numbered(one.where)) for one in named}
    expected = {entry for entry in planted(COSTLY) if entry[0] != "reads"}
    assert expected <= found
    # What else is named is true as well: no other loop and no other copy.
    assert {code for code, _ in found - expected} <= {"constant"}
    by_code = {one.code: one for one in named}
    assert by_code["loop_over_heads"].times == 4
    assert by_code["loop_over_time"].times == 16
    assert by_code["loop_over_experts"].times == 6
    assert by_code["loop_over_samples"].times == 4
    assert by_code["ignored_labels"].title.startswith("50 % of the labels")
    assert by_code["padding"].title.startswith("50 % of the tokens")


def test_costs_add_up_to_at_most_a_step(costly: tuple[ProgramRecord, dict[str, Any]]) -> None:
    lines = lines_of(costly[0])
    total = sum(site.cost_ms for site in lines.sites)
    assert 0 < total <= lines.step_ms * (1 + 1e-9)
    # Operators of the backward pass belong to the line of their forward pass.
    head = [s for s in lines.sites if s.stack and "self.head" in lines.places[s.stack[-1]].code]
    assert sum(site.backward for site in head) > sum(site.operators for site in head)


def test_reads_of_values_are_no_waits_on_a_cpu(
    costly: tuple[ProgramRecord, dict[str, Any]],
) -> None:
    lines = lines_of(costly[0])
    wanted = {number for code, number in planted(COSTLY) if code == "reads"}
    reading = {
        lines.places[site.stack[-1]].line for site in lines.sites if site.own and site.reads
    }  # fmt: skip
    assert reading == wanted
    assert not any(site.waits for site in lines.sites)


def test_observing_changes_no_result(
    costly: tuple[ProgramRecord, dict[str, Any]], tmp_path: Path
) -> None:
    alone = run(COSTLY, tmp_path / "train.py")
    assert alone["seen"] == costly[1]["seen"]


def test_the_verdict_names_three_lines(costly: tuple[ProgramRecord, dict[str, Any]]) -> None:
    record = costly[0].record
    verdict = program_verdict([record])
    assert verdict is not None
    assert len(verdict.lines) == 3
    assert [one.ms for one in verdict.lines] == sorted((o.ms for o in verdict.lines), reverse=True)
    facts = verdict_facts(verdict)
    assert facts is not None
    assert [one["where"] for one in facts["lines"]] == [one.where for one in verdict.lines]
    for width in (40, 80, 200):
        text = verdict_lines(verdict, width)
        assert all(len(line) <= width for line in text)
        assert any(verdict.lines[0].where in line for line in text)
    assert verdict.lines[0].source[:12] in html_page(make_page([record]))
    blocks = inspected_blocks([record])
    assert tables_of(blocks)["inspect-lines"].rows
    (flame,) = (one for one in blocks if isinstance(one, Flame))
    assert "source lines, CPU time" in [view.label for view in flame.views]


def test_paths_are_relative_to_the_script(costly: tuple[ProgramRecord, dict[str, Any]]) -> None:
    data = msgspec.json.encode(costly[0].record.attachments[ATTACHMENT]).decode()
    assert str(Path.home()) not in data
    assert not any(place.file.startswith("/") for place in lines_of(costly[0]).places)


def test_a_good_program_has_no_line(tmp_path: Path) -> None:
    with watching(tmp_path):
        run(GOOD, tmp_path / "train.py")
    lines = lines_of(only(tmp_path))
    assert costly_lines(lines, everything=True) == ()
    blocks = next(one for one in lines.loops if "blocks" in lines.places[one.place].code)
    assert blocks.iterations == 6 * 2


def test_a_compiled_part_stays_compiled(tmp_path: Path) -> None:
    """The loop outside of it is found, without a compilation more."""
    from torch._dynamo.utils import counters

    program = COSTLY.replace("Experts(), Rec", "torch.compile(Experts(), backend='eager'), Rec")
    assert program != COSTLY
    torch._dynamo.reset()
    counters.clear()
    with watching(tmp_path):
        run(program, tmp_path / "train.py")
    named = costly_lines(lines_of(only(tmp_path)), everything=True)
    assert {"loop_over_heads", "loop_over_time"} <= {one.code for one in named}
    assert "loop_over_experts" not in {one.code for one in named}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_the_slow_line_of_a_dataset_is_named(workers: int, tmp_path: Path) -> None:
    program = f"""
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 14
    def __getitem__(self, index):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            sum(range(2000))  # slow
        return torch.ones(4)

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Slow(), batch_size=1, num_workers={workers}):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    with watching(tmp_path):
        run(program, tmp_path / "train.py")
    lines = lines_of(only(tmp_path))
    (named,) = (one for one in costly_lines(lines) if one.code == "slow_loading")
    assert named.title.startswith("__getitem__ takes")
    assert numbered(named.where) in (10, 11, 12)
    assert all(one.in_worker == bool(workers) for one in lines.loading)


def site(**more: Any) -> Site:
    return msgspec.convert({"stack": [0], "runs": 1, "operators": 1} | more, Site)


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"call": "item", "waits": 1, "cost_ms": 2.0}, "waits"),
        ({"call": "[]", "waits": 1, "cost_ms": 2.0}, "waits"),
        ({"call": "item", "waits": 1, "cost_ms": 0.01}, None),
        ({"call": "item", "reads": 1, "cost_ms": 2.0}, None),
        ({"call": "to", "uploads": 1, "same": 1, "same_ms": 2.0}, "constant"),
        ({"call": "to", "casts": 1, "copy_ms": 2.0}, "casts"),
        ({"call": "fc1", "casts": 1, "copy_ms": 2.0}, None),
        ({"call": "to", "casts": 1, "copy_ms": 2.0, "own": False}, None),
        ({"call": "contiguous", "layouts": 1, "copy_ms": 20.0}, "layout"),
        ({"call": "contiguous", "layouts": 1, "copy_ms": 2.0}, None),
    ],
)
def test_rules_of_a_line_on_a_gpu(facts: dict[str, Any], code: str | None) -> None:
    place = Place(file="train.py", line=7, function="main", code="x")
    lines = Lines(on_device=True, step_ms=100.0, places=(place,), sites=(site(**facts),))
    assert [one.code for one in costly_lines(lines)] == ([] if code is None else [code])


def test_costs_on_a_gpu_come_from_the_trace() -> None:
    """The idle time after a wait belongs to the wait, other idle time to what the CPU did."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 1000)
    trace.operator("aten::mm", 100, 120)
    trace.operator("aten::add", 101, 119)  # Within mm: no mode of the dispatcher sees it.
    trace.kernel(SGEMM, 120, 200, launch=(105, 110))
    trace.operator("aten::_local_scalar_dense", 130, 210)
    trace.kernel("Memcpy DtoH", 200, 205, launch=(132, 135))
    trace.operator("aten::add", 300, 310)
    trace.kernel(ADD, 310, 330, launch=(302, 305))
    trace.operator("aten::mul", 320, 340)
    place = Place(file="train.py", line=7, function="main", code="x")
    lines = Lines(on_device=True, places=(place,), sites=tuple(site() for _ in range(5)))
    names = ("aten::mm", "aten::_local_scalar_dense", "aten::add", "aten::mul")
    observed = Observed(
        lines=lines,
        names=names,
        name=[0, 1, 2, 3, 3],
        site=[0, 1, 2, 3, 4],
        flags=[0, WAIT, 0, 0, 0],
    )
    work = device_work(trace.read())
    found = with_costs(observed, work, find_steps(work), 1.0).sites
    assert [one.device_ms for one in found] == pytest.approx([0.08, 0.005, 0.02, 0, 0])
    assert [one.host_ms for one in found] == pytest.approx([0.12, 0.09, 0.1, 0.015, 0.015])
    assert [one.wait_ms for one in found] == pytest.approx([0, 0.09, 0, 0, 0])
    # One of two observed multiplications is in the trace: each gets half of it.
    assert [one.cost_ms for one in found] == pytest.approx([0.2, 0.11, 0.02, 0.005, 0.005])


def test_loading_that_is_hidden_is_not_named() -> None:
    place = Place(file="train.py", line=7, function="__getitem__", code="x")
    loading = Loading(place=0, samples=9, total=10, in_worker=True)
    for waits_ms, named in ((20.0, 1), (1.0, 0)):
        lines = Lines(
            on_device=True, step_ms=100.0, places=(place,), loading=(loading,), loading_ms=waits_ms
        )
        assert len(costly_lines(lines)) == named


@pytest.mark.parametrize(("carried", "independent"), [(0, 1), (300, 0)])
def test_two_layers_of_a_recurrent_network_are_a_chain(carried: int, independent: int) -> None:
    """In each of 100 time steps, 3 of the 4 operators of the second layer need the first one."""
    loop = Loop(
        place=0, entries=100, iterations=200, operators=800, carried=carried, matmuls=400,
        parameters=200, parameter_reads=200,
    )  # fmt: skip
    assert len(list(module_loops(Lines(on_device=True, loops=(loop,))))) == independent


def test_syntax_finds_the_loops_around_a_position() -> None:
    source = Source(
        "for a in b:\n    c = [d(e) for e in f(a)]\nelse:\n    g()\nwhile h():\n    i()\n"
    )

    def headers(line: int, column: int) -> list[int]:
        return [source.loops[one].line for one in source.loops_at((line, column), 1)]

    assert headers(2, 9) == [1, 2]
    assert headers(2, 23) == [1]
    assert headers(4, 4) == []
    assert headers(5, 6) == [5]
    assert source.called((2, 2, 9, 13)) == "d"
    assert Source("not python (").loops == []
