"""A source file with edits as spans of its bytes: everything else stays as the user wrote it."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from stepscope.advisor.patch.sites import Place

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")
_LONGEST_LINE = 100
_BOM = b"\xef\xbb\xbf"
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_NESTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Positioned = ast.stmt | ast.expr | ast.keyword


class CannotEditError(Exception):
    """The edit cannot be made safely; the message says why."""


class Source:
    """A file of the user, its syntax tree, and the edits made so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        coding = next(filter(None, map(_CODING.match, self.data.splitlines()[:2])), None)
        if coding is not None and coding[1].lower() not in (b"utf-8", b"utf8", b"ascii"):
            raise CannotEditError(f"{path.name} is not in UTF-8")
        self.tree = ast.parse(self.data)
        self._starts = [found.start() for found in _LINE.finditer(self.data)]
        if self.data.startswith(_BOM):
            self._starts[0] = len(_BOM)
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._edits: list[tuple[int, int, bytes]] = []
        self.newline = b"\r\n" if b"\r\n" in self.data else b"\n"

    # Positions.

    def start(self, node: Positioned) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: Positioned) -> int:
        return self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    def text(self, node: Positioned) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def call_at(self, place: Place) -> ast.Call:
        """Return the call that was executing."""
        wanted = (place.line, place.end_line, place.column, place.end_column)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                at = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                if at == wanted:
                    return node
        raise CannotEditError(f"line {place.line} is not a plain call")

    def statement_at(self, place: Place) -> ast.stmt:
        """Return the innermost statement that was executing."""
        first, last = (place.line, place.column), (place.end_line, place.end_column)
        found: ast.stmt | None = None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt):
                begins = node.lineno, node.col_offset
                ends = node.end_lineno or 0, node.end_col_offset or 0
                if begins <= first and last <= ends and (found is None or begins >= _begin(found)):
                    found = node
        if found is None:
            raise CannotEditError(f"line {place.line} is not in a statement")
        return found

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def ancestors(self, node: ast.AST) -> list[ast.AST]:
        """Nodes around this one within its function, innermost first."""
        found: list[ast.AST] = []
        while not isinstance(node, _NESTED) and node in self._parents:
            node = self._parents[node]
            found.append(node)
        return found

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that has this one."""
        for _, value in ast.iter_fields(self._parents[statement]):
            if isinstance(value, list) and statement in value:
                return value
        raise CannotEditError(f"line {statement.lineno} is not in a block of statements")

    def outermost_loop(self, statement: ast.stmt) -> ast.stmt:
        """Return the outermost loop of the function around the statement, or the statement."""
        loops = [n for n in self.ancestors(statement) if isinstance(n, ast.For | ast.While)]
        return loops[-1] if loops else statement

    def indent_of(self, statement: ast.stmt) -> bytes:
        """Return the white space before a statement that begins its line."""
        line = self._starts[statement.lineno - 1]
        before = self.data[line : self.start(statement)]
        if before.strip():
            raise CannotEditError(f"line {statement.lineno} has several statements")
        return before

    # Edits.

    def replace(self, start: int, end: int, text: str) -> None:
        for other_start, other_end, _ in self._edits:
            if start < other_end and other_start < end:
                line = self.data.count(b"\n", 0, start) + 1
                raise CannotEditError(f"line {line} is changed by another edit")
        self._edits.append((start, end, text.encode()))

    def set_keyword(self, call: ast.Call, name: str, value: str, position: int = -1) -> None:
        """Set a keyword argument of a call, in place or as the last argument. `position` is that
        of the parameter among the positional ones."""
        for keyword in call.keywords:
            if keyword.arg == name:
                self.replace(self.start(keyword.value), self.end(keyword.value), value)
                return
        if any(isinstance(one, ast.Starred) for one in call.args) and position >= 0:
            raise CannotEditError(f"the call in line {call.lineno} unpacks positional arguments")
        if 0 <= position < len(call.args):
            given = call.args[position]
            self.replace(self.start(given), self.end(given), value)
            return
        self._add_argument(call, f"{name}={value}")

    def replace_call(self, call: ast.Call, function: str, arguments: Sequence[str]) -> None:
        """Replace a call by another one, with an argument in each line if one line is too long."""
        text = f"{function}({', '.join(arguments)})"
        statement = self.statement_of(call)
        if call.col_offset + len(text) > _LONGEST_LINE:
            indent = self.indent_of(statement).decode()
            unit = indent + self._unit(indent.encode())
            lines = "".join(f"{unit}{one},\n" for one in arguments)
            text = self._lines(f"{function}(\n{lines}{indent})")
        self.replace(self.start(call), self.end(call), text)

    def drop_keyword(self, call: ast.Call, name: str) -> None:
        """Remove a keyword argument, with the comma before it."""
        for keyword in call.keywords:
            if keyword.arg == name:
                start = self.start(keyword)
                comma = self.data.rfind(b",", self.end(call.func), start)
                between = self.data[comma + 1 : start]
                if comma < 0 or between.strip():
                    raise CannotEditError(f"`{name}=` in line {keyword.value.lineno}")
                self.replace(comma, self.end(keyword), "")

    def _add_argument(self, call: ast.Call, text: str) -> None:
        arguments: list[Positioned] = [*call.args, *call.keywords]
        closing = self.end(call) - 1
        if not arguments:
            self.replace(closing, closing, text)
            return
        last = max(arguments, key=self.end)
        after = self.end(last)
        tail = self.data[after:closing]
        if isinstance(last, ast.GeneratorExp) and tail.startswith(b")"):
            raise CannotEditError(f"the call in line {call.lineno} has a generator as its argument")
        # Parentheses around the last argument, and a trailing comma, come before the new one.
        code = re.sub(rb"#[^\r\n]*", lambda found: b" " * len(found[0]), tail)
        comma = code.find(b",")
        if comma < 0:
            at = after + len(code.rstrip())
            self.replace(at, at, f", {text}")
        elif call.lineno == last.end_lineno:
            self.replace(after + comma + 1, after + comma + 1, f" {text},")
        else:
            indent = self.data[self._starts[last.lineno - 1] : self.start(last)]
            separator = "\n" + indent.decode() if not indent.strip() else " "
            at = after + comma + 1
            self.replace(at, at, self._lines(f"{separator}{text},"))

    def insert_before(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        first = min([statement, *getattr(statement, "decorator_list", [])], key=self.start)
        indent = self.indent_of(statement).decode()
        at = self._starts[first.lineno - 1]
        self.replace(
            at, at, self._lines("".join(f"{indent * bool(line)}{line}\n" for line in lines))
        )

    def insert_after(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        indent = self.indent_of(statement).decode()
        at = self.end(statement)
        rest = _LINE.match(self.data, at)
        assert rest is not None
        if re.sub(rb"#.*", b"", rest[0]).strip():
            raise CannotEditError(f"line {statement.end_lineno} has several statements")
        at += len(rest[0].rstrip(b"\r\n"))
        self.replace(at, at, self._lines("".join(f"\n{indent}{line}" for line in lines)))

    def wrap(self, statements: Sequence[ast.stmt], header: str) -> None:
        """Put consecutive statements into a block under `header`."""
        first, last = statements[0], statements[-1]
        indent = self.indent_of(first)
        rest = _LINE.match(self.data, self.end(last))
        assert rest is not None
        if re.sub(rb"#.*", b"", rest[0]).strip():
            raise CannotEditError(f"line {last.end_lineno} has several statements")
        unit = self._unit(indent)
        kept = self._inside_strings()
        lines = range(first.lineno, (last.end_lineno or last.lineno) + 1)
        for line in lines:
            start = self._starts[line - 1]
            text = _LINE.match(self.data, start)
            assert text is not None
            more = unit if line not in kept and text[0].strip() else ""
            if line == first.lineno:
                more = self._lines(f"{indent.decode()}{header}\n") + more
            if more:
                self.replace(start, start, more)

    def remove(self, statement: ast.stmt) -> None:
        """Remove the lines of a statement; its block must have others."""
        self.indent_of(statement)
        rest = _LINE.match(self.data, self.end(statement))
        assert rest is not None
        if re.sub(rb"#.*", b"", rest[0]).strip():
            raise CannotEditError(f"line {statement.lineno} has several statements")
        start = self._starts[statement.lineno - 1]
        self.replace(start, self.end(statement) + len(rest[0]), "")

    def ensure_import(self, module: str) -> str:
        """Return the name by which the module's top level knows `module`; import it if it does
        not."""
        last: ast.stmt | None = None
        for statement in self.tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if alias.name == module:
                        return alias.asname or alias.name
            if isinstance(statement, ast.Import | ast.ImportFrom):
                last = statement
        line = f"import {module}"
        if any(line.encode() in text for _, _, text in self._edits):
            return module
        if last is not None:
            self.insert_after(last, [line])
        else:
            body = self.tree.body
            documented = body and isinstance(body[0], ast.Expr) and ast.get_docstring(self.tree)
            if documented:
                self.insert_after(body[0], ["", line])
            else:
                self.insert_before(body[0], [line])
        return module

    def _unit(self, indent: bytes) -> str:
        if b"\t" in indent:
            return "\t"
        widths = {
            node.body[0].col_offset - node.col_offset
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If | ast.With)
            and node.body[0].lineno > node.lineno
        }
        return " " * min([width for width in widths if width > 0], default=4)

    def _inside_strings(self) -> set[int]:
        """Lines that begin inside of a string: white space there is part of its value."""
        strings = (n for n in ast.walk(self.tree) if isinstance(n, ast.Constant | ast.JoinedStr))
        return {
            line
            for node in strings
            if not isinstance(getattr(node, "value", ""), int | float | complex | None)
            for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        }

    def _lines(self, text: str) -> str:
        return text.replace("\n", self.newline.decode())

    @property
    def changed(self) -> bytes:
        """The file with the edits."""
        parts, at = [], 0
        for start, end, text in sorted(self._edits, key=lambda edit: edit[:2]):
            parts += [self.data[at:start], text]
            at = end
        result = b"".join([*parts, self.data[at:]])
        ast.parse(result)
        return result

    def mark(self) -> int:
        return len(self._edits)

    def undo_to(self, mark: int) -> None:
        """Undo the edits since a mark."""
        del self._edits[mark:]


def _begin(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def unified_diff(path: str, before: bytes, after: bytes) -> str:
    """Return the difference of a file as `git apply` and `patch -p1` take it."""
    old, new = ([line[0] for line in _LINE.finditer(one) if line[0]] for one in (before, after))
    lines = difflib.diff_bytes(
        difflib.unified_diff, old, new, f"a/{path}".encode(), f"b/{path}".encode()
    )
    result = b"".join(
        line if line.endswith((b"\n", b"\r")) else line + b"\n\\ No newline at end of file\n"
        for line in lines
    )
    return result.decode(errors="surrogateescape")
