"""The autocast study: dtypes as recorded at the dispatcher, measured here and from records."""

from __future__ import annotations

import msgspec
import pytest
import torch

from precision_records import autocast_record
from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.errors import UsageError
from stepscope.measure.dtypes import DtypeRecorder
from stepscope.records.schema import Quantity, Record
from stepscope.studies.autocast.cases import AutocastFlags, OperatorDtypes
from stepscope.studies.autocast.view import kept_wide
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study
from view_blocks import findings_of, table_of


def measured(subject: str, dtype: str) -> Measurement:
    study = find_study("autocast")
    (case,) = study.cases(AutocastFlags(subject=(subject,), dtype=(dtype,), context=8))
    return study.measure(case, QuietBench())


def findings(records: list[Record]) -> str:
    shown = find_study("autocast").view(records)
    return " ".join(finding.text for finding in findings_of(shown))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_small_net_of_the_course(dtype: str) -> None:
    done = measured("toy", dtype)
    named = done.attachments["formats"]
    assert named["parameters"] == named["gradients"] == named["loss"] == "float32"
    assert named["fc1 output"] == named["logits"] == dtype
    matmuls = [o for o in done.attachments["forward"] if o.operator == "mm"]
    assert matmuls == [OperatorDtypes(operator="mm", inputs=(dtype,), output=(dtype,), count=2)]
    # The input and both matrices; in the backward the gradients of the logits and of the matrices.
    assert value_of(done.quantities, "casts") == 6


def test_the_residual_stream_and_norms_stay_in_float32() -> None:
    done = measured("tiny", "bfloat16")
    named = done.attachments["formats"]
    assert named["embedding output"] == named["norm output"] == "float32"
    assert named["blocks.0.attention.query output"] == "bfloat16"
    assert not any(name.startswith("blocks.1") for name in named)
    # Every matrix once, and every input of a matmul: at least 15 weights and 15 inputs.
    assert value_of(done.quantities, "casts") >= 30
    errors = {one.variant: one.value for one in done.quantities if one.name == "norm_error"}
    assert errors["float32"] < 1e-5 < errors["bfloat16"]
    assert {series.name for series in done.series} == {"step", "casts"}


def test_casts_are_counted_and_views_are_not() -> None:
    recorder = DtypeRecorder()
    x = torch.ones(4, 6)
    with recorder:
        y = x.to(torch.bfloat16)
        y.t()
        y.view(24)
        y.to(torch.bfloat16)
        x + 1
    assert recorder.casts == {((4, 6), "float32", "bfloat16"): 1}
    assert {name for name, _, _ in recorder.operators} == {"_to_copy", "add"}


def test_findings_give_the_dtypes_and_the_cost_of_casts() -> None:
    said = findings([autocast_record()])
    assert "parameters float32, logits float16, loss float32" in said
    assert "fc1 output float16" in said
    assert "7 casts, 4.00 KiB read and written; on their own they take 10" in said
    assert "Operators of the forward pass in float32: pow" in said


def test_dtypes_of_one_subject_are_reported_together() -> None:
    said = findings([autocast_record(), autocast_record(dtype="bfloat16"), autocast_record("tiny")])
    assert (
        "The small network of the course under float16 and bfloat16 autocast: parameters float32,"
        " logits float16 / bfloat16, loss float32." in said
    )
    assert said.count("7 casts, 4.00 KiB") == 2
    assert "The tiny model under float16 autocast: " in said


def test_the_finding_explains_why_a_norm_reduces_in_float32() -> None:
    errors = {"float16": 0.005, "bfloat16": 0.037, "float32": 2e-7}
    quantities = tuple(
        Quantity(name="norm_error", variant=dtype, value=v, unit="1") for dtype, v in errors.items()
    )
    halved = tuple(msgspec.structs.replace(one, value=one.value / 2) for one in quantities)
    said = findings(
        [autocast_record(quantities=halved), autocast_record("tiny", quantities=quantities)]
    )
    assert (
        "the actual inputs of the norms of the tiny model is off by at most 3.7 % when accumulated"
        " in bfloat16 and by 0.5 % in float16, against 2e−5 % in float32" in said
    )
    assert "A norm's reductions" not in findings([autocast_record()])


def test_an_operator_that_only_casts_is_not_kept_wide() -> None:
    assert kept_wide(autocast_record()) == ["pow"]


def test_one_table_compares_the_cases() -> None:
    shown = find_study("autocast").view([autocast_record(), autocast_record("tiny")])
    table = table_of(shown, "autocast-formats")
    assert ("logits", "float16", "float16") in table.rows


@pytest.mark.parametrize(
    "fields", [{"dtype": ("float32",)}, {"subject": ("huge",)}, {"context": 0}, {"attention": "x"}]
)
def test_invalid_flags_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        AutocastFlags(**fields)  # type: ignore[arg-type]
