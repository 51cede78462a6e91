"""Published figures: each has a source and a unit, and is compared with matching cases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from parallel_records import collective_record, ddp_record, sharding_record
from sample_records import environment
from stepscope.model.sizes import find_size, with_overrides
from stepscope.published import UNITS, Figure, figures, write_ups
from stepscope.records.schema import Ceiling, Record
from stepscope.report.blocks import Table
from stepscope.studies.registry import find_study, viewables
from stepscope.views.published import rate_there, size_name
from study_records import attention_record, benchmark_record, matrix_ceiling, memory_record

CONDITIONS = {
    "size",
    "context",
    "batch",
    "dtype",
    "attention",
    "compile",
    "optimizer",
    "mode",
    "warmup",
    "head",
    "heads",
    "seq",
    "causal",
    "collective",
    "ranks",
    "way",
}


def figure_of(study: str, quantity: str, device: str, **conditions: Any) -> Figure:
    (figure,) = (
        figure
        for figure in figures(study)
        if figure.device == device
        and figure.quantity == quantity
        and conditions.items() <= figure.conditions.items()
    )
    return figure


def test_there_are_five_write_ups_and_stepscope_records() -> None:
    assert [write_up.device for write_up in write_ups()] == [
        "NVIDIA A10",
        "NVIDIA A100",
        "NVIDIA H200",
        "NVIDIA H800 PCIe",
        "NVIDIA GeForce RTX 4090",
        "",
    ]
    assert len(figures()) > 900


def test_every_figure_has_a_source_a_unit_and_conditions() -> None:
    for figure in figures():
        assert figure.writeup and figure.table and figure.statistic, figure  # noqa: PT018
        assert figure.unit in UNITS, figure
        assert figure.study in viewables(), figure
        assert figure.conditions.keys() <= CONDITIONS, figure
        assert math.isfinite(figure.value) and figure.value > 0, figure  # noqa: PT018
        assert figure.device or "device" in figure.unstated, figure
        assert not set(figure.unstated) & figure.conditions.keys(), figure
        assert set(figure.assumed) <= figure.conditions.keys(), figure


@pytest.mark.parametrize(
    ("study", "quantity", "device", "conditions", "value", "unit"),
    [
        ("benchmark", "forward", "NVIDIA H800 PCIe",
         {"size": "small", "context": 128, "dtype": "float32"}, 21.57, "ms"),
        ("benchmark", "backward", "NVIDIA H800 PCIe",
         {"size": "2.7b", "context": 512, "compile": "no"}, 1003.19, "ms"),
        ("benchmark", "backward", "NVIDIA H800 PCIe",
         {"size": "xl", "context": 512, "compile": "model"}, 566.427, "ms"),
        ("benchmark", "forward", "NVIDIA H800 PCIe",
         {"size": "2.7b", "dtype": "bfloat16"}, 62.11, "ms"),
        ("memory", "peak", "NVIDIA H800 PCIe",
         {"context": 512, "dtype": "float32", "mode": "train-step"}, 65.52, "GiB"),
        ("attention", "backward", "NVIDIA H800 PCIe",
         {"head": 128, "seq": 16384, "attention": "reference"}, 291.347, "ms"),
        ("attention", "peak", "NVIDIA H800 PCIe", {"head": 64, "seq": 8192}, 12496.75, "MiB"),
        ("attention", "forward", "NVIDIA H800 PCIe",
         {"head": 16, "seq": 16384, "attention": "compiled"}, 25.981, "ms"),
        ("benchmark", "both", "NVIDIA A10", {"size": "xl"}, 1413.81, "ms"),
        ("benchmark", "backward", "NVIDIA GeForce RTX 4090",
         {"size": "medium", "context": 512}, 0.151867, "s"),
        ("flash", "both", "NVIDIA GeForce RTX 4090",
         {"head": 128, "seq": 32768, "attention": "reference"}, 127.719, "ms"),
        ("allreduce", "time", "NVIDIA GeForce RTX 4090", {"ranks": 2, "size": 1 << 20}, 3.12101,
         "s"),
        ("ddp", "step", "NVIDIA GeForce RTX 4090", {"way": "bucketed 10 MiB"}, 0.405, "s"),
        ("benchmark", "both", "", {"size": "2.7b", "context": 256}, 1.29152, "s"),
        ("memory", "peak", "NVIDIA A100", {"size": "xl"}, 29.8, "GiB"),
    ],
)  # fmt: skip
def test_figures_are_those_of_the_write_ups(
    study: str, quantity: str, device: str, conditions: dict[str, Any], value: float, unit: str
) -> None:
    figure = figure_of(study, quantity, device, **conditions)
    assert (figure.value, figure.unit) == (value, unit)


def test_spreads_belong_to_their_figures() -> None:
    assert figure_of("benchmark", "both", "NVIDIA A10", size="small").spread == 1.0
    figure = figure_of("benchmark", "forward", "NVIDIA H800 PCIe", size="medium", context=256)
    assert figure.spread is None


def test_figures_known_to_be_wrong_have_a_note() -> None:
    assert all("start of the processes" in figure.doubt for figure in figures("allreduce"))
    for figure in figures():
        if figure.conditions.get("size") == "large of 32 layers":
            assert "36" in figure.doubt
    compiled = [f for f in figures("attention") if f.conditions["attention"] == "compiled"]
    first = [f for f in compiled if f.value == 3.290159]
    assert [("compilation" in figure.doubt) for figure in first] == [True]
    nsight = figure_of("profile", "forward under Nsight", "", size="2.7b")
    assert "below the time without it" in nsight.doubt
    assert not figure_of("profile", "forward under Nsight", "", size="xl").doubt


def test_rates_there_come_from_the_data_sheet_or_our_own_measurement() -> None:
    assert rate_there(figures("memory")[-1], "nothing") is None
    h800 = figure_of("benchmark", "forward", "NVIDIA H800 PCIe", size="small", context=256)
    assert rate_there(h800, "matmul.float32") == 51e12
    own = next(figure for figure in figures("benchmark") if figure.device == "NVIDIA H200")
    assert rate_there(own, "matmul.bfloat16") == own.rates["matmul.bfloat16"] > 700e12


def published(study: str, *records: Record) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """By source, case and quantity: published, scaled, here, ratio, note."""
    rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for block in find_study(study).view(records):
        if isinstance(block, Table) and block.name == f"{study}-published":
            assert len(block.details) == len(block.rows)
            for row in block.rows:
                rows[row[0], row[1], row[2]] = row[3:]
    return rows


H800 = "CS336 write-up on an H800 PCIe"
H200 = "Stepscope on an H200 (results/h200.jsonl)"
ELSEWHERE = environment(device_name="NVIDIA L4")


def test_a_time_is_scaled_by_the_matmul_rate() -> None:
    mine = benchmark_record(
        "forward", context=128, step=21.57, ceiling=25.5e12, environment=ELSEWHERE
    )
    rows = published("benchmark", mine)
    # 51 TFLOP/s there, 25.5 measured here: the same work should take twice as long.
    row = rows[H800, "small, context 128, batch 4, float32", "forward, mean"]
    assert row[:3] == ("21.57 ms ± 130 µs", "43.14 ms", "21.57 ms")
    assert row[3] == pytest.approx(0.5, rel=1e-3)
    own = rows[H200, "small, context 128, batch 4, float32", "forward, median"]
    assert own[3] == pytest.approx(21.57 / float(own[1].split()[0]), rel=1e-3)
    assert not any("A10" in source for source, *_ in rows)


def test_on_the_same_device_a_time_is_not_scaled() -> None:
    rows = published("benchmark", benchmark_record("forward", context=128, step=10.0))
    own = rows[H200, "small, context 128, batch 4, float32", "forward, median"]
    assert own[0] == own[1]


def test_records_are_not_compared_with_themselves() -> None:
    (run,) = next(write_up.runs for write_up in write_ups() if write_up.runs)
    rows = published("benchmark", benchmark_record("forward", context=128, run=run))
    assert rows
    assert not any(source == H200 for source, *_ in rows)


def test_other_conditions_have_no_match() -> None:
    assert not published("benchmark", benchmark_record("forward", size="tiny", context=128))
    open_ones = published("benchmark", benchmark_record("forward", context=100))
    assert all(
        "not stated: context" in row[4] and row[2:4] == (None, None) for row in open_ones.values()
    )
    mine = benchmark_record("forward", context=128)
    changed = msgspec.structs.replace(mine, config=mine.config | {"checkpoint": "4"})
    assert not published("benchmark", changed)
    failed = benchmark_record("forward", context=128, status="oom", reason="CUDA out of memory")
    assert not published("benchmark", failed)


def test_without_a_measured_ceiling_nothing_is_scaled() -> None:
    mine = benchmark_record("forward", context=128, environment=ELSEWHERE, ceilings=())
    row = published("benchmark", mine)[
        H800, "small, context 128, batch 4, float32", "forward, mean"
    ]
    assert row[1] is None
    assert row[3] is None


def test_a_size_is_known_by_its_shape() -> None:
    assert size_name(with_overrides(find_size("xl", "2026"), context=64)) == "2.7b"
    assert size_name(find_size("xl")) == "xl"
    assert size_name(with_overrides(find_size("large"), n_layers=32)) is None


def test_memory_is_compared_byte_for_byte() -> None:
    mine = memory_record(
        "forward", size="2.7b", context=128, peak=int(18.08 * 2**30), environment=ELSEWHERE
    )
    narrow = memory_record(
        "forward", size="2.7b", context=128, dtype="bfloat16", environment=ELSEWHERE
    )
    rows = published("memory", mine, narrow)
    what = "peak, peak of a snapshot"
    row = rows[H800, "2.7b, context 128, batch 4, float32, forward", what]
    assert row[0] == "18.08 GiB"
    assert row[3] == pytest.approx(1.0)
    doubted = rows[H800, "2.7b, context 128, batch 4, bfloat16, forward", what]
    assert doubted[3] is None
    assert "copies of the weights" in doubted[4]


def test_attention_is_scaled_by_the_bandwidth() -> None:
    copy = Ceiling(name="memory.copy", value=4e12, unit="B/s", source="measured")
    mine = attention_record(
        "backward",
        seq=4096,
        head=64,
        step=8.0,
        peak=3192.38 * 2**20,
        saved=2.0**30,
        ceilings=(copy, matrix_ceiling("float32", 50e12)),
    )
    rows = published("attention", mine)
    case = "length 4096, d 64, heads 1, batch 8, float32"
    row = rows[H800, case, "backward, mean"]
    assert row[:3] == ("15.92 ms ± 470 µs", "7.959 ms", "8.000 ms")
    assert "mask" in row[4]
    assert rows[H800, case, "peak, measured once"][3] == pytest.approx(1.0)


def test_a_wrong_figure_is_shown_with_its_note_and_without_a_ratio() -> None:
    rows = published("allreduce", collective_record())
    assert rows == {
        ("CS336 write-up on an RTX 4090", "all-reduce, 4.00 MiB, ranks 2", "time, one run"): (
            "2.953 s",
            None,
            None,
            None,
            "the same for every size from 1 MiB to 1 GiB: the start of the processes was timed, not"
            " the messages; not stated: backend",
        )
    }


def test_a_step_on_ranks_has_no_ratio_where_conditions_are_open() -> None:
    mine = ddp_record()
    medium = msgspec.structs.replace(mine, config=mine.config | {"size": "medium"})
    rows = published("ddp", medium)
    case = "CS336 write-up on an RTX 4090", "naive, medium, ranks 2", "step, slower rank"
    assert rows[case][:4] == ("506.0 ms", None, None, None)
    assert "not stated: context, batch, backend" in rows[case][4]
    shared = sharding_record()
    shared = msgspec.structs.replace(shared, config=shared.config | {"size": "medium"})
    assert len(published("sharding", shared)) == 2
