"""The observation of one step as the observed process writes it: lines without costs, and the
operators in order, by which a trace is joined."""

from __future__ import annotations

from stepscope.analysis.lines.facts import Data, Lines

WAIT, COPY, SAME = 1, 2, 4
"""Flags of an operator: it waits for the device, copies, or has the same result in each step."""


class Observed(Data, frozen=True):
    """Lines, and one entry of each column per operator."""

    lines: Lines
    names: tuple[str, ...]
    name: list[int]
    """Index of the operator's name."""
    site: list[int]
    """Index of the site that launched it."""
    flags: list[int]


class LoaderLine(Data, frozen=True):
    """A line of the user's code in which samples of a loader were taken."""

    file: str
    line: int
    function: str
    code: str
    samples: int


class LoaderSamples(Data, frozen=True):
    """Samples of one process that makes batches."""

    lines: tuple[LoaderLine, ...]
    total: int
    in_worker: bool
