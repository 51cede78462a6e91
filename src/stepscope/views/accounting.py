"""Sections of a report with the answers of the communication and memory calculations. Pure."""

from __future__ import annotations

from stepscope.analysis.accounting import CALCULATIONS, Answer, Line, Worked
from stepscope.errors import unknown_name
from stepscope.report.blocks import Block, Finding, Section, Table
from stepscope.report.tables import col, table

QUESTION = "What does the parallelization communicate and store, and when does compute hide it?"


def accounting(problem: str, **given: float | None) -> Section:
    """The answers to a problem by its name in the course, with the course's numbers, or with other
    inputs (`batch`, `d_model`, …; see `stepscope calc --help`)."""
    if problem not in CALCULATIONS:
        raise unknown_name("calculation", problem, CALCULATIONS)
    return section(CALCULATIONS[problem].worked(**given))


def section(worked: Worked) -> Section:
    name = worked.name.replace("_", "-")
    blocks: list[Block] = [_givens(name, worked)]
    for answer in worked.answers:
        blocks += [finding(name, answer), _derivation(name, answer)]
    return Section(name=f"calc-{name}", title=worked.title, question=QUESTION, blocks=tuple(blocks))


def finding(name: str, answer: Answer) -> Finding:
    return Finding(
        code=f"calc.{name}.{answer.code}",
        values=answer.values,
        text=f"{label(answer)} {answer.text}",
        timed=False,
    )


def label(answer: Answer) -> str:
    return f"({answer.part})" if len(answer.part) == 1 else f"{answer.part.capitalize()}:"


def _givens(name: str, worked: Worked) -> Table:
    columns = [
        col("symbol", lambda row: row.symbol, "code"),
        col("value", lambda row: row.shown),
        col("meaning", lambda row: row.meaning),
    ]
    return table(f"calc-{name}-given", "Given", worked.givens, columns)


def _derivation(name: str, answer: Answer) -> Table:
    columns = [
        col("line", lambda line: equation(line), "code"),
        col("with numbers", lambda line: line.numbers or None, "code"),
        col("value", lambda line: line.shown or None),
        col("why", lambda line: line.why or None),
    ]
    return table(
        f"calc-{name}-{answer.part}", f"{label(answer)} {answer.question}", answer.lines, columns
    )


def equation(line: Line) -> str:
    """The line without numbers: `T = bytes/W = (N − 1)/N·S/W`."""
    return " = ".join(filter(None, (line.left, *line.forms)))
