"""What a person sees, as data: a study makes blocks, a writer draws them. No torch, no drawing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from stepscope.analysis.flame import Frame
from stepscope.analysis.verdict import Verdict

Kind = Literal["text", "code", "number", "count", "percent", "bytes", "rate"]
"""`code` is text whose letters must stand below one another."""
Tone = Literal["good", "info", "warn"]


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all blocks."""


class Spread(Data, frozen=True):
    """A value with a symmetric spread, shown as 12.3 ± 0.4."""

    value: float
    plus_minus: float


class Interval(Data, frozen=True):
    """A value with its confidence interval, shown as 12.3 [12.1, 12.6]."""

    value: float
    low: float
    high: float


Cell = str | int | float | Spread | Interval | None
"""Text stands as it is in any column (`OOM`); None is shown as a dash."""


class Column(Data, frozen=True):
    title: str
    kind: Kind = "text"
    unit: str = ""
    """Stands in the header. `bytes` and `rate` cells pick their own prefix (GiB, TFLOP/s)."""
    hint: str = ""
    """One sentence that says how the number is made."""


class Table(Data, tag="table", frozen=True):
    name: str
    """Identifier: the anchor in the page and the file name of an export."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    details: tuple[str, ...] = ()
    """One text per row that the page shows when the row is opened; empty for a plain table."""


class Curve(Data, frozen=True):
    """Points of one label; `low` and `high` bound the error bars."""

    label: str
    x: tuple[float, ...] | tuple[str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int | None = None
    """Which colour and marker it has, so that a name looks alike in several figures; by its place
    in the figure where it is not said."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.label!r} has {len(self.x)} x and {len(self.y)} y")


class LimitLine(Data, frozen=True):
    """A horizontal line that says where a limit lies."""

    label: str
    value: float


class Span(Data, frozen=True):
    """A named part of a numeric x axis, up to where the next one begins."""

    label: str
    start: float


class Figure(Data, tag="figure", frozen=True):
    name: str
    title: str
    kind: Literal["lines", "bars", "stacks", "areas"]
    """`stacks` are bars that stand on one another: parts of a whole, none negative. `areas` are the
    same over a numeric x that all curves share."""
    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    """Of lines alone: the length of a bar means nothing where the axis has no zero."""
    x_bytes: bool = False
    """Along x are sizes: 4 MiB, and not 4.194 M."""
    marks: tuple[LimitLine, ...] = ()
    spans: tuple[Span, ...] = ()
    caption: str = ""


class LaneSpan(Data, frozen=True):
    """A stretch of a lane; its group decides its colour."""

    start: float
    end: float
    label: str
    group: str = ""
    style: int | None = None
    """As of a curve: the colour of the group, by its place where it is not said."""


class Lane(Data, frozen=True):
    """One row of a timeline."""

    label: str
    stretches: tuple[LaneSpan, ...]
    look: Literal["named", "grouped", "gaps"] = "grouped"
    """`named`: each says its name. `grouped`: a colour for each group. `gaps`: what is missing."""


class Timeline(Data, tag="timeline", frozen=True):
    """What happened when, one lane below the other."""

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
    """An answer to a study's question: a code, its values, and the sentence made from them.

    `text` states what was measured. `conclusion` is what follows from it only where the
    measurements are good: a cause, a ranking, a recommendation. `records` are the ids of the
    records that both rest on; a finding that names none rests on all records of its section.
    Where one of them cannot be trusted, `studies.trusted` takes back the good tone and the
    conclusion.
    """

    text: str
    tone: Tone = "info"
    code: str = ""
    """What is said, for programs and tests: `memory.prediction-off`."""
    values: Mapping[str, Value] = {}
    conclusion: str = ""
    records: tuple[str, ...] = ()
    timed: bool = True
    """Whether it rests on times. A peak of memory, a dtype or an error of arithmetic is the same on
    a busy machine."""

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
    """A warning about all of the page, such as a machine that was busy."""
    verdict: Verdict | None = None
    """The answer that the page opens with."""
