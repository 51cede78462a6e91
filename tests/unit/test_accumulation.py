"""Arithmetic of dtypes against torch, and the accumulation study, measured on this machine."""

from __future__ import annotations

import math

import pytest
import torch

from precision_records import dot_record, square_record, sum_record
from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.analysis.floats import FORMATS, align
from stepscope.errors import UsageError
from stepscope.records.schema import Record
from stepscope.studies.accumulation.cases import OVERFLOWED, AccumulationFlags
from stepscope.studies.base import Measurement
from stepscope.studies.registry import find_study
from view_blocks import findings_of, table_of


def measured(**wanted: object) -> Measurement:
    study = find_study("accumulation")
    flags = AccumulationFlags(length=(64, 4096))
    (case,) = (c for c in study.cases(flags) if wanted.items() <= c.config.items())
    return study.measure(case, QuietBench())


def findings(records: list[Record]) -> str:
    shown = find_study("accumulation").view(records)
    return " ".join(finding.text for finding in findings_of(shown))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
class TestDtypes:
    def test_limits_match_torch_finfo(self, name: str) -> None:
        format_, expected = FORMATS[name], torch.finfo(getattr(torch, name))
        assert format_.largest == expected.max
        assert format_.epsilon == expected.eps
        assert format_.smallest_normal == expected.smallest_normal

    def test_rounding_matches_torch(self, name: str) -> None:
        format_, dtype = FORMATS[name], getattr(torch, name)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(300, generator=generator, dtype=torch.float64)
        scales = 10.0 ** torch.randint(-9, 6, (300,), generator=generator).double()
        for value in (values * scales).tolist():
            assert (
                format_.nearest(value) == torch.tensor(value, dtype=torch.float64).to(dtype).item()
            )

    def test_stalls_where_an_addition_changes_nothing(self, name: str) -> None:
        format_, dtype = FORMATS[name], getattr(torch, name)
        for term in (0.01, 0.3, 1.0, 7.0):
            edge = torch.tensor(format_.stalls_at(term), dtype=dtype)
            addend = torch.tensor(term, dtype=dtype)
            assert edge + addend == edge
            assert edge / 2 + addend != edge / 2


def test_values_at_and_beyond_the_largest_of_each_dtype() -> None:
    assert FORMATS["float16"].nearest(65504.0) == 65504.0
    assert FORMATS["float16"].nearest(-70000.0) == -math.inf
    assert FORMATS["float16"].nearest(1e-9) == 0.0


def test_the_smaller_number_is_shifted_out() -> None:
    drawn = align(1000.0, 0.01, FORMATS["float16"])
    assert (drawn.larger, drawn.exponent) == ("1.1111010000", 9)
    assert (drawn.smaller, drawn.exponent - drawn.gap) == ("1.0100011111", -7)
    assert drawn.shifted == "0.0000000000|0000010100011111"
    assert drawn.total == drawn.larger
    assert drawn.result == 1000.0
    near = align(1000.0, 1.0, FORMATS["float16"])
    assert near.gap == 9
    assert near.result == 1001.0


@pytest.mark.parametrize(
    ("terms", "accumulator", "after_1000"),
    [
        ("float32", "float32", "10.0001"),
        ("float16", "float16", "9.9531"),
        ("float16", "float32", "10.0021"),
        ("float16-converted", "float32", "10.0021"),
    ],
)
def test_the_sums_of_the_course(terms: str, accumulator: str, after_1000: str) -> None:
    measured_quantities = measured(part="sum", terms=terms, accumulator=accumulator).quantities
    assert f"{value_of(measured_quantities, 'sum_1000'):.4f}" == after_1000


def test_a_sum_stalls_at_the_limit_of_the_dtype() -> None:
    measured_quantities = measured(part="sum", terms="bfloat16", accumulator="bfloat16").quantities
    assert value_of(measured_quantities, "sum") == FORMATS["bfloat16"].stalls_at(0.01) == 4.0
    assert value_of(measured_quantities, "last_moved") < 1000


def test_a_matmul_on_the_device_is_closer_than_one_accumulated_in_its_dtype() -> None:
    series = {s.name: s.values for s in measured(part="dot", format="bfloat16").series}
    assert series["device"][-1] < 2 * FORMATS["bfloat16"].epsilon
    assert series["in_format"][-1] > 0.1


def test_squares_overflow_and_underflow() -> None:
    series = {s.name: s.values for s in measured(part="square", format="float16").series}
    squares = dict(zip(series["value"], series["square"], strict=True))
    assert squares[300.0] == OVERFLOWED
    assert squares[1e-4] == 0.0
    assert squares[200.0] == 40_000.0


def test_findings_say_when_and_why_a_sum_stops() -> None:
    text = findings([sum_record()])
    assert "1,000 additions of 0.01 should give 10: " in text
    assert "stops growing at 32 after 2,798 additions" in text
    assert "The exponents of sum and term are 12 apart and the dtype has 10 mantissa bits" in text
    assert "neighboring values are 0.03125 apart there" in text
    assert "stops" not in findings([sum_record("float32", "float32", total=100.0, moved=10_000)])


def test_findings_distinguish_a_wide_accumulator_from_a_narrow_one() -> None:
    assert "it accumulates in a wider dtype and rounds once" in findings([dot_record()])
    assert "it accumulates in the dtype itself." in findings([dot_record(device=0.5)])
    assert "the sum is accumulated in float32" in findings([dot_record("tf32", device=1e-5)])
    assert "many short sums" in findings([dot_record("float32", device=1e-7)])
    assert "as much as one long sum" in findings([dot_record("float32", device=0.9)])


def test_findings_name_the_ends_of_the_range() -> None:
    text = findings([square_record()])
    assert "squares underflow up to 0.000173 and overflow from 256 on" in text
    assert "(tried: that of 0.0001 underflows, that of 300 overflows)" in text
    assert "comes out as 0 instead of 1.000" in text
    assert "need float32" not in findings([square_record("float32", variance=1.001)])


def test_the_bits_of_a_sum_are_aligned_in_a_table() -> None:
    table = table_of(find_study("accumulation").view([square_record()]), "accumulation-alignment")
    assert [column.kind for column in table.columns] == ["text", "text", "code", "code"]
    assert [row[1:] for row in table.rows if row[0] == "bfloat16"] == [
        ("1000", "1.1111010", "2^9"),
        ("0.01", "1.0100100", "2^-7"),
        ("0.01, shifted by 16 bits", "0.0000000|0000000010100100", "2^9"),
        ("sum: 1000", "1.1111010", "2^9"),
    ]


def test_an_overflow_is_a_word_in_the_table() -> None:
    table = table_of(find_study("accumulation").view([square_record()]), "accumulation-squares")
    assert table.rows[-1] == ("300", "overflow")


@pytest.mark.parametrize(
    "fields",
    [{"count": 10}, {"term": 0.0}, {"term": float("nan")}, {"length": (1,)}, {"format": ("int8",)}],
)
def test_invalid_flags_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        AccumulationFlags(**fields)  # type: ignore[arg-type]
