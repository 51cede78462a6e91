"""The data of a figure as a table, for readers and formats without images."""

from __future__ import annotations

from stepscope.report.blocks import Cell, Column, Curve, Figure, Interval, Table


def categories(figure: Figure) -> list[float | str]:
    """The distinct x values of the figure: numbers sorted, names in order of appearance."""
    seen: dict[float | str, None] = {x: None for curve in figure.curves for x in curve.x}
    return list(seen) if any(isinstance(x, str) for x in seen) else sorted(seen, key=float)


def data_table(figure: Figure) -> Table:
    points = [_points(curve) for curve in figure.curves]
    integers = all(isinstance(x, str) or float(x).is_integer() for x in categories(figure))
    rows: list[tuple[Cell, ...]] = [
        (int(x) if integers and not isinstance(x, str) else x, *(by_x.get(x) for by_x in points))
        for x in categories(figure)
    ]
    rows += [(mark.label, *(mark.value for _ in points)) for mark in figure.marks]
    return Table(
        name=figure.name,
        title=figure.title,
        columns=(
            Column(title=figure.x_label, kind="bytes" if figure.x_bytes else "text"),
            *(
                Column(title=curve.label or figure.y_label, kind="number")
                for curve in figure.curves
            ),
        ),
        rows=tuple(rows),
        caption=figure.caption,
    )


def _points(curve: Curve) -> dict[float | str, Cell]:
    xs: list[float | str] = list(curve.x)
    if not (curve.low and curve.high):
        return dict(zip(xs, curve.y, strict=True))
    return {
        x: Interval(value=y, low=low, high=high)
        for x, y, low, high in zip(xs, curve.y, curve.low, curve.high, strict=True)
    }
