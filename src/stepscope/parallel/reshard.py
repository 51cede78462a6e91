"""Reshard a saved optimizer state, of full parameters or rows, for another number of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.parallel.errors import ParallelError


class Span(NamedTuple):
    """A range of rows of a parameter."""

    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.begin : self.end]


class Saved(NamedTuple):
    """One saved part: parameter index, rows (None for all) and kind of state."""

    parameter_index: int
    rows: Span | None
    kind: str

    @classmethod
    def parse(cls, name: str) -> Saved:
        match = re.fullmatch(r"(\d+)(?:\[(\d+):(\d+)\])?\.(.+)", name)
        if match is None:
            raise ParallelError(f"the state contains {name}, written by another form of optimizer")
        index, begin, end, kind = match.groups()
        return cls(int(index), Span(int(begin), int(end)) if begin else None, kind)

    @property
    def name(self) -> str:
        rows = "" if self.rows is None else f"[{self.rows.begin}:{self.rows.end}]"
        return f"{self.parameter_index}{rows}.{self.kind}"

    def meets(self, rows: Span | None) -> bool:
        if self.rows is None or rows is None:
            return True
        return self.rows.begin < rows.end and rows.begin < self.rows.end


def concatenated(rows: Span | None, parts: Sequence[tuple[Saved, Any]]) -> Any:
    """Assemble these rows (None for all) from the parts. A scalar is the same in every part."""
    saved, value = parts[0]
    if not (isinstance(value, Tensor) and value.dim()) or (saved.rows is None and rows is None):
        return value
    known = sorted(
        ((part.rows or Span(0, len(tensor)), tensor) for part, tensor in parts),
        key=lambda part: part[0],
    )
    wanted = rows or Span(0, max(span.end for span, _ in known))
    pieces, begin = [], wanted.begin
    for span, tensor in known:
        end = min(wanted.end, span.end)
        if span.begin <= begin < end:
            pieces.append(tensor[begin - span.begin : end - span.begin])
            begin = end
    if begin != wanted.end:
        raise ParallelError(
            f"the state {saved.kind} of parameter {saved.parameter_index} lacks rows {begin} to"
            f" {wanted.end}"
        )
    return torch.cat(pieces)
