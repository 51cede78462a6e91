"""The answer of a command on one screen: the verdict and a line for each section. Everything else
is printed with `--full` and is on the page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from stepscope.analysis.verdict import RELIABLE, Verdict
from stepscope.cli.common import DEFAULT_OUT, StoreOptions
from stepscope.cli.program import as_typed
from stepscope.errors import printable
from stepscope.report.blocks import Finding, Section, Table

if TYPE_CHECKING:
    from rich.console import Console

SCREEN = 40
"""Most lines of an answer on a terminal of 80 columns, with the paths of the pages below it."""
_FOOTER = 4
"""Lines of these paths, and the command that prints the rest."""
_ROWS = (24, 12, 6, 3)
"""Rows of a table that is printed in place of a verdict: as many of these as there is room for."""


class AnswerOptions(StoreOptions, frozen=True, kw_only=True):
    """Options of every command that prints an answer."""

    full: bool = False
    """Print all findings and tables as well, in a pager if the output is a terminal."""
    explain: bool = False
    """Define the parts of the breakdown below the verdict."""
    json: bool = False
    """Print one line of JSON instead: the verdict and all numbers."""


class Answer(NamedTuple):
    verdict: Verdict | None
    sections: Sequence[Section]
    more: str
    """The command that prints all findings and tables."""
    table: Table | None = None
    """A table that is part of the answer, such as a comparison; its first rows if it is long."""
    warning: str = ""


def for_shell(verdict: Verdict | None, location: StoreOptions, source: str = "") -> Verdict | None:
    """Return the verdict with a next command that works as typed: with this directory, and on the
    recording `source` in place of the program where it can."""
    if verdict is None or not verdict.next_command:
        return verdict
    command = verdict.next_command
    if source and verdict.next_on_recording:
        command = f"{verdict.next_on_recording} {source}"
    return replace(verdict, next_command=as_typed(in_directory(command, location)))


def in_directory(command: str, location: StoreOptions) -> str:
    """Return a command of Stepscope with the directory of the store, unless it is the default."""
    if location.out == DEFAULT_OUT:
        return command
    out = f"--out {shlex.quote(str(location.out))}"
    program, name, *rest = command.split(" ", 2)
    # The study comes first, the options of other commands precede a script and its own.
    return " ".join((program, name, *rest, out) if name == "run" else (program, name, out, *rest))


def print_answer(
    answer: Answer, options: AnswerOptions, *, full: bool = False, console: Console | None = None
) -> None:
    """Print the answer; with `full`, or that option, all findings and tables as well."""
    from rich.console import Console as RichConsole

    from stepscope.report.terminal import print_findings, print_sections
    from stepscope.report.verdict import (
        WIDTH,
        command_lines,
        lines_at,
        print_verdict,
        verdict_lines,
    )
    from stepscope.report.wrapping import wrapped

    console, full = console or RichConsole(highlight=False), full or options.full
    verdict, warning = answer.verdict, answer.warning
    if not full and verdict is not None and verdict.trust not in RELIABLE:
        # The verdict states the reason itself.
        warning = ""
    with _paged(console, full):
        if warning:
            print_findings([Finding(text=warning, tone="warn")], console)
        if full:
            print_sections(answer.sections, console)
        room = lines_at(console.width, SCREEN) - _FOOTER - len(wrapped(warning, console.width - 2))
        if verdict is not None:
            room -= len(verdict_lines(verdict, min(console.width, WIDTH)))
        if answer.table is not None and not full:
            room -= _print_beginning(answer.table, console, room)
        if verdict is not None:
            print_verdict(verdict, console, explain=options.explain)
        if full:
            return
        _print_sections_in_short(answer, console, room)
        for line in command_lines("All tables:", as_typed(answer.more), console.width):
            console.print(line, soft_wrap=True)


@contextmanager
def _paged(console: Console, full: bool) -> Iterator[None]:
    """A pager for long output to a terminal; not while a script writes to it."""
    if not (full and console.is_terminal) or console.stderr:
        yield
        return
    # Colors, and no pager for what fits the screen.
    os.environ.setdefault("LESS", "-FRX")
    with console.pager(styles=True):
        yield


def _print_beginning(table: Table, console: Console, room: int) -> int:
    """Print the first rows of a table, as many as there is room for; return the lines used."""
    from stepscope.report.terminal import print_table

    for most in _ROWS:
        shown = table
        if (more := len(table.rows) - most) > 0:
            note = f"The first {most} rows; {more} more on the page. {table.caption}"
            shown = replace(table, rows=table.rows[:most], caption=note)
        with console.capture() as captured:
            print_table(shown, console)
        if (used := captured.get().count("\n")) <= room:
            console.file.write(captured.get())
            return used
    return 0


def _print_sections_in_short(answer: Answer, console: Console, room: int) -> None:
    """Print what each section found, or all that the only one found; cut what does not fit. The
    last line names the sections that have no line of their own."""
    from rich.text import Text

    from stepscope.report.wrapping import wrapped

    lines = _in_short(answer)
    room = max(room, 2)
    if len(lines) > room:
        rest = lines[room - 1 :]
        names = ", ".join(dict.fromkeys(title for title, _ in rest if title))
        lines = [*lines[: room - 1], (f"{len(rest)} more", names)]
    texts = [
        wrapped(f"{title}: {text}", console.width)
        if title
        else wrapped(f"• {text}", console.width, later="  ")
        for title, text in lines
    ]
    most = next(n for n in range(room, 0, -1) if sum(min(n, len(one)) for one in texts) <= room)
    for (title, _), text in zip(lines, texts, strict=True):
        if len(text) > most:
            text = [*text[: most - 1], f"{text[most - 1][: console.width - 1]}…"]
        line = Text("\n".join(text))
        line.stylize("bold", 0, len(f"{title}:") if title else 0)
        console.print(line, soft_wrap=True)


def _in_short(answer: Answer) -> list[tuple[str, str]]:
    """The answer of each section with its title; of the only section all findings, and nothing if
    the verdict is its answer."""
    # It needs numpy, whose threads would take signals that `inspect` waits for.
    from stepscope.studies.page import answers

    if len(answer.sections) > 1:
        return [(title, printable(text)) for title, text in answers(answer.sections)]
    found = [one for section in answer.sections for one in section.blocks]
    if answer.verdict is not None:
        return []
    return [("", printable(one.sentence)) for one in found if isinstance(one, Finding)]
