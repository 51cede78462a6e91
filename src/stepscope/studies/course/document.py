"""The document: each problem with its questions, the answers of this machine, and those of the
committed records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from stepscope.analysis.accounting import CALCULATIONS
from stepscope.errors import some
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Chapter, Document, Finding, Item, Table
from stepscope.report.format import counted
from stepscope.report.tables import col, table
from stepscope.studies.course.answers import Views, distinct, part_needs
from stepscope.studies.course.committed import Committed, committed_answers, key_of
from stepscope.studies.course.needs import NEEDS
from stepscope.studies.course.problem import Edition, Part, Problem
from stepscope.studies.trusted import banner
from stepscope.views.accounting import section

Answers = Mapping[str, Committed]
Wanted = Mapping[str, Collection[tuple[str, str]]]
"""Study and key of the cases of each need."""


class Setting:
    """How the document was made: the edition, the machine's kind, and whether in a hurry."""

    def __init__(self, edition: Edition, device_kind: str, *, quick: bool) -> None:
        self.edition, self.device_kind, self.quick = edition, device_kind, quick

    def command(self, need: str) -> str:
        return NEEDS[need].command(self.edition, self.device_kind, quick=self.quick)

    @property
    def again(self) -> str:
        words = f"stepscope cs336 --edition {self.edition}"
        return f"{words} --quick" if self.quick else words


def course_document(
    problems: Sequence[Problem], records: Sequence[Record], wanted: Wanted, setting: Setting
) -> Document:
    """The document of this machine. `wanted` are the cases of each need here."""
    answers = committed_answers()
    chapters = tuple(_chapter(problem, records, wanted, setting, answers) for problem in problems)
    machine = records[-1].environment if records else None
    named = f" on {machine.device_name}" if machine else ""
    versions = f", torch {machine.torch}, Stepscope {machine.stepscope}" if machine else ""
    return Document(
        title=f"CS336 systems, {setting.edition}{named}",
        subtitle=f"{counted(len(problems), 'problem')}, {counted(len(records), 'record')}"
        f"{versions}",
        introduction="Each problem by its name in the assignment: the question in our words, the"
        " measurements of this machine, and the sentence that they allow. What this machine"
        " cannot run is shown from committed records of another one, and marked. A sentence says"
        f" so if its measurements are not trusted. `{setting.again}` measures what is missing.",
        summary=_summary(problems, chapters),
        chapters=chapters,
        banner=banner(records),
    )


def committed_document(
    problems: Sequence[Problem], introduction: str, answers: Answers
) -> Document:
    """The same document with nothing but the committed records, for both editions."""
    return Document(
        title="CS336: from the assignment to the answer",
        subtitle="",
        introduction=introduction,
        summary=None,
        chapters=tuple(_chapter(problem, (), {}, None, answers) for problem in problems),
    )


def _chapter(
    problem: Problem,
    records: Sequence[Record],
    wanted: Wanted,
    setting: Setting | None,
    answers: Answers,
) -> Chapter:
    parts = problem.parts if setting is None else problem.parts_of(setting.edition)
    shown: list[Block] = []
    items = []
    for part in parts:
        item = _item(problem, part, records, wanted, setting, answers, shown)
        shown += [one for one in (*item.blocks, *item.elsewhere) if not isinstance(one, Finding)]
        items.append(item)
    years = " and ".join(problem.editions)
    extra = f"; a section without a problem in {', '.join(problem.sections)}"
    note = f"Edition{'s' * (len(problem.editions) > 1)} {years}{extra * bool(problem.sections)}."
    return Chapter(name=problem.name, title=problem.title, note=note, items=tuple(items))


def _item(
    problem: Problem,
    part: Part,
    records: Sequence[Record],
    wanted: Wanted,
    setting: Setting | None,
    answers: Answers,
    shown: Sequence[Block],
) -> Item:
    calculated = tuple(_calculated(problem, part))
    here: tuple[Block, ...] = ()
    lacking = ""
    if setting is not None:
        here, lacking = _measured(part, records, wanted)
    answered = any(isinstance(block, Finding) for block in here)
    committed = answers.get(key_of(problem, part))
    beside = committed is not None and (
        setting is None or not answered or setting.device_kind == "cpu"
    )
    return Item(
        label=f"({part.label})" if part.label else "",
        question=part.question,
        code=part.code,
        commands=tuple(dict.fromkeys(_commands(problem, part, setting))),
        blocks=distinct((*here, *calculated), shown),
        lacking="" if answered else lacking,
        elsewhere=distinct(committed.blocks, shown) if committed and beside else (),
        source=committed.source if committed and beside else "",
    )


def _measured(
    part: Part, records: Sequence[Record], wanted: Wanted
) -> tuple[tuple[Block, ...], str]:
    """Blocks from the records of the part's cases, and why there are none."""
    blocks: list[Block] = []
    reasons: list[str] = []
    missing = 0
    for show in part.shows:
        cases = set(wanted.get(show.need, ()))
        own = [one for one in records if (one.study, one.case) in cases]
        views = Views(own)
        blocks += views.blocks(show, views.records(show))
        missing += len(cases) - len(own)
        reasons += [f"{one.status}: {one.reason}" for one in own if one.status != "ok"]
    lacking = [f"{counted(missing, 'case')} not measured yet"] if missing else []
    if reasons:
        lacking.append(some(list(dict.fromkeys(reasons))))
    if part.shows and not lacking:
        lacking.append("these cases do not show it on this machine")
    return tuple(blocks), "; ".join(lacking)


def _calculated(problem: Problem, part: Part) -> Iterator[Block]:
    """The answer of the calculation with this part's letter, with its derivation."""
    if not part.calculation:
        return
    worked = section(CALCULATIONS[problem.name].worked())
    name = problem.name.replace("_", "-")
    for block in worked.blocks:
        if isinstance(block, Finding):
            (answer,) = (
                one.part
                for one in CALCULATIONS[problem.name].worked().answers
                if block.code == f"calc.{name}.{one.code}"
            )
            if answer == part.calculation:
                yield block
        elif isinstance(block, Table) and block.name == f"calc-{name}-given":
            yield block
        elif isinstance(block, Table) and block.name == f"calc-{name}-{part.calculation}":
            yield msgspec.structs.replace(block, title="Derivation")


def _commands(problem: Problem, part: Part, setting: Setting | None) -> Iterator[str]:
    used = setting or Setting(problem.in_documents_of[-1], "cuda", quick=False)
    yield from (used.command(need) for need in part_needs(part))
    if part.calculation:
        yield f"stepscope calc {problem.name}"
    if part.command:
        yield part.command


def _summary(problems: Sequence[Problem], chapters: Sequence[Chapter]) -> Table:
    rows = list(zip(problems, chapters, strict=True))

    def answered(items: Sequence[Item], field: str) -> int:
        return sum(
            any(isinstance(block, Finding) for block in getattr(item, field)) for item in items
        )

    return table(
        "headline",
        "Answers",
        rows,
        [
            col("problem", lambda row: row[0].name, "code"),
            col("questions", lambda row: len(row[1].items), "count"),
            col("answered here", lambda row: answered(row[1].items, "blocks"), "count"),
            col("from another machine", lambda row: answered(row[1].items, "elsewhere"), "count"),
        ],
        caption="Calculations count as answered here.",
    )
