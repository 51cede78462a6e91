"""Labels of a figure: names of curves, at their ends or in a legend, and names of categories.

Widths are estimated from the number of letters, in points: the browser's font is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stepscope.report.axes import spread_apart
from stepscope.report.blocks import Figure
from stepscope.report.format import tick
from stepscope.report.svg import CURVES, INK, PAPER, color_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 8.5
LETTER = FONT_SIZE * 0.6
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
PLAIN: dict[str, Any] = {"parse_math": False}
"""Literal text: a dollar sign does not start a formula."""

LEGEND_ROW = 14.0
_LONGEST_NAME = 28
_LEGEND_KEY = 24.0
_LABEL_GAP = 0.066

Path = list[tuple[float, float]]
"""A curve in fractions of the axes."""


def clean(text: str, most: int = 90) -> str:
    """Convert to one line of printable text; XML does not allow control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def short(text: str) -> str:
    return clean(text, _LONGEST_NAME)


def distinct(labels: Sequence[str]) -> tuple[list[str], str]:
    """The labels without the words that all of them end with, and these words, if a label is too
    long with them."""
    split = [clean(label).split() for label in labels]
    common = 0
    if len(labels) > 1 and max(map(len, labels)) > _LONGEST_NAME:
        while all(len(words) > common + 1 for words in split) and (
            len({words[-common - 1] for words in split}) == 1
        ):
            common += 1
    if not common:
        return [short(label) for label in labels], ""
    return [short(" ".join(words[:-common])) for words in split], " ".join(split[0][-common:])


def width_of(texts: Sequence[str]) -> float:
    return LETTER * max((len(text) for text in texts), default=0)


def styles(figure: Figure) -> list[int]:
    """Number of the color and marker of each curve."""
    return color_numbers(
        [curve.label for curve in figure.curves], [curve.style for curve in figure.curves]
    )


def hatch(style: int) -> str:
    """Hatching that distinguishes an area from an earlier one of the same color."""
    return "" if style < len(CURVES) else "///"


def end_names(labels: Sequence[str], paths: list[Path]) -> list[tuple[float, float]] | None:
    """Positions of the names next to the ends of their curves; None if a name would overlap another
    curve."""
    if not all(paths):
        return None
    heights = [path[-1][1] for path in paths]
    for end in {path[-1][0] for path in paths}:
        group = [index for index, path in enumerate(paths) if path[-1][0] == end]
        moved = spread_apart([heights[index] for index in group], _LABEL_GAP)
        # Below the axes are the tick labels.
        lift = max(0.0, -min(moved))
        for index, height in zip(group, moved, strict=True):
            heights[index] = height + lift
    for index, label in enumerate(labels):
        others = paths[:index] + paths[index + 1 :]
        start = paths[index][-1][0]
        stop = start + (12 + width_of([label])) / 380
        if any(_crosses(path, start, stop, heights[index]) for path in others):
            return None
    return [(path[-1][0], height) for path, height in zip(paths, heights, strict=True)]


def _crosses(path: Path, left: float, right: float, height: float) -> bool:
    for (x0, y0), (x1, y1) in pairwise(path):
        start, stop = max(left, x0), min(right, x1)
        if start < stop:
            ys = [y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x in (start, stop)]
            if min(ys) - _LABEL_GAP < height < max(ys) + _LABEL_GAP:
                return True
    return False


def room_right(labels: Sequence[str], ends: list[tuple[float, float]], room: float) -> float:
    """Margin in points for the names to the right of the axes; `room` is the width of axes and
    margin."""
    needs = [
        (12 + width_of([label]) - (1 - x) * room) / x
        for label, (x, _) in zip(labels, ends, strict=True)
    ]
    return max(4.0, *needs)


def draw_end_names(
    axes: Axes, figure: Figure, labels: Sequence[str], positions: list[tuple[float, float]]
) -> None:
    for label, style, position in zip(labels, styles(figure), positions, strict=True):
        axes.annotate(
            label,
            position,
            xycoords="axes fraction",
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=CURVES[style % len(CURVES)],
            annotation_clip=False,
            **PLAIN,
        )


def legend_columns(labels: Sequence[str], room: float) -> int:
    return max(1, min(len(labels), int(room // (width_of(labels) + _LEGEND_KEY))))


def draw_legend(
    axes: Axes, figure: Figure, labels: Sequence[str], columns: int, top: float
) -> None:
    """Draw a legend whose upper right corner is `top` points above the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    keys: list[Any] = []
    for style in styles(figure):
        color = CURVES[style % len(CURVES)]
        if figure.kind != "lines":
            keys.append(Patch(facecolor=color, edgecolor=PAPER, linewidth=0.3, hatch=hatch(style)))
        else:
            marker = MARKERS[style % len(MARKERS)]
            keys.append(Line2D([], [], color=color, marker=marker, markersize=4.6))
    canvas = axes.get_figure(root=True)
    assert canvas is not None
    # A legend drops names that begin with an underscore, hence the placeholders.
    legend = axes.legend(
        keys,
        ["x" for _ in keys],
        loc="upper right",
        bbox_to_anchor=(1, 1),
        bbox_transform=axes.transAxes + ScaledTranslation(0, top / 72, canvas.dpi_scale_trans),
        ncols=columns,
        frameon=False,
        handlelength=1.2,
        handleheight=0.7,
        handletextpad=0.5,
        columnspacing=1.4,
        borderaxespad=0,
        borderpad=0,
        labelcolor=INK,
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


def name_categories(axes: Axes, names: Sequence[float | str], room: float) -> tuple[float, float]:
    """Write the names of the categories below the axes; return the points that they need below and
    to the left of the axes."""
    texts = [short(name) if isinstance(name, str) else tick(name) for name in names]
    axes.set_xlim(-0.6, len(names) - 0.4)
    if width_of(texts) + LETTER < room / len(names):
        axes.set_xticks(range(len(names)), texts, **PLAIN)
        return FONT_SIZE, 0.0
    axes.set_xticks(
        range(len(names)), texts, rotation=30, ha="right", rotation_mode="anchor", **PLAIN
    )
    slot = room / len(names)
    beyond = (width_of([text]) * 0.87 - (at + 0.6) * slot for at, text in enumerate(texts))
    return FONT_SIZE + width_of(texts) * 0.5, max(0.0, *beyond)
