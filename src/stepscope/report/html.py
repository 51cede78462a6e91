"""Write a page as one self-contained HTML file: no network, no other files, no inline styles.

Its content security policy allows exactly the script and the style sheet of this package, by their
hashes, so text from a record could never run even if it were not escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analysis.flame import Frame
from stepscope.analysis.verdict import AtMost
from stepscope.errors import printable
from stepscope.report.blocks import (
    Block,
    Cell,
    Chapter,
    Column,
    Document,
    Figure,
    Finding,
    Flame,
    Interval,
    Item,
    Page,
    Section,
    Spread,
    Table,
    Timeline,
)
from stepscope.report.figure_data import data_table
from stepscope.report.format import cell_text, counted, header_unit
from stepscope.report.lanes import lanes_svg, only_meanings
from stepscope.report.plots import svg
from stepscope.report.svg import LEGEND
from stepscope.report.text import is_numeric
from stepscope.report.verdict import verdict_view

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from stepscope.analysis.verdict import Verdict

FILTER_FROM = 20
"""Tables with more rows than this get a filter box."""

DENSE_FROM = 10
"""Tables with at least this many columns are set in smaller type."""

TALL_FROM = 40
"""Tables with more rows than this scroll in a separate box."""

SHOWN_ROWS = 12
"""Tables of a document with more rows than this are folded."""

MAX_FIGURE_ROWS = 60
LONG_TEXT = 28
_MAX_WARNINGS = 3
_VERDICT_PX, _CHANGE_PX, _TABLE_PX, _ROW_PX, _NOTE_PX, _MARGIN_PX = 340, 90, 150, 52, 40, 20
"""Heights in the frame of a notebook, which does not adapt to its content: those of a column of
700 px. A narrower frame scrolls."""
_LEAST_FRAME = 5e-4
"""Frames below this share of their flame graph are not drawn."""


class HeadView(NamedTuple):
    title: str
    unit: str
    hint: str
    hint_id: str
    numeric: bool


class CellView(NamedTuple):
    text: str
    value: str
    """The raw number that the column is sorted by; empty for text and for missing values."""
    look: str


class TableView(NamedTuple):
    anchor: str
    title: str
    caption: str
    heads: list[HeadView]
    rows: list[list[CellView]]
    opens: bool
    filtered: bool
    tall: bool
    dense: bool


class FigureView(NamedTuple):
    anchor: str
    of: Figure | Timeline
    svg: str
    data: TableView | None


class FlameView(NamedTuple):
    anchor: str
    of: Flame


Views = list[tuple[str, object]]
"""Blocks as the template draws them, with their kinds."""


class SectionView(NamedTuple):
    """A card: its answer, its warnings and one picture; everything else is folded evidence."""

    anchor: str
    of: Section
    lead: Views
    evidence: Views
    evidence_title: str


class ItemView(NamedTuple):
    """A question of a document: its findings and pictures, and its tables, which are folded."""

    of: Item
    blocks: Views
    folded: Views
    elsewhere: Views
    elsewhere_folded: Views


class ChapterView(NamedTuple):
    anchor: str
    of: Chapter
    items: list[ItemView]


class Builder:
    """Converts blocks to the views of the template and assigns unique anchors."""

    def __init__(self) -> None:
        self.details: dict[str, tuple[str, ...]] = {}
        self.flames: dict[str, list[dict[str, object]]] = {}
        self.legend_used = False
        """True if a drawing relies on the legend of the page."""
        self._taken: set[str] = {"top", "details", "flames", "tip", "search"}

    def anchor(self, name: str) -> str:
        stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "part"
        anchor, count = stem, 1
        while anchor in self._taken:
            count += 1
            anchor = f"{stem}-{count}"
        self._taken.add(anchor)
        return anchor

    def section(self, section: Section) -> SectionView:
        anchor = self.anchor(section.name)
        first = lead_blocks(section)
        views = [(block in first, self._block(block)) for block in section.blocks]
        rest = [block for block in section.blocks if block not in first]
        return SectionView(
            anchor,
            section,
            [view for is_lead, view in views if is_lead],
            [view for is_lead, view in views if not is_lead],
            _contents(rest),
        )

    def chapter(self, chapter: Chapter) -> ChapterView:
        anchor = self.anchor(chapter.name)
        return ChapterView(anchor, chapter, [self._item(item) for item in chapter.items])

    def _item(self, item: Item) -> ItemView:
        def views(blocks: tuple[Block, ...]) -> tuple[Views, Views]:
            large = [b for b in blocks if isinstance(b, Table) and len(b.rows) > SHOWN_ROWS]
            shown, folded = (
                [self._block(block) for block in blocks if (block in large) is kind]
                for kind in (False, True)
            )
            return shown, folded

        return ItemView(item, *views(item.blocks), *views(item.elsewhere))

    def _block(self, block: Block) -> tuple[str, object]:
        match block:
            case Table():
                return "table", self.table(block)
            case Figure():
                return "figure", self.figure(block)
            case Timeline():
                return "timeline", self.timeline(block)
            case Flame():
                return "flame", self.flame(block)
            case _:
                return "finding", block

    def table(self, table: Table) -> TableView:
        anchor = self.anchor(table.name)
        if table.details:
            self.details[anchor] = table.details
        return TableView(
            anchor=anchor,
            title=table.title,
            caption=table.caption,
            heads=[
                HeadView(
                    column.title,
                    header_unit(column),
                    column.hint,
                    f"{anchor}-hint-{index}",
                    is_numeric(column),
                )
                for index, column in enumerate(table.columns)
            ],
            rows=[
                [_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)]
                for row in table.rows
            ],
            opens=bool(table.details),
            filtered=len(table.rows) > FILTER_FROM,
            tall=len(table.rows) > TALL_FROM,
            dense=len(table.columns) >= DENSE_FROM,
        )

    def figure(self, figure: Figure) -> FigureView:
        from markupsafe import Markup

        anchor = self.anchor(figure.name)
        numbers = data_table(figure)
        shown = 0 < len(numbers.rows) <= MAX_FIGURE_ROWS
        drawing = Markup(svg(figure, prefix=f"{anchor}-svg"))
        data = None
        if shown:
            table = self.table(numbers)
            data = table._replace(title="", caption="", filtered=False, dense=True)
        return FigureView(anchor, figure, drawing, data)

    def flame(self, flame: Flame) -> FlameView:
        anchor = self.anchor(flame.name)
        self.flames[anchor] = [
            {"label": view.label, "unit": view.unit, "root": _compact(view.root)}
            for view in flame.views
        ]
        return FlameView(anchor, flame)

    def timeline(self, timeline: Timeline) -> FigureView:
        from markupsafe import Markup

        anchor = self.anchor(timeline.name)
        shared = only_meanings(timeline)
        self.legend_used |= shared
        drawing = Markup(lanes_svg(timeline, prefix=f"{anchor}-svg", legend=not shared))
        return FigureView(anchor, timeline, drawing, None)


def lead_blocks(section: Section) -> list[Block]:
    """The first success or the first finding, up to three warnings, and one picture."""
    findings = [block for block in section.blocks if isinstance(block, Finding)]
    plain = [one for one in findings if one.tone != "warn"]
    answer = next((one for one in plain if one.tone == "good"), None) or next(iter(plain), None)
    warnings = [one for one in findings if one.tone == "warn"][:_MAX_WARNINGS]
    pictures = [block for block in section.blocks if isinstance(block, Figure | Timeline | Flame)]
    flame_first = sorted(pictures, key=lambda one: not isinstance(one, Flame))
    return [one for one in (answer, *warnings, *flame_first[:1]) if one is not None]


def _contents(blocks: Sequence[Block]) -> str:
    """What a fold holds: Show 4 findings, 2 tables."""
    kinds = Counter(
        "finding" if isinstance(one, Finding) else "table" if isinstance(one, Table) else "figure"
        for one in blocks
    )
    return f"Show {', '.join(counted(count, kind) for kind, count in kinds.items())}"


def html_page(page: Page) -> str:
    from markupsafe import Markup

    builder = Builder()
    return standalone(
        "page.html.j2",
        page=page,
        headline=builder.table(page.headline),
        verdict=verdict_view(page.verdict) if page.verdict else None,
        parts=[builder.section(section) for section in page.sections],
        legend=LEGEND if builder.legend_used or (page.verdict and page.verdict.parts) else (),
        details=Markup(_json(builder.details)),
        flames=Markup(_json(builder.flames)),
    )


def html_document(document: Document) -> str:
    """A document of questions and answers as one file."""
    from markupsafe import Markup

    builder = Builder()
    return standalone(
        "document.html.j2",
        page=document,
        headline=builder.table(document.summary) if document.summary else None,
        verdict=None,
        parts=[builder.chapter(chapter) for chapter in document.chapters],
        legend=LEGEND if builder.legend_used else (),
        details=Markup(_json(builder.details)),
        flames=Markup(_json(builder.flames)),
    )


def html_frame(verdict: Verdict | None = None, table: Table | None = None, note: str = "") -> str:
    """A verdict and a table in an inline frame, for the output of a notebook's cell. The frame
    keeps the styles and the script apart from those of the notebook."""
    from markupsafe import escape

    content = standalone(
        "frame.html.j2",
        verdict=verdict_view(verdict) if verdict else None,
        table=Builder().table(table) if table else None,
        note=note,
    )
    rows = 0 if table is None else min(len(table.rows), TALL_FROM)
    height = sum(
        (
            _VERDICT_PX + _CHANGE_PX * len(verdict.changes) if verdict else 0,
            _TABLE_PX + _ROW_PX * rows if table else 0,
            _NOTE_PX if note else 0,
            _MARGIN_PX,
        )
    )
    return (
        f'<iframe srcdoc="{escape(content)}" sandbox="allow-scripts" title="Stepscope"'
        f' width="100%" height="{height}" frameborder="0"></iframe>'
    )


def standalone(template: str, **values: object) -> str:
    """A template with the style sheet, the script and the policy that allows only these."""
    from markupsafe import Markup

    style, script = _asset("page.css"), _asset("page.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    values |= {"policy": policy, "style": Markup(style), "script": Markup(script)}
    # Stepscope itself writes no control characters.
    return printable(_templates().get_template(template).render(**values))


def _compact(frame: Frame, least: float | None = None) -> list[object]:
    """`[name, value, children]`; frames too narrow to be seen are left out."""
    least = _LEAST_FRAME * frame.value if least is None else least
    children = [_compact(child, least) for child in frame.children if child.value >= least]
    return [frame.name, float(f"{frame.value:.5g}"), children]


def _cell(cell: Cell, column: Column) -> CellView:
    text = cell_text(cell, column)
    if column.kind == "code" and cell is not None:
        is_long = len(text) > LONG_TEXT or "\n" in text
        return CellView(text, "", "code long" if is_long else "code")
    if isinstance(cell, str):
        look = "long" if len(text) > LONG_TEXT else "word" if is_numeric(column) else ""
        return CellView(text, "", look)
    if cell is None:
        return CellView(text, "", "none number" if is_numeric(column) else "none")
    value = cell.value if isinstance(cell, Spread | Interval | AtMost) else cell
    look = "number" if is_numeric(column) else ""
    return CellView(text, repr(value) if math.isfinite(value) else "", look)


def _json(value: object) -> str:
    """Encode JSON that cannot close the script element around it."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _asset(name: str) -> str:
    return resources.files("stepscope.report").joinpath("templates", name).read_text("utf-8")


def prose(text: str) -> Markup:
    """Escape text and convert code in backticks to <code> elements."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def words(command: str) -> Markup:
    """Escape a command; each of its words is an element, so that no line ends inside a flag."""
    from markupsafe import Markup, escape

    return Markup(" ").join(Markup("<span>{}</span>").format(escape(w)) for w in command.split(" "))


@functools.cache
def _templates() -> Environment:
    """The environment of all pages: it keeps the templates that it has compiled."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"prose": prose, "words": words}
    return environment
