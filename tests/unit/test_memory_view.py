"""Findings, tables and figures of the memory study."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sample_records import environment
from stepscope.model import cost
from stepscope.model.sizes import find_size
from stepscope.records.memory import (
    PARAMETERS,
    SAVED,
    TEMPORARIES,
    WEIGHT_COPIES,
    Peaks,
    PhasePeak,
    PostMortem,
    Remedy,
    SavedTensor,
    Standing,
)
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.memory.rows import Accounted, accounted, leading
from stepscope.studies.registry import find_study
from study_records import memory_record
from view_blocks import coded, figures_of, findings_of, table_of

GIB = 1 << 30


def sizes(**values: float) -> tuple[Quantity, ...]:
    return tuple(Quantity(name=name, value=value, unit="B") for name, value in values.items())


def by_code(records: list[Record]) -> dict[str, Finding]:
    """The findings by code; no code comes twice."""
    findings = findings_of(find_study("memory").view(records))
    by_code = {finding.code.removeprefix("memory."): finding for finding in findings}
    assert len(by_code) == len(findings)
    return by_code


def cases_of(records: list[Record]) -> list[Accounted]:
    return accounted(find_study("memory").results(records))


def ids(*records: Record) -> set[str]:
    return {record.id for record in records}


def table(records: list[Record], name: str) -> Table:
    return table_of(find_study("memory").view(records), name)


def test_memory_over_a_step_is_drawn_with_the_forward_alone() -> None:
    records = [memory_record("forward"), memory_record(), memory_record(context=64, peak=1 << 20)]
    drawn = figures_of(find_study("memory").view(records)).values()
    figures = [figure for figure in drawn if figure.kind == "areas"]
    assert [figure.name for figure in figures] == [
        "memory-course-forward",
        "memory-course-train-step",
    ]
    full_step = figures[1]
    assert [(span.label, span.start) for span in full_step.spans] == [
        ("forward", 10.0),
        ("loss", 20.0),
        ("backward", 30.0),
        ("optimizer", 40.0),
    ]
    assert full_step.curves[0].y == pytest.approx((1000.0, 500.0, 1000 / 3, 250.0))
    assert full_step.marks[0].value == 1000.0


def test_figures_show_the_step_with_the_highest_forward() -> None:
    records = [
        memory_record("forward", peak=1 << 30),
        memory_record(peak=2 << 30),
        memory_record(context=512, peak=9 << 30),
        memory_record(context=64, peak=3 << 30),
        memory_record("forward", context=64, peak=1 << 20),
    ]
    lead, forward = leading(cases_of(records))
    assert (lead.peak, forward.peak if forward else None) == (2 << 30, 1 << 30)
    lead, forward = leading(cases_of(records[1:4]))
    assert (lead.peak, forward) == (9 << 30, None)
    assert leading(cases_of(records[:1]))[0].workload.mode == "forward"


def test_a_cpu_also_shows_the_growth_of_the_process() -> None:
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    on_host = memory_record(environment=on_cpu, extra=sizes(resident_bytes=123 << 20))
    assert table([on_host], "memory-peaks").columns[-1].title == "resident"
    assert table([on_host], "memory-peaks").rows[0][-1] == 123 << 20
    assert table([memory_record()], "memory-peaks").columns[-1].title == "unattributed"


def test_the_error_of_the_prediction_is_reported() -> None:
    good = memory_record(peak=10 * GIB, extra=sizes(predicted_bytes=10.1 * GIB))
    bad = memory_record(context=256, peak=10 * GIB, extra=sizes(predicted_bytes=12 * GIB))
    finding = by_code([good, bad])["prediction"]
    assert "off by 10.5 % in the median and 20.0 % at most" in finding.text
    assert finding.values["worst"] == pytest.approx(0.2)
    assert (set(finding.records), finding.tone, finding.timed) == (ids(good, bad), "warn", False)
    assert by_code([good])["prediction"].tone == "good"


def test_an_unattributed_part_is_shown_and_reported() -> None:
    closed = memory_record(peak=1000)
    holed = memory_record(peak=1000, lines={"parameters": 300})
    assert cases_of([closed])[0].unattributed_share == 0
    assert cases_of([holed])[0].unattributed_share == pytest.approx(0.2)
    ledger_finding = by_code([holed])["account"]
    assert "leaves at most 20.0 % of the peak unattributed" in ledger_finding.text
    assert (ledger_finding.values["unattributed"], ledger_finding.tone) == (
        pytest.approx(0.2),
        "warn",
    )
    ledger = table([holed], "memory-ledger")
    assert ("unattributed", 200, 200, 200, 200) in ledger.rows
    assert ledger.rows[-1] == ("sum", 1000, 1000, 1000, 1000)


def test_lines_of_one_size_have_one_order() -> None:
    """A set's order differs between processes, but pages must be identical."""
    names = [f"line {letter}" for letter in "jihgfedcba"]
    even = memory_record(peak=1000, lines=dict.fromkeys(names, 5))
    rows = [row[0] for row in table([even], "memory-ledger").rows]
    assert [name for name in rows if name in names] == sorted(names)


def test_on_a_cpu_a_ledger_that_adds_up_is_not_a_success() -> None:
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    finding = by_code([memory_record(environment=on_cpu)])
    assert "adds up by construction" in finding["account"].text
    assert finding["account"].tone == "info"
    assert "driver" not in finding


def test_the_ends_of_phases_add_up_to_the_drivers_figure() -> None:
    end = PhasePeak(
        phase="forward", allocated=900, lines={PARAMETERS: 600, SAVED + "a": 300}, operator=""
    )
    standing = Standing(allocated=900, reserved=1000, driver=1500)
    plain = memory_record(peak=1000, extra=sizes(context_bytes=480))
    attached = msgspec.to_builtins({"ends": [end], "standing": {"forward": standing}})
    on_gpu = msgspec.structs.replace(plain, attachments=plain.attachments | attached)
    assert table([on_gpu], "memory-moments").rows == (
        ("parameters", 600),
        ("saved for backward", 300),
        ("allocated", 900),
        ("free in the allocator", 100),
        ("CUDA context, kernels and libraries", 480),
        ("left over", 20),
        ("driver (nvidia-smi)", 1500),
    )
    del attached["standing"]
    on_cpu = msgspec.structs.replace(plain, attachments=plain.attachments | attached)
    assert table([on_cpu], "memory-moments").rows[-1] == ("allocated", 900)


def test_the_longest_context_that_fits_is_reported() -> None:
    ran = [memory_record(context=context, peak=context * GIB // 128) for context in (128, 256)]
    full = [
        memory_record(context=context, status="oom", reason="CUDA out of memory")
        for context in (512, 1024)
    ]
    records = [*ran, *full, memory_record("forward", context=512, peak=GIB)]
    finding = coded(find_study("memory").view(records), "memory.longest-contexts")
    assert finding.text == (
        "The longest contexts that fit on this device: tiny at context 256 in float32 (2.00 GiB;"
        " 512 runs out)."
    )
    assert finding.values == {"tiny at context 256 in float32": 512}
    assert set(finding.records) == ids(ran[1], full[0])
    assert "longest-contexts" not in by_code(ran)


def test_a_step_is_the_same_at_another_context_however_often_it_ran() -> None:
    """The number of steps and the snapshot belong to the measurement, not to the step."""
    ran = memory_record(context=256, peak=GIB)
    ran = msgspec.structs.replace(ran, config=ran.config | {"steps": 9, "snapshot": "no"})
    full = memory_record(context=512, status="oom", reason="CUDA out of memory")
    assert "longest-contexts" in by_code([ran, full])


def test_bfloat16_that_needs_more_is_explained() -> None:
    wide = memory_record("forward", peak=18 * GIB)
    narrow = memory_record(
        "forward", dtype="bfloat16", peak=22 * GIB, lines={WEIGHT_COPIES: 6 * GIB}
    )
    finding = by_code([wide, narrow])["autocast-more"]
    assert "needs more memory than float32 in 1 of 1 forward passes" in finding.text
    assert "the copies are 6.00 GiB" in finding.text
    assert "peak 22.0 GiB against 18.0 GiB" in finding.text
    assert set(finding.records) == ids(wide, narrow)
    lower = memory_record("forward", dtype="bfloat16", peak=12 * GIB)
    assert "in none of 1 forward passes" in by_code([wide, lower])["autocast-less"].text

    def pair(context: int, *peaks: int) -> list[Record]:
        return [
            memory_record("forward", context=context, dtype=dtype, peak=peak * GIB)
            for dtype, peak in zip(("float32", "bfloat16"), peaks, strict=True)
        ]

    less = by_code([*pair(128, 18, 22), *pair(256, 24, 23), *pair(512, 40, 30)])["autocast-more"]
    assert [less.values[name] for name in ("more", "forwards", "less_from")] == [1, 3, 256]
    assert "From context 256 on it needs less." in less.text
    more = by_code([*pair(128, 18, 22), *pair(512, 40, 41)])["autocast-more"]
    assert "At context 512 it still needs more: 41.0 GiB against 40.0 GiB" in more.text
    assert "autocast runs softmax in float32 and casts its output" in more.text
    assert more.values["more_up_to"] == 512


def test_a_ledger_that_adds_up_to_the_byte_is_reported() -> None:
    cases = [memory_record(), memory_record(context=256)]
    finding = by_code(cases)
    assert finding["account"].text == (
        "The ledger adds up to the byte, at the peak and at the end of every phase of all 2 cases."
    )
    assert (finding["account"].tone, finding["account"].timed) == ("good", False)


def test_an_incomplete_snapshot_is_reported() -> None:
    plain = memory_record()
    cut = msgspec.structs.replace(plain, notes=plain.notes | {"snapshot_incomplete": "full"})
    finding = by_code([cut])["snapshot-incomplete"]
    assert "1 snapshots are incomplete, the first of tiny at context 128 in float32" in finding.text
    assert finding.values["incomplete"] == 1


def test_a_peak_in_the_optimizer_is_reported() -> None:
    quarter = 250 << 20
    lines = {PARAMETERS: quarter, TEMPORARIES: quarter}
    record = memory_record(size="small", context=128, lines=lines)
    phases = [
        msgspec.structs.replace(peak, allocated=peak.allocated + (peak.phase == "optimizer"))
        for peak in record.required("ledger", Peaks)
    ]
    attachments = record.attachments | {"ledger": msgspec.to_builtins(phases)}
    high = msgspec.structs.replace(record, attachments=attachments)
    other = memory_record(context=256)
    finding = by_code([high, other])["optimizer-peak"]
    assert "In 1 of 2 train steps the peak is in the optimizer" in finding.text
    assert (
        "for small at context 128 in float32 250 MiB on top of 250 MiB of parameters"
        in finding.text
    )
    assert finding.conclusion.startswith("The fused AdamW has none: ")
    assert set(finding.records) == ids(high, other)
    assert "optimizer-peak" not in by_code([record])


def test_the_largest_tensor_is_named() -> None:
    finding = by_code([memory_record(peak=GIB), memory_record(context=64, peak=8 * GIB)])
    largest = finding["largest-tensor"]
    assert largest.text.startswith("The largest single tensor of tiny at context 64 in float32 has")
    assert "2.00 GiB (aten.bmm.default at reference.py:31); one float32" in largest.text
    assert (largest.values["bytes"], len(largest.records)) == (2 * GIB, 1)


def test_a_case_that_ran_out_gets_a_post_mortem() -> None:
    small = environment(device_memory_bytes=13 * GIB // 2)
    lost = memory_record(
        size="small",
        context=1024,
        status="oom",
        environment=small,
        reason="OutOfMemoryError: CUDA out of memory. Tried to allocate 768.00 MiB.",
    )
    finding = by_code([lost])["ran-out"]
    assert (
        "ran out of memory in the forward phase when it requested another 768 MiB" in finding.text
    )
    assert "it needs 8.10 GiB of 6.50 GiB, 1.60 GiB too much" in finding.text
    assert finding.conclusion.startswith(
        "Predicted to fit, smallest change first: flash attention ("
    )
    assert finding.values["remedy"] == "flash attention"
    assert (finding.records, finding.tone) == ((lost.id,), "warn")
    (row,) = table([lost], "memory-lost").rows
    assert row == ("small", 1024, "train-step", "oom", lost.reason)


def test_post_mortems_stop_after_the_first_four() -> None:
    noted = PostMortem(limit=1, asked=0, held=0, phase="backward", lines={}, needed=2, remedies=())
    lost = [
        memory_record(
            context=context,
            status="oom",
            reason="CUDA out of memory",
            attachments={"post_mortem": msgspec.to_builtins(noted)},
        )
        for context in (64, 128, 256, 512, 1024, 2048)
    ]
    finding = findings_of(find_study("memory").view(lost))
    assert [b.code for b in finding] == [*["memory.ran-out"] * 4, "memory.more-ran-out"]
    assert finding[-1].text == "2 more cases ran out of memory."
    assert (finding[-1].values, set(finding[-1].records)) == ({"cases": 2}, ids(*lost[4:]))


def test_the_post_mortem_of_the_worker_is_shown() -> None:
    noted = PostMortem(
        limit=10 * GIB,
        asked=2 * GIB,
        held=9 * GIB,
        phase="backward",
        lines={"saved: attention, softmax": 6 * GIB, "parameters": 2 * GIB},
        needed=15 * GIB,
        remedies=(Remedy(words="batch 1", peak=8 * GIB, changes={"batch": 1}),),
    )
    attached = {"post_mortem": msgspec.to_builtins(noted)}
    lost = memory_record(status="oom", reason="CUDA out of memory", attachments=attached)
    finding = by_code([lost])["ran-out"]
    assert (
        "ran out of memory in the backward phase when it requested another 2.00 GiB" in finding.text
    )
    assert [finding.values[name] for name in ("asked", "needed", "limit", "missing", "remedy")] == [
        2 * GIB,
        15 * GIB,
        10 * GIB,
        5 * GIB,
        "batch 1",
    ]
    entries = "Largest entries: saved: attention, softmax 6.00 GiB, parameters 2.00 GiB"
    assert entries in finding.text
    assert "smallest change first: batch 1 (8.00 GiB)" in finding.conclusion


def test_a_device_that_nothing_fits_is_reported() -> None:
    tiny = environment(device_memory_bytes=1 << 20)
    lost = memory_record(status="oom", reason="out of memory", environment=tiny)
    finding = by_code([lost])["ran-out"]
    assert finding.conclusion == "No known change fits."
    assert finding.values["remedy"] is None


def test_saved_tensors_are_listed_in_a_table() -> None:
    saved = SavedTensor(
        module="blocks.0.attention",
        operator="softmax",
        shape=(4, 8, 16, 16),
        dtype="float32",
        bytes=32768,
        code="reference.py:39",
    )
    rows = table([memory_record(saved=(saved,))], "memory-saved").rows
    expected = ("blocks.0.attention", "softmax", "4×8×16×16", "float32", 32768, "reference.py:39")
    assert rows == (expected,)


def test_equal_saved_tensors_of_repeated_modules_are_one_row() -> None:
    saved = SavedTensor(
        module="blocks.0.attention",
        operator="softmax",
        shape=(4, 8),
        dtype="float32",
        bytes=128,
        code="model.py:39",
    )
    blocks = [
        msgspec.structs.replace(saved, module=f"blocks.{block}.attention") for block in range(12)
    ]
    other = msgspec.structs.replace(saved, module="head1", bytes=1000)
    rows = table([memory_record(saved=(other, *blocks))], "memory-saved").rows
    assert rows == (
        ("blocks.*.attention", "softmax", "4×8", "float32", 12, 128, 12 * 128, "model.py:39"),
        ("head1", "softmax", "4×8", "float32", 1, 1000, 1000, "model.py:39"),
    )


def test_bytes_per_parameter_are_measured_if_a_step_ran() -> None:
    rows: dict[Any, Any] = {
        row[0]: row for row in table([memory_record(peak=1 << 30)], "memory-regimes").rows
    }
    assert [row[4] for row in rows.values()] == [16, 16, 8, 16]
    parameters = cost.parameters(find_size("tiny")).total
    assert rows["float32"][5] == pytest.approx((1 << 29) / parameters)
    assert rows["bfloat16-pure"][5] is None


def test_records_of_another_form_are_left_out() -> None:
    bare = msgspec.structs.replace(memory_record(), attachments={})
    assert cases_of([bare]) == []
    assert find_study("memory").view([bare]) == ()
