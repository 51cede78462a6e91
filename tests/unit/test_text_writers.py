"""Output as Markdown, LaTeX, CSV and to the terminal."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console

from sample_page import (
    HOSTILE,
    benchmark_table,
    headline,
    hostile_page,
    kernel_table,
    sample_page,
    warmup_figure,
)
from stepscope.report.blocks import Column, Finding, Interval, Spread, Table
from stepscope.report.figure_data import data_table
from stepscope.report.format import cell_text
from stepscope.report.terminal import print_findings, print_sections, print_table
from stepscope.report.text import csv_text, latex, markdown, markdown_page


def table(*rows: tuple[object, ...], kinds: tuple[str, ...] = ("text", "number")) -> Table:
    columns = tuple(Column(title=f"c{i}", kind=kind) for i, kind in enumerate(kinds))
    return Table(name="t", title="T", columns=columns, rows=rows)


def printed(width: int, draw: object, *content: object) -> str:
    out = io.StringIO()
    draw(*content, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def pipes(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line))


def test_markdown_aligns_numbers_right_and_escapes() -> None:
    lines = markdown(table(("a|b\nc", 1.5), ("*x*", None))).splitlines()
    assert lines[2:] == [
        "| c0 | c1 |",
        "| :--- | ---: |",
        r"| a\|b c | 1.500 |",
        r"| \*x\* | – |",
    ]


def test_hostile_names_do_not_break_a_markdown_table() -> None:
    lines = [line for line in markdown(hostile_page().headline).splitlines() if line[:1] == "|"]
    assert [pipes(line) for line in lines] == [3] * 5
    assert not re.search(r"(?<!\\)[<$]", "\n".join(lines))


def test_the_page_has_every_section_finding_and_table() -> None:
    page = sample_page()
    text = markdown_page(page)
    assert text.startswith("# Training step on NVIDIA H200\n")
    for section in page.sections:
        assert f"## {section.title}\n\n*{section.question}*" in text
    assert "> ⚠ Size 2.7b does not fit" in text
    assert "**Step time by size and context**" in text
    assert "| 128 | 12.38 [11.52, 13.37] |" in text
    assert "*Figure, not shown here: The first twenty steps*" in text


def test_latex_escapes_everything_special() -> None:
    written = latex(table((r"a_b & 50% #1 $x$ {y} ~ ^ \z <µs>", Spread(value=1.5, plus_minus=0.1))))
    row = written.splitlines()[5]
    assert row == (
        r"a\_b \& 50\% \#1 \$x\$ \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}z "
        r"\textless{}$\mu$s\textgreater{} & 1.500 $\pm$ 0.100 \\"
    )
    assert written.splitlines()[1:3] == [r"\begin{tabular}{lr}", r"\toprule"]


def test_latex_keeps_a_hostile_title_in_its_comment() -> None:
    hostile = Table(name="t", title="a\n\\input{x}", columns=(Column(title="c"),), rows=())
    assert latex(hostile).splitlines()[0] == r"% a \input{x}"


def test_csv_has_raw_numbers_and_splits_spreads() -> None:
    mixed = table(
        ("a", Spread(value=1.23456789, plus_minus=0.01), 0.4871234),
        ("b", Interval(value=2.0, low=1.0, high=3.0), None),
        kinds=("text", "number", "percent"),
    )
    rows = list(csv.reader(io.StringIO(csv_text(mixed))))
    assert rows[0] == ["c0", "c1", "c1 ±", "c1 low", "c1 high", "c2 (fraction)"]
    assert rows[1] == ["a", "1.23456789", "0.01", "", "", "0.4871234"]
    assert rows[2] == ["b", "2.0", "", "1.0", "3.0", ""]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_text_is_not_a_formula(start: str) -> None:
    rows = list(csv.reader(io.StringIO(csv_text(table((f"{start}cmd()", -1.5))), newline="")))
    assert rows[1] == ["'" + start.replace("\r", "\n") + "cmd()", "-1.5"]


def test_a_figure_as_a_table_has_its_points_and_limits() -> None:
    rows = data_table(warmup_figure()).rows
    assert len(rows) == 21
    assert rows[0] == (1, pytest.approx(871.7))
    assert rows[-1] == ("steady", 231.7)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_digit_is_cut_on_a_narrow_terminal(width: int) -> None:
    shown = benchmark_table()
    text = printed(width, print_table, shown)
    assert max(len(line) for line in text.splitlines()) <= width
    for row in shown.rows:
        for cell, column in zip(row, shown.columns, strict=True):
            assert cell_text(cell, column) in text


@pytest.mark.parametrize("width", range(40, 72))
def test_no_column_is_cropped_if_only_headers_can_fold(width: int) -> None:
    columns = [Column(title="a,long,name,of,it"), Column(title="kind")]
    columns += [Column(title=name, kind="number", unit="ms") for name in ("one", "other", "third")]
    shown = Table(
        name="t", title="", columns=tuple(columns), rows=(("1,4,256,64", "x", 61.0, 358.7, 13.3),)
    )
    text = printed(width, print_table, shown)
    assert max(len(line) for line in text.splitlines()) <= width
    for words in ("one", "other", "third", "61.00", "358.7", "13.30"):
        assert words in text


def test_every_part_of_a_wide_table_repeats_the_key() -> None:
    text = printed(60, print_table, benchmark_table())
    heads = [line for line in text.splitlines() if line.startswith("Size")]
    assert len(heads) >= 3
    assert text.count("2.7b") == 5 * len(heads)


def test_long_names_continue_on_the_next_line() -> None:
    shown = kernel_table(3)
    text = printed(44, print_table, shown)
    assert max(map(len, text.splitlines())) <= 44
    assert "…" not in text
    first = text[: text.index("\n\n")]
    names = "".join(line.split("  ")[0].strip() for line in first.splitlines()[3:])
    assert names == "".join(str(row[0]) for row in shown.rows)


def test_names_that_are_too_high_to_repeat_are_printed_once() -> None:
    name = "_".join(f"part{n}of{n}" for n in range(20))
    columns = [Column(title="kernel"), *(Column(title=f"t{n}", kind="number") for n in range(8))]
    rows = tuple((f"{name}_{n}", *[1234.5] * 8) for n in range(2))
    text = printed(60, print_table, Table(name="t", title="", columns=tuple(columns), rows=rows))
    assert text.count("part7of7_") == 2
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert len(heads) > 1


def test_of_a_very_long_text_the_middle_is_left_out() -> None:
    text = printed(40, print_table, table((" ".join(map(str, range(5000))), 1.0)))
    assert text.count("…") == 1
    assert "4999" in text
    assert len(text.splitlines()) < 40


def test_columns_that_are_the_same_in_every_row_are_named_once() -> None:
    columns = [Column(title=title) for title in ("size", "dtype", "note")]
    columns += [Column(title=f"time {n}", kind="number") for n in range(12)]
    rows = tuple((size, "float32", "", *[1234.5] * 12) for size in ("small", "large"))
    text = printed(80, print_table, Table(name="t", title="", columns=tuple(columns), rows=rows))
    assert text.count("float32") == 1
    assert "In all rows: dtype float32." in text
    assert "note" not in text


def test_keys_that_are_too_wide_to_repeat_are_numbered() -> None:
    columns = [Column(title=f"key {n}") for n in range(4)]
    columns += [Column(title=f"time {n}", kind="number") for n in range(5)]
    chosen = ((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1))
    rows = tuple((*[f"value {n} of it" for n in keys], *[1.5] * 5) for keys in chosen)
    text = printed(80, print_table, Table(name="t", title="", columns=tuple(columns), rows=rows))
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert len(heads) == 2
    assert [line[0] for line in text.splitlines() if line[:1].isdigit()] == list("1234512345")


def test_every_part_of_a_table_has_the_columns_that_distinguish_its_rows() -> None:
    words = [Column(title=title) for title in ("case", "compiled", "mode")]
    times = [Column(title=f"time {n}", kind="number") for n in range(6)]
    name = "small at context 512 in bfloat16"
    variants = (("block", "default"), ("model", "default"), ("block", "reduce-overhead"))
    rows = tuple((name, *variant, *[1234.0 + n for n in range(6)]) for variant in variants)
    text = printed(80, print_table, Table(name="t", title="", columns=(*words, *times), rows=rows))
    parts = text.count("case")
    assert parts > 1
    assert text.count("model") == text.count("reduce-overhead") == parts


@pytest.mark.parametrize("width", [60, 80, 160])
def test_text_uses_the_available_width(width: int) -> None:
    question = "How long do the forward and the backward take, and how steady is that? " * 3
    shown = Table(
        name="t",
        title="",
        columns=(Column(title="name"), Column(title="question")),
        rows=(("benchmark", question.strip()),),
    )
    lines = [line.rstrip() for line in printed(width, print_table, shown).splitlines()]
    assert width - 12 <= max(map(len, lines)) <= width
    assert " ".join(line[11:] for line in lines[2:]) == question.strip()


def test_data_is_not_interpreted_as_markup_or_control_sequences() -> None:
    text = printed(200, print_table, table(("[red]x[/red] \x1b[31my", 1.0)))
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    findings = printed(200, print_findings, [Finding(text=HOSTILE)])
    assert HOSTILE in findings


def test_sections_print_without_a_terminal() -> None:
    text = printed(80, print_sections, sample_page().sections)
    assert "✓ After 4 steps" in text
    assert "Figure on the page: The first twenty steps" in text


def test_a_table_that_fits_is_not_split() -> None:
    assert printed(100, print_table, headline()).count("Training step") == 1
