"""The compile study: its cases, what its page says of planted records, and the tracer itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from command_line import CommandLine
from sample_records import times, value_of
from step_records import compile_record
from stepscope.errors import UsageError
from stepscope.report.blocks import Figure, Finding, Table
from stepscope.studies.compile import measure
from stepscope.studies.compile.cases import CompileFlags
from stepscope.studies.compile.view import Row
from stepscope.studies.registry import find_study

STUDY = find_study("compile")


def blocks(*records: object) -> dict[str, object]:
    made = STUDY.view(list(records))  # type: ignore[arg-type]
    return {getattr(block, "name", f"finding {n}"): block for n, block in enumerate(made)}


def texts(held: dict[str, object]) -> list[str]:
    return [block.sentence for block in held.values() if isinstance(block, Finding)]


def test_cases_have_keys_of_their_own_and_tracing_needs_no_compiler() -> None:
    flags = CompileFlags(compile_mode=("default", "reduce-overhead"), seq=(256,))
    cases = STUDY.cases(flags)
    assert len({case.key for case in cases}) == len(cases)
    by_kind = {case.config["kind"]: case for case in cases}
    assert by_kind["trace"].needs == ("float32",)
    assert by_kind["attention"].needs == ("float32", "compiler")
    assert by_kind["model"].needs == ("float32", "compiler", "graph")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"compile": ("no",)}, "eager is measured beside"),
        ({"rounds": 0}, "both must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_named(flags: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CompileFlags(**flags)  # type: ignore[arg-type]


def test_gains_costs_and_when_they_are_paid_back() -> None:
    record = compile_record(eager=30.0, compiled=20.0, cold_s=12.0, warm_s=3.0)
    row = Row(*STUDY.results([record])[0])
    assert row.gain("step") == pytest.approx(1.5)
    assert row.pays_after() == pytest.approx(1200.0)
    held = blocks(record)
    table = held["compile-times"]
    assert isinstance(table, Table)
    assert table.rows[0][3:5] == (12.0, 3.0)
    said = texts(held)
    assert any("1.50 times as fast in the best case" in text for text in said)
    assert any("takes 12.0 s with an empty cache and 3.00 s in a new process" in t for t in said)
    memory = held["compile-memory"]
    assert isinstance(memory, Table)
    assert memory.rows[0][3:] == (4e9, 3e9, 8e9, 6e9)


@pytest.mark.parametrize("apart", [True, False])
def test_the_caption_says_where_loading_is_not_in_it(apart: bool) -> None:
    newer = compile_record(found={"load_s": 3.0})
    table = blocks(newer, newer if apart else compile_record())["compile-times"]
    assert isinstance(table, Table)
    assert ("to load the compiler" in table.caption) is apart


def test_slower_cases_breaks_and_late_compiling_are_told() -> None:
    slow = compile_record("attention", eager=10.0, compiled=20.0)
    late = compile_record(
        attachments={"breaks": ["2× call to print"]},
        found={"breaks": 2, "recompiled_while_timed": 1},
    )
    held = blocks(slow, late)
    said = texts(held)
    assert any("of all 2 cases 1 are slower than eager" in text for text in said)
    assert any("compiled again while its steps were timed" in text for text in said)
    assert any("breaks in 1 of 2 cases" in t and "2× call to print" in t for t in said)
    table = held["compile-graphs"]
    assert isinstance(table, Table)
    assert [row[8] for row in table.rows] == [None, "2× call to print"]


def test_what_compiling_brings_where_the_device_waits_for_the_host_is_told() -> None:
    waits = tuple(
        times(phase, ms, clock=clock, variant=form)
        for form, ms in {"eager": 30.0, "compiled": 15.0}.items()
        for phase in ("forward", "backward", "step")
        for clock in ("device", "host")
    )
    held = blocks(compile_record(series=waits), compile_record())
    assert any(
        "In 1 of 2 cases the device waits for the host when eager" in text
        and text.endswith("takes to launch (2.00 times), and in 1 of them it still waits.")
        for text in texts(held)
    )
    best = "Where the device does not wait for the host, a compiled step is 1.50 times as fast"
    assert any(text.startswith(best) for text in texts(held))
    table = held["compile-times"]
    assert isinstance(table, Table)
    assert [row[-3:-1] for row in table.rows] == [(1.0, 1.0), (None, None)]


@pytest.mark.parametrize(
    ("kind", "counted", "shown"),
    [
        ("cuda", True, (4e9, None, 8e9, 6e9)),
        ("cuda", False, (4e9, None, 8e9, None)),
        ("cpu", False, (4e9, 3e9, 8e9, 6e9)),
    ],
)
def test_memory_of_torchs_own_graphs_is_what_was_set_aside_for_them(
    kind: str, counted: bool, shown: tuple[float | None, ...]
) -> None:
    made = compile_record()
    quantities = tuple(
        one
        for one in made.quantities
        if not counted or (one.name, one.variant) != ("before_backward", "compiled")
    )
    replayed = msgspec.structs.replace(
        made,
        config={**made.config, "compile_mode": "reduce-overhead"},
        quantities=quantities,
        environment=msgspec.structs.replace(made.environment, device_kind=kind),
    )
    memory = blocks(replayed)["compile-memory"]
    assert isinstance(memory, Table)
    assert memory.rows[0][3:] == shown
    assert ("set aside" in memory.caption) is (kind == "cuda")


def test_bars_are_named_by_what_tells_the_cases_apart() -> None:
    one = compile_record()
    size = {**one.config, "size": "medium"}
    mode = {**one.config, "compile_mode": "reduce-overhead"}
    others = [
        msgspec.structs.replace(one, config=config, case=str(place))
        for place, config in enumerate((size, mode))
    ]
    figure = blocks(one, *others)["compile-gain-model"]
    assert isinstance(figure, Figure)
    assert figure.x_label == "size, mode"
    assert figure.curves[0].x == ("small", "medium", "small reduce-overhead")


def test_a_compiled_case_that_never_pays_says_so_by_a_dash() -> None:
    row = Row(*STUDY.results([compile_record(eager=10.0, compiled=11.0)])[0])
    assert row.pays_after() is None


def test_the_tracer_finds_one_graph_in_the_model_and_no_break(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.know_ceilings()
    done = cli(
        "run",
        "compile",
        "--part",
        "trace",
        "--size",
        "tiny",
        "--context",
        "8",
        "--batch",
        "1",
        "--vocab",
        "32",
        "--compile",
        "model",
        "--attention",
        "sdpa",
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    (record,) = cli.records()
    assert (record.quantity("graphs"), record.quantity("breaks")) == (1, 0)
    assert (record.quantity("operators") or 0) > 20
    assert (record.quantity("trace_s") or 0) > 0


def test_breaks_and_recompilations_are_named_by_their_cause() -> None:
    """Real ones, by a backend that compiles nothing."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.times = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.times

    def talks(x: torch.Tensor) -> torch.Tensor:
        print("between two graphs")  # noqa: T201
        return x * 2

    torch.compiler.reset()
    counters.clear()
    module = Scaled()
    compiled = torch.compile(module, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(5))
    module.times = 2
    compiled(torch.ones(5))
    torch.compile(talks, backend="eager")(torch.ones(2))
    counted, named = measure._counted(), measure._named()
    torch.compiler.reset()
    assert value_of(counted, "breaks") == 1
    assert "print" in named["breaks"][0]
    size, attribute = measure._recompiled()[-2:]
    assert "size mismatch at index 0. expected 3, actual 5" in size
    assert attribute == "self.times == 1"
