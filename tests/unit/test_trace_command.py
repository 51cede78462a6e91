"""`stepscope trace`: tables and a page from a file, and one line for an invalid file."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.trace.summarize import summarize
from stepscope.cli import main
from stepscope.report.blocks import Figure, Table, Timeline
from stepscope.report.svg import CURVES
from stepscope.views.trace.findings import trace_findings
from stepscope.views.trace.view import comparison_table, trace_blocks
from trace_files import SGEMM, ChromeTrace, nsight_file, training_step
from view_blocks import figures_of, findings_of, table_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVIL = "</script><img src=x onerror=alert(1)>"


def run(tmp_path: Path, *words: str | Path) -> int:
    return main(["trace", "--full", *map(str, words), "--out", str(tmp_path / "out")])


def test_it_prints_the_ledger_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, training_step(steps=3).write(tmp_path / "t.json.gz")) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "0.0 % of the time is unattributed" in output
    assert "CPU: nothing was launched" in output
    assert "ampere_sgemm_128x64_tn" in output
    assert "block */attention" in output
    assert output.endswith(f"page: {tmp_path / 'out' / 'trace.html'}")
    page = (tmp_path / "out" / "trace.html").read_text()
    assert page.index('class="verdict"') < page.index('class="headline"')
    assert "3 steps on NVIDIA H200, written by torch.profiler" in page
    assert page.count("<svg") == 3


@pytest.mark.parametrize("fixture", sorted(FIXTURES.glob("*.json.gz")), ids=lambda path: path.name)
def test_it_ends_with_a_verdict_that_fits_a_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fixture: Path,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(tmp_path, fixture) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(
        index for index, line in enumerate(lines) if line.startswith(fixture.name) and index
    )
    verdict = lines[start:-1]
    # Nothing in a trace shows how busy the machine was.
    assert verdict[0].endswith("● not checked")
    assert verdict[1].startswith("A step takes")
    assert len(verdict) <= 20
    assert max(map(len, verdict)) <= 80
    assert lines[-1].startswith("page: ")


def test_export_of_nsight_gives_the_same_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, nsight_file(tmp_path / "report.sqlite")) == 0
    output = capsys.readouterr().out
    # Long names are cut in the middle.
    assert "cutlass_80_simt_" in output
    assert "synchronization: " in output


def test_it_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, training_step().write(tmp_path / "t.json"), "--json") == 0
    text = json.loads(capsys.readouterr().out)
    assert text["summary"]["steps"] == [1.0]
    assert text["against"] is None
    verdict = text["verdict"]
    assert verdict["step_ms"] == 1.0
    assert sum(part["ms"] for part in verdict["parts"]) == pytest.approx(1.0)
    assert Path(text["report"]).exists()


def test_two_traces_are_compared_by_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = training_step(blocks=4).write(tmp_path / "eager.json")
    fast = training_step(blocks=2).write(tmp_path / "compiled.json")
    assert run(tmp_path, fast, "--against", slow) == 0
    assert "eager.json against compiled.json" in capsys.readouterr().out
    table = comparison_table(
        *(summarize(training_step(blocks=n).read()) for n in (4, 2)), names=("a", "b")
    )
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["matmul"] == pytest.approx((0.32, 0.16, -0.16, 0.5))
    assert rows["step"] == pytest.approx((1.0, 1.0, 0.0, 1.0))
    changes = [abs(row[3]) for row in table.rows[:-1]]
    assert changes == sorted(changes, reverse=True)


def unmarked_step(iterations: int, matmul: int) -> ChromeTrace:
    trace = ChromeTrace()
    for iteration in range(iterations):
        at = 100 * iteration
        trace.operator("aten::mm", at, at + matmul)
        trace.range("Optimizer.step#SGD.step", at + 80, at + 90)
    return trace


def test_traces_without_marks_are_compared_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = unmarked_step(9, 40).write(tmp_path / "slow.json")
    fast = unmarked_step(4, 20).write(tmp_path / "fast.json")
    assert run(tmp_path, fast, "--against", slow) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "No step is marked in this trace: 3 steps are cut at optimizer steps" in output
    assert "A step takes 100 µs: operators run for 20.0 % of it" in output
    table = comparison_table(
        *(summarize(unmarked_step(*how).read()) for how in ((9, 40), (4, 20))), names=("a", "b")
    )
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["matmul"] == pytest.approx((0.04, 0.02, -0.02, 0.5))
    assert rows["step"] == pytest.approx((0.1, 0.1, 0.0, 1.0))


def test_unmarked_trace_is_not_called_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmarked = unmarked_step(2, 40).write(tmp_path / "whole.json")
    steps = unmarked_step(4, 40).write(tmp_path / "steps.json")
    assert run(tmp_path, unmarked, "--against", steps) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the full trace is treated as one step. It takes 190 µs" in output
    assert "A step takes" not in output
    assert "No step is marked in whole.json: the full trace is shown." in output
    page = (tmp_path / "out" / "trace.html").read_text()
    assert "The entire trace (no step is marked) on NVIDIA H200, written by torch.profiler" in page


def test_kernel_name_is_escaped_in_its_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = training_step()
    trace.range(EVIL, 0, 1000)
    trace.kernel(EVIL, 600, 700, launch=(12, 13))
    trace.kernel("\x1b[31m[bold]red", 700, 800, launch=(13, 14))
    assert run(tmp_path, trace.write(tmp_path / "t.json")) == 0
    page = (tmp_path / "out" / "trace.html").read_text()
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "\x1b[31m" not in capsys.readouterr().out


def bad_files(folder: Path) -> dict[str, Path]:
    data = training_step().text().encode()
    contents = {
        "truncated": data[:200],
        "empty": b"",
        "words": b"not a trace at all",
        "no-kernels": b'{"traceEvents": []}',
        "deep": b'{"traceEvents": [{"ph": "X", "args": {"a":' + b"[" * 10_000,
        "bomb.gz": gzip.compress(b'{"traceEvents": [' + b'{"ph": "X"},' * (2 << 20)),
    }
    files = {}
    for name, content in contents.items():
        files[name] = folder / name
        files[name].write_bytes(content)
    files["other.sqlite"] = folder / "other.sqlite"
    with sqlite3.connect(files["other.sqlite"]) as database:
        database.execute("CREATE TABLE songs (name TEXT)")
    return files


@pytest.mark.parametrize(
    "name", ["truncated", "empty", "words", "no-kernels", "deep", "bomb.gz", "other.sqlite"]
)
def test_bad_file_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(tmp_path, bad_files(tmp_path)[name]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("stepscope: ")
    assert err.count("\n") == 1
    assert name in err
    assert not (tmp_path / "out").exists()


def findings(trace: ChromeTrace) -> str:
    shown = trace_blocks(summarize(trace.read()))
    return " ".join(finding.sentence for finding in findings_of(shown))


def test_time_without_operators_may_be_a_wait() -> None:
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 100)
    trace.operator("aten::mm", 0, 9)
    output = findings(trace)
    assert "No operator runs for 91.0 % of the step: the program is in Python" in output
    assert "or it waits for something other than an operator" in output


def busy_step() -> ChromeTrace:
    """A step in which the device is always behind the host."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 60)
    trace.operator("aten::mm", 0, 60)
    for index in range(20):
        trace.kernel(SGEMM, 4 + 50.0 * index, 54 + 50.0 * index, launch=(index * 2, index * 2 + 1))
    return trace


def test_host_is_blamed_only_where_launches_prove_it() -> None:
    limited = findings(training_step())
    assert "For 28.0 % of the step the device has nothing to run" in limited
    assert "The CPU limits this step." in limited
    assert "The CPU limits" not in findings(busy_step())
    assert "waits for launches" not in findings(busy_step())


def test_matmuls_outside_tensor_cores_are_reported() -> None:
    assert "100.0 % of the matmul time is spent on FP32 or FP64" in findings(busy_step())
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 60)
    trace.kernel("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN", 10, 50, launch=(1, 2))
    assert "100.0 % of the matmul time is spent on tensor cores" in findings(trace)


def test_open_ledger_is_a_warning() -> None:
    trace = training_step()
    trace.kernel("mystery", 900, 950)
    assert "Too much of the time is unattributed: 6.8% of the time is kernels" in findings(trace)


def test_blocks_are_complete() -> None:
    blocks = trace_blocks(summarize(training_step(blocks=3, steps=2).read()), "x")
    assert len([block for block in blocks if isinstance(block, Timeline)]) == 1
    for block in blocks:
        if isinstance(block, Table):
            assert {len(row) for row in block.rows} == {len(block.columns)}
            assert block.name.startswith("x-")
        if isinstance(block, Figure):
            assert block.kind == "stacks"
            shown = sum(sum(curve.y) for curve in block.curves)
            assert shown == pytest.approx(1.0)


def test_kernel_class_has_one_color_in_every_figure() -> None:
    summary = summarize(training_step(blocks=3, steps=2).read())
    blocks = trace_blocks(summary, "x")
    (stack,) = figures_of(blocks).values()
    (lanes,) = (block for block in blocks if isinstance(block, Timeline))
    stacked = {curve.label: curve.style for curve in stack.curves}
    drawn = {s.group: s.style for lane in lanes.lanes for s in lane.spans}
    shared = set(drawn) & set(CLASSES)
    assert len(shared) > 1
    assert {name: stacked[name] for name in shared} == {name: drawn[name] for name in shared}
    assert len({drawn[name] for name in shared}) == len(shared)
    assert len(CURVES) >= len(CLASSES)


def test_matmuls_of_linear_layers_are_distinguished() -> None:
    trace = ChromeTrace()
    trace.operator("aten::mm", 0, 30, sequence=1)
    trace.kernel(SGEMM, 10, 50, launch=(1, 2))
    trace.operator("autograd::engine::evaluate_function: MmBackward0", 30, 90, sequence=1, back=1)
    for index, layout in enumerate(("nn", "nt")):
        at = 40 + 20 * index
        trace.operator("aten::mm", at, at + 15)
        trace.kernel(
            f"ampere_sgemm_128x64_{layout}",
            60 + 40 * index,
            90 + 40 * index,
            launch=(at + 1, at + 2),
        )
    table = table_of(trace_blocks(summarize(trace.read())), "trace-roles")
    assert [row[0] for row in table.rows] == ["forward", "dX", "dW"]
    numbers = [row[1:] for row in table.rows]
    assert numbers == [
        pytest.approx(row) for row in ((0.04, 0.4, 1), (0.03, 0.3, 1), (0.03, 0.3, 1))
    ]


def test_every_finding_of_a_trace_has_a_code_and_its_records() -> None:
    late = training_step()
    late.kernel("mystery", 900, 950)
    for trace in (training_step(blocks=3, steps=2), late):
        summary = summarize(trace.read())
        result = {one.code: one for one in trace_findings(summary, step_ms=1.0, records=("r1",))}
        assert all(code.startswith("trace.") for code in result)
        assert {one.records for one in result.values()} == {("r1",)}
        ledger = result["trace.unattributed" if summary.doubt else "trace.attributed"]
        assert ledger.values["busy"] == summary.busy_ms / summary.wall_ms
        assert ledger.tone == ("warn" if summary.doubt else "good")
        top = result["trace.top-kernel"]
        assert top.values["kernel"] == SGEMM
        assert top.text.startswith(f"{SGEMM} (matmul on FP32 cores) takes the most time: ")


def test_what_would_help_is_a_conclusion() -> None:
    summary = summarize(training_step().read())
    (result,) = (one for one in trace_findings(summary) if one.code == "trace.host-limits")
    assert result.values["idle"] == pytest.approx(0.28)
    assert result.text.endswith("before the previous one ended.")
    assert "fewer launches can" in result.conclusion
