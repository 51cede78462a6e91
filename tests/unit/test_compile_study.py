"""The compile study: cases, report blocks, and graph breaks of the real tracer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from command_line import CommandLine
from sample_records import times, value_of
from step_records import compile_record
from stepscope.errors import UsageError
from stepscope.report.blocks import Block
from stepscope.studies.compile import measure
from stepscope.studies.compile.cases import CompileFlags
from stepscope.studies.compile.view import CompileRow
from stepscope.studies.registry import find_study
from view_blocks import figures_of, findings_of, table_of

STUDY = find_study("compile")


def texts(blocks: Iterable[Block]) -> list[str]:
    return [finding.sentence for finding in findings_of(blocks)]


def test_keys_are_unique_and_tracing_needs_no_compiler() -> None:
    flags = CompileFlags(compile_mode=("default", "reduce-overhead"), attention_context=(256,))
    cases = STUDY.cases(flags)
    assert len({case.key for case in cases}) == len(cases)
    by_kind = {case.config["kind"]: case for case in cases}
    assert by_kind["trace"].needs == ("float32",)
    assert by_kind["attention"].needs == ("float32", "compiler")
    assert by_kind["model"].needs == ("float32", "compiler", "graph")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"compile": ("no",)}, "eager is always measured"),
        ({"rounds": 0}, "both must be at least 1"),
    ],
)
def test_invalid_flags_are_rejected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CompileFlags(**flags)  # type: ignore[arg-type]


def test_gain_cost_and_amortization() -> None:
    record = compile_record(eager=30.0, compiled=20.0, cold_s=12.0, warm_s=3.0)
    row = CompileRow(*STUDY.results([record])[0])
    assert row.gain("step") == pytest.approx(1.5)
    assert row.pays_after() == pytest.approx(1200.0)
    shown = STUDY.view([record])
    assert table_of(shown, "compile-times").rows[0][3:5] == (12.0, 3.0)
    sentences = texts(shown)
    assert any("that of a compiled one is 1.50× [" in text for text in sentences)
    cold_and_warm = "takes 12.0 s with an empty cache and 3.00 s in a new process"
    assert any(cold_and_warm in text for text in sentences)
    assert table_of(shown, "compile-memory").rows[0][3:] == (4e9, 3e9, 8e9, 6e9)


@pytest.mark.parametrize("separate", [True, False])
def test_the_caption_says_that_loading_is_excluded(separate: bool) -> None:
    newer = compile_record(extra={"load_s": 3.0})
    shown = STUDY.view([newer, newer if separate else compile_record()])
    assert ("to load the compiler" in table_of(shown, "compile-times").caption) is separate


def test_slower_cases_breaks_and_late_compilations_are_reported() -> None:
    slow = compile_record("attention", eager=10.0, compiled=20.0)
    late = compile_record(
        attachments={"breaks": ["2× call to print"]},
        extra={"breaks": 2, "recompiled_while_timed": 1},
    )
    shown = STUDY.view([slow, late])
    sentences = texts(shown)
    assert any("1 of all 2 cases are slower than eager" in text for text in sentences)
    assert any("was recompiled during timing" in text for text in sentences)
    assert any("breaks in 1 of 2 cases" in t and "2× call to print" in t for t in sentences)
    rows = table_of(shown, "compile-graphs").rows
    assert [row[8] for row in rows] == [None, "2× call to print"]


def test_cpu_bound_cases_are_reported() -> None:
    waits = tuple(
        times(phase, ms, clock=clock, variant=variant)
        for variant, ms in {"eager": 30.0, "compiled": 15.0}.items()
        for phase in ("forward", "backward", "step")
        for clock in ("device", "host")
    )
    shown = STUDY.view([compile_record(series=waits), compile_record()])
    best = "In cases that are not CPU-bound, the time of an eager step over that of a compiled one"
    assert any(text.startswith(best) for text in texts(shown))
    rows = table_of(shown, "compile-times").rows
    assert [row[-3:-1] for row in rows] == [(1.0, 1.0), (None, None)]


@pytest.mark.parametrize(
    ("kind", "counted", "shown"),
    [
        ("cuda", True, (4e9, None, 8e9, 6e9)),
        ("cuda", False, (4e9, None, 8e9, None)),
        ("cpu", False, (4e9, 3e9, 8e9, 6e9)),
    ],
)
def test_memory_of_torch_graphs_is_their_memory_pool(
    kind: str, counted: bool, shown: tuple[float | None, ...]
) -> None:
    record = compile_record()
    quantities = tuple(
        one
        for one in record.quantities
        if not counted or (one.name, one.variant) != ("before_backward", "compiled")
    )
    replayed = msgspec.structs.replace(
        record,
        config={**record.config, "compile_mode": "reduce-overhead"},
        quantities=quantities,
        environment=msgspec.structs.replace(record.environment, device_kind=kind),
    )
    memory = table_of(STUDY.view([replayed]), "compile-memory")
    assert memory.rows[0][3:] == shown
    assert ("memory pool" in memory.caption) is (kind == "cuda")


def test_bars_are_labeled_by_what_distinguishes_the_cases() -> None:
    one = compile_record()
    size = {**one.config, "size": "medium"}
    mode = {**one.config, "compile_mode": "reduce-overhead"}
    others = [
        msgspec.structs.replace(one, config=config, case=str(index))
        for index, config in enumerate((size, mode))
    ]
    figure = figures_of(STUDY.view([one, *others]))["compile-gain-model"]
    assert figure.x_label == "size, mode"
    assert figure.curves[0].x == ("small", "medium", "small reduce-overhead")


def test_a_slower_compiled_case_is_never_amortized() -> None:
    row = CompileRow(*STUDY.results([compile_record(eager=10.0, compiled=11.0)])[0])
    assert row.pays_after() is None


def test_the_model_is_one_graph_without_breaks(cli: CommandLine) -> None:
    done = cli.line(
        "run compile --part trace --size tiny --context 8 --batch 1 --vocab 32 --compile model"
        " --attention sdpa --device cpu"
    )
    assert done.returncode == 0, done.stderr
    (record,) = cli.records()
    assert (record.quantity("graphs"), record.quantity("breaks")) == (1, 0)
    assert (record.quantity("operators") or 0) > 20
    assert (record.quantity("trace_s") or 0) > 0


def test_reasons_of_breaks_and_recompilations() -> None:
    """Real breaks, with a backend that does not compile."""

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
    counts, reasons = measure._graph_counts(), measure._reasons()
    torch.compiler.reset()
    assert value_of(counts, "breaks") == 1
    assert "print" in reasons["breaks"][0]
    size, attribute = measure._recompiled()[-2:]
    assert "size mismatch at index 0. expected 3, actual 5" in size
    assert attribute == "self.times == 1"
