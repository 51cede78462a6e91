"""The loops and expressions of a source file, by position."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

Position = tuple[int, int]
"""Line, from 1, and column in bytes, from 0."""
Span = tuple[int, int, int, int]
"""First line, last line, first column, last column: the order of `code.co_positions`."""

_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Loop(NamedTuple):
    """A `for`, a `while` or a comprehension."""

    line: int
    start: Position
    """Start of the code that is repeated."""
    end: Position
    once: tuple[Position, Position] | None
    """Code within it that runs once: what a comprehension iterates over."""

    def repeats(self, position: Position) -> bool:
        """Return True if the code at the position runs in each iteration."""
        if not self.start <= position < self.end:
            return False
        return self.once is None or not self.once[0] <= position < self.once[1]


class Source:
    """A parsed file; without loops if it cannot be parsed."""

    def __init__(self, text: str) -> None:
        try:
            tree: ast.AST = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            tree = ast.Module([], [])
        self.lines = text.splitlines()
        self.loops: list[Loop] = []
        self._nodes: dict[Span, ast.expr] = {}
        for node in ast.walk(tree):
            self.loops.extend(_loop(node))
            if isinstance(node, ast.expr):
                # The outermost of several nodes with the same span comes first.
                self._nodes.setdefault(_span(node), node)
        self.loops.sort(key=lambda loop: (loop.start, (-loop.end[0], -loop.end[1])))

    def loops_at(self, position: Position, first_line: int) -> tuple[int, ...]:
        """Indices of the loops that repeat the code at the position, outermost first, within the
        function that begins on `first_line`."""
        return tuple(
            index
            for index, loop in enumerate(self.loops)
            if loop.line >= first_line and loop.repeats(position)
        )

    def called(self, span: Span) -> str:
        """Name of the function that the expression with this span calls, `[]` for an index, the
        lower-case name of the syntax for others; empty if there is no such expression."""
        node = self._nodes.get(span)
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                return function.attr
            return function.id if isinstance(function, ast.Name) else "call"
        if isinstance(node, ast.Subscript):
            return "[]"
        return "" if node is None else type(node).__name__.lower()

    def code(self, line: int) -> str:
        """The line without its indentation."""
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""


def _loop(node: ast.AST) -> Iterator[Loop]:
    if isinstance(node, ast.For | ast.AsyncFor):
        yield Loop(node.lineno, _start(node.body[0]), _end(node.body[-1]), None)
    elif isinstance(node, ast.While):
        yield Loop(node.lineno, _start(node.test), _end(node.body[-1]), None)
    elif isinstance(node, _COMPREHENSIONS):
        first = node.generators[0].iter
        yield Loop(node.lineno, _start(node), _end(node), (_start(first), _end(first)))


def _start(node: ast.stmt | ast.expr) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.stmt | ast.expr) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _span(node: ast.expr) -> Span:
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0
