"""Numbers and relative paths of the lines that occur."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

from stepscope.advisor.lines.stack import instruction, source_of
from stepscope.analysis.lines.facts import Place


class Places:
    """Numbers the lines that occur."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers: dict[tuple[str, int, str], int] = {}
        self.all: list[Place] = []

    def number(self, code: CodeType, offset: int) -> int:
        """Number of the line at a position of a function."""
        return self.line(code, instruction(code, offset).line)

    def line(self, code: CodeType, line: int) -> int:
        key = code.co_filename, line, code.co_name
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(
                Place(
                    file=relative(code.co_filename, self._root),
                    line=line,
                    function=code.co_name.strip("<>"),
                    code=source_of(code.co_filename).code(line),
                )
            )
        return self._numbers[key]


def relative(file: str, root: Path) -> str:
    """The path relative to the folder of the script, or only its last parts."""
    path = Path(file)
    for folder in (root, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(Path(*path.parts[-2:]))
