"""Formatting of numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.report import format as fmt
from stepscope.report.blocks import Cell, Column, Interval, Kind, Spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (-12.3456, "−12.35"),
        (999.96, "1,000"),
        (99.996, "100.0"),
        (123456.7, "123,457"),
        (0.0123456, "0.01235"),
        (0.000012345, "1.234e−5"),
        (1.5e20, "1.500e20"),
        (12345678, "12,345,678"),
        (math.nan, "nan"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12.3 µs"),
        (0.00001, "0.0100 µs"),
        (0.99996, "1.00 ms"),
        (999.4, "999 ms"),
        (999.96, "1.00 s"),
        (-3.25, "−3.25 ms"),
        (5_400_000, "5,400 s"),
        (math.nan, "nan µs"),
    ],
)
def test_duration(ms: float, text: str) -> None:
    assert fmt.duration(ms) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (1000, "1,000 B"),
        (1024, "1.00 KiB"),
        (1023.96 * 1024, "1.00 MiB"),
        (1536 * 1024**2, "1.50 GiB"),
        (-5 * 1024**3, "−5.00 GiB"),
        (5e30, "4,440,892,098,500,626 PiB"),
    ],
)
def test_bytes(n: float, text: str) -> None:
    assert fmt.bytes_(n) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (7.9e14, "FLOP/s", "790 TFLOP/s"),
        (4.3e12, "B/s", "4.30 TB/s"),
        (2.5e5, "launches/s", "250 k launches/s"),
        (999.96e9, "B/s", "1.00 TB/s"),
        (42.0, "tokens/s", "42.0 tokens/s"),
        (0.0, "FLOP/s", "0 FLOP/s"),
        (-2e6, "B/s", "−2.00 MB/s"),
        (1234.0, "", "1.23 k"),
        (math.inf, "B/s", "∞ B/s"),
    ],
)
def test_rate(value: float, unit: str, text: str) -> None:
    assert fmt.rate(value, unit) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.487, "48.7 %"),
        (0, "0.0 %"),
        (1, "100.0 %"),
        (0.0004, "0.04 %"),
        (-0.02, "−2.0 %"),
        (0.99996, "100.0 %"),
        (12.5, "1,250.0 %"),
        (4e-7, "4e−5 %"),
        (-6e-9, "−6e−7 %"),
    ],
)
def test_percent(fraction: float, text: str) -> None:
    assert fmt.percent(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (128, "128"),
        (65536, "65,536"),
        (0.5, "0.5"),
        (0.1 + 0.2, "0.3"),
        (2_000_000, "2 M"),
        (2.5e9, "2.5 G"),
        (1e-7, "1e−7"),
        (0, "0"),
    ],
)
def test_tick(value: float, text: str) -> None:
    assert fmt.tick(value) == text


@pytest.mark.parametrize(
    ("cell", "kind", "unit", "text"),
    [
        (None, "number", "ms", "–"),
        ("OOM", "number", "ms", "OOM"),
        (512, "text", "", "512"),
        (0.25, "text", "", "0.2500"),
        (51200, "count", "", "51,200"),
        (2.5, "count", "", "2.500"),
        (51234.6, "count", "", "51,235"),
        (math.nan, "count", "", "nan"),
        (0.487, "percent", "", "48.7 %"),
        (2 * 1024**3, "bytes", "", "2.00 GiB"),
        (7.9e14, "rate", "FLOP/s", "790 TFLOP/s"),
        (Spread(value=12.3456, plus_minus=0.4), "number", "ms", "12.35 ± 0.40"),
        (Spread(value=812.345, plus_minus=0.004), "number", "ms", "812.345 ± 0.004"),
        (Spread(value=812.345, plus_minus=1e-9), "number", "ms", "812.345 ± 0.000"),
        (Spread(value=0.0, plus_minus=0.02), "number", "ms", "0.000 ± 0.020"),
        (Spread(value=0.487, plus_minus=0.003), "percent", "", "48.7 ± 0.3 %"),
        (Spread(value=7.9e14, plus_minus=4e12), "rate", "FLOP/s", "790 ± 4 TFLOP/s"),
        (Spread(value=math.nan, plus_minus=math.nan), "number", "", "nan ± nan"),
        (Interval(value=12.3, low=12.1, high=12.6), "number", "ms", "12.30 [12.10, 12.60]"),
        (
            Interval(value=3 * 1024**3, low=2.5 * 1024**3, high=3.25 * 1024**3),
            "bytes",
            "",
            "3.00 [2.50, 3.25] GiB",
        ),
    ],
)
def test_cell_text(cell: Cell, kind: Kind, unit: str, text: str) -> None:
    assert fmt.cell_text(cell, Column(title="x", kind=kind, unit=unit)) == text


def test_the_header_has_the_unit_unless_the_cells_show_it() -> None:
    assert fmt.header(Column(title="Step", kind="number", unit="ms")) == "Step (ms)"
    assert fmt.header(Column(title="Size")) == "Size"
    assert fmt.header(Column(title="Rate", kind="rate", unit="FLOP/s")) == "Rate"
    assert fmt.header(Column(title="Peak", kind="bytes", unit="B")) == "Peak"


@given(st.floats(min_value=1e-4, max_value=1e14), st.sampled_from([1.0, -1.0]))
def test_a_formatted_number_parses_within_its_digits(size: float, sign: float) -> None:
    value = sign * size
    assert float(fmt.number(value).replace(",", "").replace("−", "-")) == pytest.approx(
        value, rel=5.1e-4
    )


@given(st.floats(min_value=0, max_value=1e18))
def test_a_prefix_leaves_at_most_three_integer_digits(value: float) -> None:
    written = fmt.rate(value, "B/s").split()[0].replace(",", "")
    assert float(written) < 1000


@given(
    st.floats(min_value=-1e9, max_value=1e9),
    st.floats(min_value=0, max_value=1e9),
    st.sampled_from(["number", "percent", "bytes", "rate"]),
)
def test_a_value_and_its_spread_have_the_same_decimals(
    value: float, plus_minus: float, kind: Kind
) -> None:
    cell = Spread(value=value, plus_minus=plus_minus)
    text = fmt.cell_text(cell, Column(title="x", kind=kind, unit="B/s"))
    left, right = text.split(" ± ")
    decimals = [len(part.split()[0].partition(".")[2]) for part in (left, right)]
    assert decimals[0] == decimals[1]


def test_plurals() -> None:
    assert [fmt.counted(n, "case") for n in (0, 1, 2, 1200)] == [
        "0 cases",
        "1 case",
        "2 cases",
        "1,200 cases",
    ]
