"""The page as a file: well-formed, self-contained, escaped, and fast to write."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from command_line import python
from sample_page import HOSTILE, hostile_page, kernel_table, sample_page, section
from stepscope.report.blocks import Column, Page, Table
from stepscope.report.html import html_page
from stepscope.report.svg import VARIABLES
from stepscope.report.terminal import print_table
from stepscope.report.text import markdown

VOID = {"meta", "link", "input", "br", "img"}


class Reader(HTMLParser):
    """Elements with their attributes, the text outside scripts, and the balance of the tags."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] in (["script"], ["style"]) else self.texts).append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(name)) is not None]


@pytest.fixture(scope="module")
def page() -> str:
    return html_page(sample_page())


@pytest.fixture(scope="module")
def hostile() -> str:
    return html_page(hostile_page())


def test_the_page_is_well_formed(page: str, hostile: str) -> None:
    for text in (page, hostile):
        assert text.startswith("<!doctype html>")
        assert Reader(text).open == []


def test_the_page_shows_all_texts(page: str) -> None:
    text = " ".join("".join(Reader(page).texts).split())
    for part in ("Training step on NVIDIA H200", "Summary of the runs", "1,184 ± 3", "OOM", "ms"):
        assert part in text
    for shown in sample_page().sections:
        assert shown.title in text
        assert shown.question in text


def test_hostile_text_is_text_everywhere(hostile: str) -> None:
    reader = Reader(hostile)
    assert not [tag for tag, _ in reader.elements if tag == "img"]
    assert not [name for _, attrs in reader.elements for name in attrs if name.startswith("on")]
    assert "".join(reader.texts).count(HOSTILE) > 30
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == 3


def test_details_are_json_that_cannot_close_the_script(hostile: str) -> None:
    data = re.search(r'<script type="application/json" id="details">(.*?)</script>', hostile, re.S)
    assert data
    assert "<" not in data.group(1)
    details = json.loads(data.group(1))
    assert list(details.values()) == [[HOSTILE] * 3] * 3
    assert set(details) <= set(Reader(hostile).attributes("id"))


def test_every_id_is_unique_and_every_reference_resolves(page: str, hostile: str) -> None:
    for text in (page, hostile):
        reader = Reader(text)
        ids = reader.attributes("id")
        assert len(ids) == len(set(ids))
        labels = reader.attributes("aria-describedby") + reader.attributes("aria-labelledby")
        targets = [href[1:] for href in reader.attributes("href") if href.startswith("#")]
        assert set(" ".join(labels).split()) | set(targets) <= set(ids)
        assert len(targets) > 3


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    reader = Reader(page)
    assert reader.attributes("src") == []
    assert {href for href in reader.attributes("href") if href[:1] != "#"} == {"data:,"}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_the_policy_allows_exactly_this_script_and_style(page: str) -> None:
    policy = next(
        attrs["content"] or "" for tag, attrs in Reader(page).elements if "http-equiv" in attrs
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for directive, pattern in (
        ("script", r"<script>(.*?)</script>"),
        ("style", r"<style>(.*?)</style>"),
    ):
        source = re.findall(pattern, page, re.S)
        assert len(source) == 1
        digest = base64.b64encode(hashlib.sha256(source[0].encode()).digest()).decode()
        assert f"{directive}-src 'sha256-{digest}'" in policy
    assert Reader(page).attributes("style") == []


def test_numeric_cells_have_their_raw_value() -> None:
    table = Table(
        name="t",
        title="T",
        columns=(Column(title="c", kind="number"),),
        rows=((1234.5678,), ("OOM",), (None,), (float("nan"),)),
    )
    html = html_page(Page(title="p", subtitle="", headline=table, sections=()))
    cells = [attrs for tag, attrs in Reader(html).elements if tag == "td"]
    assert [cell.get("data-value") for cell in cells] == ["1234.5678", None, None, None]
    assert [cell["class"] for cell in cells] == ["number", "word", "none number", "number"]


def test_code_is_marked() -> None:
    table = Table(
        name="t",
        title="T",
        caption="`a<b>` and ` alone",
        rows=(("0.1|0", None),),
        columns=(Column(title="c", kind="code"), Column(title="d")),
    )
    html = html_page(Page(title="p", subtitle="", headline=table, sections=()))
    assert '<p class="caption"><code>a&lt;b&gt;</code> and ` alone</p>' in html
    assert '<td class="code">0.1|0</td>' in html
    assert '<td class="none">–</td>' in html
    assert markdown(table).splitlines()[-1] == r"`a<b>` and \` alone"
    assert markdown(table).splitlines()[4] == r"| `0.1\|0` | – |"


def test_lines_of_code_stay_lines() -> None:
    table = Table(
        name="t",
        title="T",
        rows=(("compile", "for block in blocks:\n    block.compile()  # " + "x" * 70),),
        columns=(Column(title="change"), Column(title="lines", kind="code")),
    )
    html = html_page(Page(title="p", subtitle="", headline=table, sections=()))
    assert '<td class="code long">for block in blocks:\n    block.compile()' in html
    assert "`for block in blocks:`<br>`block.compile() # " in markdown(table)
    out = io.StringIO()
    print_table(table, Console(file=out, width=60, highlight=False))
    body = [line.removeprefix("compile").strip() for line in out.getvalue().splitlines()[3:]]
    assert body[:2] == ["for block in blocks:", "block.compile()"]
    # Every line of a comment has its sign.
    assert len(body) > 3
    assert all(line.startswith("# ") for line in body[2:])
    assert "".join(line.removeprefix("# ") for line in body[2:]) == "x" * 70


def test_only_long_tables_have_a_filter(page: str) -> None:
    assert Reader(page).attributes("data-filter") == ["benchmark-2", "kernels"]


def test_the_style_sheet_names_every_color_of_the_figures(page: str) -> None:
    style = re.findall(r"<style>(.*?)</style>", page, re.S)[0]
    light, _, dark = style.partition("prefers-color-scheme: dark")
    for color, name in VARIABLES.items():
        assert f"{name}: {color};" in light
        assert re.search(rf"{name}: #[0-9a-f]{{6}};", dark)


def test_the_page_is_deterministic(page: str) -> None:
    assert html_page(sample_page()) == page


def test_a_page_without_sections_is_well_formed() -> None:
    empty = Table(name="", title="", columns=(), rows=())
    html = html_page(Page(title="", subtitle="", headline=empty, sections=()))
    assert Reader(html).open == []


def test_blocks_load_without_the_drawing_libraries() -> None:
    code = (
        "import sys, stepscope.report.blocks, stepscope.report.format, stepscope.report.text, "
        "stepscope.report.terminal, stepscope.report.plots, stepscope.report.html; "
        "print({'torch', 'matplotlib', 'jinja2', 'rich', 'numpy'} & set(sys.modules))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "set()"


def test_the_work_for_a_page_is_proportional_to_its_rows() -> None:
    def calls(rows: int) -> int:
        tables = (section("s", "S", "?", kernel_table(rows)),)
        page = Page(title="", subtitle="", headline=sample_page().headline, sections=tables)
        counted = itertools.count()
        sys.setprofile(lambda *_: next(counted))
        try:
            html_page(page)
        finally:
            sys.setprofile(None)
        return next(counted)

    calls(1)
    assert 0 < calls(400) - calls(50) < 10 * (calls(100) - calls(50))
