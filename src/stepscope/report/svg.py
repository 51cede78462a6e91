"""Convert an SVG file for embedding in a page: its colors, ids, size and description.

A figure is drawn in the colors of the light scheme. Each of them becomes a CSS variable with that
color as the fallback, so that the same drawing follows the page into dark mode and also works
standalone. Styles become presentation attributes, because the page's content security policy
forbids inline styles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

CURVES = (
    "#1f5fa8",
    "#bf4e08",
    "#0b7a5a",
    "#9c4086",
    "#836000",
    "#1d7796",
    "#5d5f6b",
    "#8a3c2b",
    "#5a7414",
)
MEASURED, LOST, IDEAL, COMMUNICATION, IDLE, UNATTRIBUTED = 0, 1, 2, 3, 4, 6
"""Number of the color of each meaning, the same in the bar of the verdict and in every figure."""
FREE = (0, 5, 8, 7, 6)
"""Numbers of the colors of everything else in a figure with meanings."""
_MEANINGS = {
    "measured": MEASURED,
    "lost": LOST,
    "ideal": IDEAL,
    "least": IDEAL,
    "communication": COMMUNICATION,
    "reduction": COMMUNICATION,
    "messages": COMMUNICATION,
    "idle": IDLE,
    "waited": IDLE,
    "waiting": IDLE,
    "unattributed": UNATTRIBUTED,
}
LEGEND = ("measured", "ideal", "lost", "communication", "idle")
"""Meanings in the legend of a page; a drawing with no other groups has no legend of its own."""
INK, SOFT, GRID, PAPER, MARK = "#1d1f24", "#5c6069", "#e3e3df", "#fdfdfb", "#a8272f"

VARIABLES = {color: f"--curve-{number}" for number, color in enumerate(CURVES, start=1)} | {
    INK: "--ink",
    SOFT: "--soft",
    GRID: "--grid",
    PAPER: "--paper",
    MARK: "--mark",
}
_HREF = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_WITH_FALLBACK = re.compile(r"var\(--[a-z0-9-]+, (#[0-9a-f]{6})\)")
_VIEW_BOX = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_FILE_WIDTH, _FILE_MARGIN = 720, 8
_FILE_FONT = "Helvetica, Arial, sans-serif"
_FONT = re.compile(r"^(?:(\w+)\s+)?([\d.]+)px\b")


def color_numbers(labels: Sequence[str], styles: Sequence[int | None]) -> list[int]:
    """Number of the color of each label: its style, that of its meaning, or the next one."""
    meanings = [_MEANINGS.get(label) for label in labels]
    others = FREE if any(one is not None for one in meanings) else range(len(CURVES))
    numbers, taken = [], 0
    for index, (style, meaning) in enumerate(zip(styles, meanings, strict=True)):
        if style is not None:
            numbers.append(style)
        elif meaning is not None:
            numbers.append(meaning)
        else:
            rounds, place = divmod(taken, len(others))
            numbers.append(others[place] + rounds * len(CURVES) if others is FREE else index)
            taken += 1
    return numbers


def inline_svg(drawing: str, *, prefix: str, title: str, description: str) -> str:
    """Convert a drawing to inline SVG; `prefix` makes its ids unique in the page."""
    root = ElementTree.fromstring(drawing)
    _strip_namespaces(root)
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in ("metadata", "style")]:
            parent.remove(child)
    for element in root.iter():
        _unfold_style(element)
        for name, value in element.attrib.items():
            element.set(name, _COLOR.sub(_variable, value))
    _rename_ids(root, prefix)
    _describe(root, prefix, title, description)
    return ElementTree.tostring(root, encoding="unicode")


def standalone_svg(drawing: str) -> str:
    """Convert an inline drawing to a standalone file with the light colors and their background,
    since not every viewer supports CSS variables and none has those of the page."""
    plain = _WITH_FALLBACK.sub(r"\1", drawing)
    width, height = (float(size) + 2 * _FILE_MARGIN for size in _VIEW_BOX.search(plain).groups())  # type: ignore[union-attr]
    box = f"{-_FILE_MARGIN} {-_FILE_MARGIN} {width:g} {height:g}"
    plain = _VIEW_BOX.sub(f'viewBox="{box}"', plain, count=1)
    plain = plain.replace('width="100%"', f'width="{_FILE_WIDTH}" font-family="{_FILE_FONT}"', 1)
    corner = f'x="{-_FILE_MARGIN}" y="{-_FILE_MARGIN}"'
    paper = f'<rect {corner} width="{width:g}" height="{height:g}" fill="{PAPER}" />'
    return plain.replace("</desc>", f"</desc>{paper}", 1) + "\n"


def _variable(match: re.Match[str]) -> str:
    color = match.group()
    return f"var({VARIABLES[color]}, {color})" if color in VARIABLES else color


def _strip_namespaces(root: ElementTree.Element) -> None:
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        target = element.attrib.pop(_HREF, None)
        if target is not None:
            element.set("href", target)


def _unfold_style(element: ElementTree.Element) -> None:
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            # The font family is that of the page.
            weight, size = _FONT.match(value).groups()  # type: ignore[union-attr]
            element.set("font-size", size)
            if weight:
                element.set("font-weight", weight)
        elif name and name != "font-family":
            element.set(name, value)


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Prefix the ids that are referenced and remove all others."""
    used = {value[1:] for element in root.iter() if (value := element.get("href", ""))}
    for element in root.iter():
        used.update(name for value in element.attrib.values() for name in _REFERENCE.findall(value))
    names = {name: f"{prefix}-{number}" for number, name in enumerate(sorted(used), start=1)}
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in names:
            element.set("id", names[own])
        if element.get("href"):
            element.set("href", f"#{names[element.attrib['href'][1:]]}")
        for name, value in element.attrib.items():
            element.set(name, _REFERENCE.sub(lambda m: f"url(#{names[m.group(1)]})", value))


def _describe(root: ElementTree.Element, prefix: str, title: str, description: str) -> None:
    view_box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update(
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": view_box,
            "width": "100%",
            "role": "img",
            "aria-labelledby": f"{prefix}-title {prefix}-desc",
            "stroke-linejoin": "round",
        }
    )
    for index, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{prefix}-{tag}"})
        element.text = text
        root.insert(index, element)
