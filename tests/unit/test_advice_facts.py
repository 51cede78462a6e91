"""Facts of a watched step, read from its record, on which advice is based."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from own_records import attached, inspected_record
from stepscope.advisor.advise.facts import facts_of
from stepscope.analysis.advice.rules.dtype import with_faster_matmuls
from stepscope.analysis.advice.timeline import wall_ms
from stepscope.analysis.kernels.names import describe
from stepscope.analysis.trace.summary import LedgerLine, Summary
from stepscope.records.jsonl import read_records
from stepscope.records.memory import KEPT_INPUT, RECOMPUTED, SAVED, PhasePeak, SavedTensor
from stepscope.records.schema import Series
from stepscope.views.program.findings import inspected_findings
from stepscope.views.program.rows import ProgramRecord
from stepscope.views.program.setting import Setting, setting_of
from view_blocks import coded

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    ("kernel", "precision", "expected"),
    [
        ("BF16 tensor cores", "highest", "bfloat16"),
        ("TF32 tensor cores", "highest", "tf32"),
        ("FP32 cores", "high", "float32"),
        ("", "high", "tf32"),
        ("", "highest", "float32"),
    ],
)
def test_the_dtype_of_matmuls_is_that_of_their_kernels(
    kernel: str, precision: str, expected: str
) -> None:
    """A compiled program shows no operators: its weights are float32, its matmuls are not."""
    setting = Setting(
        models=("Net",),
        optimizers=(),
        compiled=True,
        parameter_formats={"float32": 10},
        matmul_precision=precision,
        distributed=False,
    )
    watched = inspected_record()
    summary = watched.required("profile", Summary)
    row = msgspec.structs.replace(summary.kernels[0], kind="matmul", unit=kernel, ms=1.0)
    summary = msgspec.structs.replace(summary, on_device=True, kernels=(row,))
    step = facts_of(attached(watched, profile=summary, setting=setting))
    assert (step.dtype, step.autocast) == (expected, expected == "bfloat16")


@pytest.mark.parametrize(
    ("copies", "waits", "reads_back", "pageable_ms"),
    [
        (("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"), "end", True, 1),
        (("Memcpy HtoD (Pageable -> Device)",), "copies", False, 1),
        (("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)"), "", False, 0),
    ],
)
def test_copies_show_where_a_program_waits(
    copies: tuple[str, ...], waits: str, reads_back: bool, pageable_ms: float
) -> None:
    watched = inspected_record()
    summary = watched.required("profile", Summary)
    rows = tuple(
        msgspec.structs.replace(
            summary.kernels[0],
            kernel=describe(name).short,
            kind="copy/cast",
            ms=1.0,
            count=1.0,
            phase="outside",
        )
        for name in copies
    )
    summary = msgspec.structs.replace(summary, on_device=True, kernels=rows, waited_ms=0.1)
    step = facts_of(attached(watched, profile=summary))
    assert (step.waits, step.reads_back, step.pageable_ms) == (waits, reads_back, pageable_ms)


@pytest.mark.parametrize(
    ("kernel", "tf32", "bfloat16"),
    [
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8", 8.75, 9.375),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", 0.0, 5.0),
        ("void dgrad2d_grouped_direct_kernel<float>(float*)", 0.0, 0.0),
    ],
)
def test_the_gain_of_another_dtype_depends_on_the_matmul_kernel(
    kernel: str, tf32: float, bfloat16: float
) -> None:
    """Convolutions use TF32 by default, and depthwise ones do not use tensor cores."""
    watched = inspected_record()
    summary = watched.required("profile", Summary)
    described = describe(kernel)
    row = msgspec.structs.replace(
        summary.kernels[0],
        kernel=described.short,
        library=described.library,
        kind=described.kind,
        unit="",
        ms=10.0,
        count=1.0,
        phase="forward",
    )
    line = LedgerLine(phase="forward", kind=described.kind, ms=10.0)
    summary = msgspec.structs.replace(summary, on_device=True, kernels=(row,), lines=(line,))
    step = Series(name="step", unit="ms", values=(10.0,) * 5)
    record = msgspec.structs.replace(attached(watched, profile=summary), series=(step,))
    facts = msgspec.structs.replace(
        facts_of(record), rates={"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}
    )
    for to, expected in (("tf32", tf32), ("bfloat16", bfloat16)):
        after = with_faster_matmuls(facts, to)
        assert after is not None
        assert facts.device_ms - after.device_ms == pytest.approx(expected), to


def test_the_host_has_a_time_for_each_phase() -> None:
    """A step on an H200 whose device is slower, so that no other time shows the host."""
    (record, *_) = read_records(RESULTS / "advise-slow_h200.jsonl")
    watched = ProgramRecord(record)
    took = watched.issue_ms
    assert list(took) == ["outside", "forward", "backward", "optimizer"]
    facts = facts_of(record)
    works = {work.name: work for work in facts.phases}
    assert facts.host_ms == pytest.approx(sum(took.values()))
    assert works["outside"].issued_ms(1.0) == took["outside"]
    assert works["forward"].issued_ms(1.0) == pytest.approx(took["forward"])
    # Operators of a model take the host three times as long as those of a loop over tensors.
    assert works["forward"].launch_ms > 2 * works["optimizer"].launch_ms  # type: ignore[operator]
    assert works["loss"].launch_ms == works["backward"].launch_ms
    # Its loss is an unnamed softmax: 0.48 ms forward and 0.37 ms backward.
    assert 0.85 < facts.loss_ms < 1.1
    # Nothing is fitted to this record.
    assert wall_ms(facts) == pytest.approx(facts.step_ms, rel=0.02)
    finding = coded(inspected_findings([watched]), "inspect.issue")
    assert finding.values["issue_ms"] == pytest.approx(sum(took.values()))
    assert f"takes {sum(took.values()):.3g} ms to issue" in finding.text
    assert watched.summary is not None
    kernels = tuple(row for row in watched.summary.kernels if row.phase != "outside")
    lines = tuple(line for line in watched.summary.lines if line.phase != "outside")
    without = msgspec.structs.replace(watched.summary, kernels=kernels, lines=lines)
    bare = facts_of(attached(record, profile=without))
    assert bare.host_ms == pytest.approx(sum(took.values())), "no kernel outside, but time"
    loading = Series(name="issue", phase="data", unit="ms", values=(4.0, 6.0, 5.0))
    loads = facts_of(msgspec.structs.replace(record, series=(*record.series, loading)))
    assert loads.data_ms == 5.0
    assert loads.phases[0].host_ms == took["outside"] + 5.0
    old = msgspec.structs.replace(record, series=record.series[:2])
    assert facts_of(old).phases[0].launch_ms is None


@pytest.mark.parametrize(
    ("name", "of_torch", "family"),
    [
        ("Adam", True, "adam"),
        ("AdamW", True, "adam"),
        ("NAdam", True, ""),
        ("SGD", True, "sgd"),
        ("MyAdam", False, "adam"),
        ("Lion", False, ""),
    ],
)
def test_only_optimizers_with_a_fused_implementation_have_a_family(
    name: str, of_torch: bool, family: str
) -> None:
    watched, *_ = read_records(RESULTS / "advise-slow_cpu.jsonl")
    setting = setting_of(watched)
    assert setting is not None
    (one,) = setting.optimizers
    other = msgspec.structs.replace(one, name=name, of_torch=of_torch)
    changed = msgspec.structs.replace(setting, optimizers=(other,))
    step = facts_of(attached(watched, setting=changed))
    assert step.optimizer == family
    assert step.optimizer_name == (name if of_torch else "")


def test_a_wait_for_other_ranks_is_not_optimizer_work() -> None:
    watched, _ = read_records(RESULTS / "advise-slow_cpu.jsonl")[:2]
    alone = facts_of(watched)
    among = facts_of(msgspec.structs.replace(watched, config=watched.config | {"ranks": 2}))
    (waited,) = (w.classes["between"] for w in alone.phases if w.name == "optimizer")
    assert waited > 1
    assert among.phase_ms("optimizer") == pytest.approx(alone.phase_ms("optimizer") - waited)


def test_recomputation_counts_for_every_checkpointed_segment() -> None:
    """Of two micro-batches with four segments each, four inputs are live at one time."""
    mib = 1 << 20
    saved = SavedTensor(
        module="checkpoint",
        operator="input",
        shape=(8, 64),
        dtype="float32",
        bytes=mib,
        code="net.py:1",
        times=8,
    )
    forward, backward = (
        PhasePeak(phase=phase, allocated=sum(lines.values()), lines=lines, operator="mm")
        for phase, lines in (
            ("forward", {f"{SAVED}{KEPT_INPUT}": 4 * mib}),
            ("backward", {f"{SAVED}{KEPT_INPUT}": 3 * mib, RECOMPUTED: 5 * mib}),
        )
    )
    stored = attached(inspected_record(), ledger=[forward, backward], saved=[saved])
    assert facts_of(stored).recomputed_bytes == 20 * mib
