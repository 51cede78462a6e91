"""Parts of a saved optimizer state, of whole parameters or of rows, cut anew for other ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.parallel.errors import ParallelError


class Span(NamedTuple):
    """Rows of a parameter."""

    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.begin : self.end]


class Saved(NamedTuple):
    """One part: of which parameter, which rows (None for all), which kind of state."""

    place: int
    rows: Span | None
    kind: str

    @classmethod
    def parse(cls, name: str) -> Saved:
        found = re.fullmatch(r"(\d+)(?:\[(\d+):(\d+)\])?\.(.+)", name)
        if found is None:
            raise ParallelError(f"the state has {name}, which is of another form of optimizer")
        place, begin, end, kind = found.groups()
        return cls(int(place), Span(int(begin), int(end)) if begin else None, kind)

    @property
    def name(self) -> str:
        rows = "" if self.rows is None else f"[{self.rows.begin}:{self.rows.end}]"
        return f"{self.place}{rows}.{self.kind}"

    def meets(self, rows: Span | None) -> bool:
        if self.rows is None or rows is None:
            return True
        return self.rows.begin < rows.end and rows.begin < self.rows.end


def concatenated(rows: Span | None, parts: Sequence[tuple[Saved, Any]]) -> Any:
    """What these parts hold of those rows (None for all). A number is the same in every part."""
    saved, value = parts[0]
    if not (isinstance(value, Tensor) and value.dim()) or (saved.rows is None and rows is None):
        return value
    known = sorted(
        ((one.rows or Span(0, len(held)), held) for one, held in parts), key=lambda part: part[0]
    )
    wanted = rows or Span(0, max(span.end for span, _ in known))
    pieces, at = [], wanted.begin
    for span, held in known:
        end = min(wanted.end, span.end)
        if span.begin <= at < end:
            pieces.append(held[at - span.begin : end - span.begin])
            at = end
    if at != wanted.end:
        raise ParallelError(
            f"the state {saved.kind} of parameter {saved.place} lacks rows {at} to {wanted.end}"
        )
    return torch.cat(pieces)
