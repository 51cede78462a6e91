"""The step study: ladder and report blocks."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from sample_records import environment, times
from step_records import rung_record, waterfall_record
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Timeline
from stepscope.studies.page import make_page
from stepscope.studies.registry import find_study
from stepscope.studies.step.cases import Part, StepFlags
from stepscope.studies.step.ladder import RUNGS, climbed, ladder, start
from stepscope.studies.step.rows import ladders
from stepscope.training.transformer import TransformerStep

STUDY = find_study("step")
FIRST = start("small", "2025", 512, 4, {})


class TestLadder:
    def test_each_change_is_alone_and_cumulative(self) -> None:
        steps = list(ladder(FIRST, ("bf16", "flash", "fused-loss")))
        assert [(s.rung, s.how) for s in steps] == [
            ("start", "start"),
            ("bf16", "first"),
            ("flash", "alone"),
            ("flash", "so far"),
            ("fused-loss", "alone"),
            ("fused-loss", "so far"),
        ]
        alone, so_far = steps[-2].workload, steps[-1].workload
        assert (alone.dtype, alone.attention, alone.loss) == ("float32", "reference", "fused")
        assert (so_far.dtype, so_far.attention, so_far.loss) == ("bfloat16", "auto", "fused")

    def test_later_rungs_leave_out_changes_that_do_not_stay(self) -> None:
        workloads = {(s.rung, s.how): s.workload for s in ladder(FIRST, tuple(RUNGS))}
        assert workloads["master", "so far"].dtype == "bfloat16-master"
        on_top = workloads["checkpoint", "so far"]
        assert (on_top.checkpoint, on_top.dtype, on_top.graph) == ("1", "bfloat16", True)
        assert workloads["master", "so far"].graph
        # torch.compile fuses the operations itself.
        assert workloads["compile", "so far"].fused is False
        best = workloads["graph", "so far"]
        assert (best.compile, best.fused, best.fused_projections) == ("no", True, True)
        assert best.optimizer == "stepscope-in-backward"

    def test_climbed_has_one_step_per_rung_in_ladder_order(self) -> None:
        steps = climbed(FIRST, ("flash", "tf32"))
        assert [(s.rung, s.how) for s in steps] == [
            ("start", "start"),
            ("tf32", "first"),
            ("flash", "so far"),
        ]

    def test_keys_are_unique(self) -> None:
        cases = STUDY.cases(StepFlags(part=get_args(Part)))
        assert len({case.key for case in cases}) == len(cases)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"rungs": ("bf17",)}, "rung 'bf17' does not exist"),
            ({"size": ("smal",)}, "perhaps you meant small"),
            ({"steps": 0}, "steps is 0"),
            ({"warmup": -1}, "warmup is -1"),
        ],
    )
    def test_invalid_flags_are_rejected(self, flags: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            STUDY.cases(StepFlags(**flags))  # type: ignore[arg-type]


def test_steps_with_shared_weights_train_the_same_tensors() -> None:
    first = start("tiny", "2025", 8, 2, {"vocab": 32})
    one = TransformerStep(msgspec.structs.replace(first, optimizer="torch-fused"), CpuDevice())
    one.run_phases()
    two = TransformerStep(
        msgspec.structs.replace(first, attention="sdpa", loss="fused", optimizer="torch-fused"),
        CpuDevice(),
        shares=one,
    )
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    weight = two.model.head.weight
    assert two.optimizer.state[weight]["exp_avg"] is one.optimizer.state[weight]["exp_avg"]
    before, moment = weight.detach().clone(), two.optimizer.state[weight]["exp_avg"].clone()
    two.run_phases()
    assert not weight.detach().equal(before)
    assert not one.optimizer.state[weight]["exp_avg"].equal(moment)


class TestPage:
    def blocks(self, *records: Record) -> dict[str, Any]:
        """Tables and figures by name, findings by code."""
        return {getattr(b, "name", None) or b.code: b for b in STUDY.view(records)}

    def test_the_ladder_reports_the_gain_of_each_rung(self) -> None:
        blocks = self.blocks(
            rung_record("start", "start", step=100.0, id="start"),
            rung_record("bf16", "first", step=50.0, id="bf16"),
            rung_record("flash", "alone", step=80.0, id="flash"),
            rung_record("flash", "so far", step=25.0, id="flash-all"),
            rung_record("graph", "so far", status="skipped", reason="no graphs here", id="graph"),
        )
        table = blocks["step-ladder"]
        by_row = {(row[0], row[1]): row for row in table.rows}
        assert by_row["bfloat16 autocast", "both"][3:5] == (2.0, 2.0)
        assert by_row["flash attention", "alone"][3:5] == (1.25, None)
        assert by_row["flash attention", "cumulative"][3:5] == (4.0, 2.0)
        # What the machine cannot run is a finding, not a row.
        assert len(table.rows) == 4
        assert "no graphs here" in blocks["step.not-measured"].sentence
        figure = blocks["step-climb"]
        assert figure.curves[0].x == ("start", "+ bf16", "+ flash")
        gain = blocks["step.gain"]
        assert gain.sentence == (
            "small at context 512, batch 4: from 100 ms to 25.0 ms, 4.00 times as fast, with all"
            " changes up to “flash attention”. The largest single gain is bfloat16 autocast: 2.00"
            " times."
        )
        assert gain.conclusion.startswith("The largest single gain is ")
        assert gain.values == {
            "ladder": "small at context 512, batch 4",
            "start_ms": 100.0,
            "best_ms": 25.0,
            "times": 4.0,
            "up_to": "flash",
            "alone": "bf16",
            "alone_times": 2.0,
        }
        assert gain.records == ("start", "bf16", "flash", "flash-all")
        failed = blocks["step.not-measured"]
        assert (failed.records, failed.tone) == (("graph",), "info")
        assert failed.text == (
            "Of small at context 512, batch 4, 1 row could not be measured: CUDA graph of the step."
            " First reason: no graphs here"
        )

    def test_a_rung_without_a_graph_is_not_compared_with_a_graph(self) -> None:
        without = rung_record("master", "so far", step=40.0)
        blocks = self.blocks(
            rung_record("start", "start", step=100.0),
            rung_record("graph", "so far", step=5.0),
            msgspec.structs.replace(without, config=without.config | {"graph": False}),
            rung_record("checkpoint", "so far", step=6.0),
        )
        table = blocks["step-ladder"]
        assert [row[4] for row in table.rows] == [None, 20.0, None, pytest.approx(5 / 6)]

    def test_cpu_bound_rows_are_marked(self) -> None:
        issue = times("issue", 49.9, "host")
        blocks = self.blocks(
            rung_record("start", "start", step=100.0, series=(times("step", 100.0), issue)),
            rung_record("bf16", "first", step=50.0, series=(times("step", 50.0), issue)),
        )
        table = blocks["step-ladder"]
        index = [column.title for column in table.columns].index("CPU-bound")
        assert [row[index] for row in table.rows] == [0.0, 1.0]
        bound = blocks["step.host-bound"]
        assert (bound.values["rows"], bound.values["of"]) == (1, 2)
        assert bound.text == "1 of 2 rows of small at context 512, batch 4 are CPU-bound."
        assert bound.conclusion.startswith("In these rows a change helps only by saving launches")

    def test_less_than_one_percent_is_not_a_gain(self) -> None:
        blocks = self.blocks(
            rung_record("start", "start", step=100.0), rung_record("bf16", "first", step=99.5)
        )
        none = blocks["step.no-gain"]
        assert none.text == (
            "small at context 512, batch 4: no gain over the baseline's 100 ms is shown."
        )
        assert none.tone == "info"

    def test_peak_memory_is_shown_only_on_a_gpu(self) -> None:
        on_host = environment(device_kind="cpu", device_name="Xeon")
        peak = (Quantity(name="peak_bytes", value=8192, unit="B"),)
        shown = []
        for here in (on_host, environment()):
            record = rung_record("start", "start", quantities=peak, environment=here)
            shown.append(self.blocks(record)["step-ladder"].rows[0][-2])
        assert shown == [None, 8192]

    def test_a_traced_rung_has_a_waterfall_of_its_replay(self) -> None:
        blocks = self.blocks(waterfall_record("start"), waterfall_record("graph", replay=0.5))
        assert isinstance(blocks["step-waterfall"], Timeline)
        assert blocks["step-waterfall-2"].lanes[-1].spans[0].end == 0.5
        assert "as a graph" in blocks["step-waterfall-2"].title
        without = self.blocks(waterfall_record("graph"))
        assert "as a graph" not in without["step-waterfall"].title


def test_the_ladder_and_the_waterfall_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli.answer import AnswerOptions
    from stepscope.cli.commands.report import print_results

    records = [rung_record(), rung_record("bf16", "first", step=50.0), waterfall_record()]
    print_results(make_page(records), AnswerOptions(full=True))
    printed = capsys.readouterr().out
    assert "from 100 ms to 50.0 ms" in printed
    assert "Each change alone and cumulative" in printed
    assert "Where the time beyond the ideal goes" in printed


def test_ladders_are_separate_by_size() -> None:
    records = [rung_record("start", "start", size=size) for size in ("small", "xl")]
    assert [ladder.name for ladder in ladders(STUDY.results(records))] == [
        "small at context 512, batch 4",
        "xl at context 512, batch 4",
    ]


def test_a_ladder_with_overrides_names_them() -> None:
    plain = rung_record("start", "start")
    one, many = (
        msgspec.structs.replace(plain, config=plain.config | {"overrides": overrides})
        for overrides in ({"vocab": 1024}, {"vocab": 1024, "n_layers": 2, "d_ff": 64})
    )
    assert {ladder.name for ladder in ladders(STUDY.results([plain, one, many]))} == {
        "small at context 512, batch 4",
        "small (vocab=1024) at context 512, batch 4",
        "small (3 overrides) at context 512, batch 4",
    }


def test_the_quick_preset_depends_on_the_device() -> None:
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    sizes = {flags.size for flags in STUDY.presets(on_cpu)["quick"]}
    assert sizes == {("tiny",)}


def test_the_memory_study_refuses_a_graph() -> None:
    from stepscope.studies.base import CaseSkipped
    from stepscope.studies.memory.measure import measure

    study = find_study("memory")
    flags = study.flags(size=("tiny",), context=(8,), graph=True, mode=("train-step",))
    (case,) = study.cases(flags)
    with pytest.raises(CaseSkipped, match="nothing to record"):
        measure(case, None)  # type: ignore[arg-type]
