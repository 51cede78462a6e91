"""Content blocks of a page as data: studies create blocks, writers render them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from stepscope.analysis.conclusions import NOTHING, Conclusion
from stepscope.analysis.flame import Frame
from stepscope.analysis.verdict import AtMost, Verdict

Kind = Literal["text", "code", "number", "count", "percent", "bytes", "rate"]
"""`code` is text in a monospaced font."""
Tone = Literal["good", "info", "warn"]


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all blocks."""


class Spread(Data, tag="spread", frozen=True):
    """A value with a symmetric spread, shown as 12.3 ± 0.4."""

    value: float
    plus_minus: float


class Interval(Data, tag="interval", frozen=True):
    """A value with its confidence interval, shown as 12.3 [12.1, 12.6]."""

    value: float
    low: float
    high: float


Cell = str | int | float | Spread | Interval | AtMost | None
"""A value of a table. Text is shown unchanged in any column (`OOM`); None is shown as a dash."""


class Column(Data, frozen=True):
    title: str
    kind: Kind = "text"
    unit: str = ""
    """Shown in the header. `bytes` and `rate` cells choose their own prefix (GiB, TFLOP/s)."""
    hint: str = ""
    """One sentence that explains how the number is computed."""


class Table(Data, tag="table", frozen=True):
    name: str
    """Identifier: anchor in the page and file name of an export."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    details: tuple[str, ...] = ()
    """One text per row that the page shows when the row is expanded; empty for a plain table."""


class Curve(Data, frozen=True):
    """Points of one label; `low` and `high` are the ends of the error bars."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int | None = None
    """Number of the color and marker, so that a name looks the same in several figures; by
    default, the index of the curve in the figure."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.label!r} has {len(self.x)} x and {len(self.y)} y")


class LimitLine(Data, frozen=True):
    """A horizontal line at a limit."""

    label: str
    value: float


class Span(Data, frozen=True):
    """A named part of a numeric x axis, up to the start of the next span."""

    label: str
    start: float


class Figure(Data, tag="figure", frozen=True, kw_only=True):
    name: str
    title: str
    kind: Literal["lines", "bars", "stacks", "areas"] = "lines"
    """`stacks` are stacked bars: non-negative parts of a total. `areas` are the same over a numeric
    x axis that all curves share."""
    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    """Only for `lines`: the length of a bar is meaningless on an axis without zero."""
    x_bytes: bool = False
    """The x axis shows sizes in bytes: 4 MiB instead of 4.194 M."""
    marks: tuple[LimitLine, ...] = ()
    spans: tuple[Span, ...] = ()
    caption: str = ""


class LaneSpan(Data, frozen=True):
    """An interval of a lane; its group determines its color."""

    start: float
    end: float
    label: str
    group: str = ""
    style: int | None = None
    """Number of the color of the group; by default, the index of the group."""


class Lane(Data, frozen=True):
    """One row of a timeline."""

    label: str
    spans: tuple[LaneSpan, ...]
    look: Literal["named", "grouped", "gaps"] = "grouped"
    """`named`: intervals show their names. `grouped`: one color per group. `gaps`: idle time."""


class Timeline(Data, tag="timeline", frozen=True):
    """Intervals over time in several lanes."""

    name: str
    title: str
    lanes: tuple[Lane, ...]
    x_label: str
    caption: str = ""


class FlameView(Data, frozen=True):
    """One tree of a flame graph and how its values are shown."""

    label: str
    unit: Literal["ms", "bytes"]
    root: Frame


class Flame(Data, tag="flame", frozen=True):
    """A flame graph: click a frame to zoom. Several views can be switched."""

    name: str
    title: str
    views: tuple[FlameView, ...]
    caption: str = ""


Value = str | int | float | bool | None


class Finding(Data, tag="finding", frozen=True):
    """An answer to a study's question: a code, its values, and a sentence with these values.

    `text` states what was measured. `conclusion` is a cause, a ranking or a recommendation that is
    valid only if the measurements are good and show it (see `analysis.conclusions`). `records` are
    the ids of the records that both are based on; a finding without ids is based on all records of
    its section. If one of them is not trusted, `studies.trusted` removes the good tone and the
    conclusion.
    """

    text: str
    tone: Tone = "info"
    code: str = ""
    """Identifier for programs and tests: `memory.prediction-off`."""
    values: Mapping[str, Value] = {}
    conclusion: Conclusion = NOTHING
    records: tuple[str, ...] = ()
    timed: bool = True
    """True if the finding is based on times. A memory peak, a dtype or a numerical error is the
    same on a busy machine."""

    @property
    def sentence(self) -> str:
        return f"{self.text} {self.conclusion}".rstrip()


Block = Table | Figure | Timeline | Flame | Finding


class Section(Data, frozen=True):
    name: str
    title: str
    question: str
    blocks: tuple[Block, ...]


class Page(Data, frozen=True):
    title: str
    subtitle: str
    headline: Table
    sections: tuple[Section, ...]
    banner: str = ""
    """A warning about the entire page, such as a busy machine."""
    verdict: Verdict | None = None
    """The answer that the page opens with."""


class Item(Data, frozen=True):
    """A question of a document with its answers, measured here and elsewhere."""

    label: str
    question: str
    code: str = ""
    """The implementation that the question asks for."""
    commands: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    lacking: str = ""
    """Why blocks measured here are missing."""
    elsewhere: tuple[Block, ...] = ()
    source: str = ""
    """Where the blocks of `elsewhere` were measured."""


class Chapter(Data, frozen=True):
    name: str
    title: str
    note: str
    items: tuple[Item, ...]


class Document(Data, frozen=True):
    """Questions with their answers, chapter by chapter."""

    title: str
    subtitle: str
    introduction: str
    summary: Table | None
    chapters: tuple[Chapter, ...]
    banner: str = ""
