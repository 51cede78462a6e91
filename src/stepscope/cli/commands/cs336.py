"""`stepscope cs336`: answer the problems of the CS336 systems assignment on this machine."""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.cli.commands.run import seconds_to_wait, traces_in
from stepscope.cli.common import StoreOptions, json_line, parse, require_writable, write_text
from stepscope.cli.messages import say, write_line
from stepscope.cli.progress import make_observer
from stepscope.errors import UsageError
from stepscope.files import replace_file
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.blocks import Document, Finding
from stepscope.report.format import counted
from stepscope.runner.estimate import time_left
from stepscope.runner.runner import REPEATABLE, Runner, new_run
from stepscope.studies.base import PlannedCase
from stepscope.studies.course import Edition, Problem, find_problems
from stepscope.studies.course.answers import part_needs
from stepscope.studies.course.document import Setting, course_document
from stepscope.studies.course.needs import NEEDS
from stepscope.studies.trusted import tally

Cases = Mapping[str, tuple[PlannedCase, ...]]
"""Cases by the name of their need."""


class CourseOptions(StoreOptions, frozen=True, kw_only=True):
    edition: Edition = "2026"
    """Edition of the assignment."""
    problem: tuple[str, ...] = ()
    """Problems by their names in the handout (--list shows them); without, all of the edition."""
    quick: bool = False
    """Small cases: minutes on two CPU cores."""
    to: Path | None = None
    """Folder of the document: cs336.html, cs336.md, cs336.tex and figures/. Default: cs336-EDITION
    in the directory of --out."""
    list: bool = False
    """List the problems, and the commands that answer them, without measuring."""
    measure: bool = True
    """With --no-measure, write the document from what has been measured, and from committed
    records."""
    new: bool = False
    """Start over instead of continuing the last run of this command."""
    retry: bool = False
    """Measure again the cases that ended in an error or a timeout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on; auto uses a GPU if there is one."""
    timeout: float = 600.0
    """Time limit of each case, in seconds."""
    wait: float = seconds_to_wait()
    """Longest time to wait for idle CPU cores, in seconds, over the full run; a noisy case is
    measured once more. 0 disables both (environment variable: STEPSCOPE_WAIT)."""
    json: bool = False
    """Print one line of JSON instead of the summary."""

    @property
    def folder(self) -> Path:
        return self.to or self.out / f"cs336-{self.edition}"


def main(words: list[str]) -> int:
    options = parse(
        CourseOptions,
        words,
        "cs336",
        "Answer the problems of the CS336 systems assignment on this machine. Runs the cases that"
        " each problem needs and writes one document as HTML, Markdown and LaTeX: for each question"
        " the numbers, the figure, the sentence that answers it and the command. What this machine"
        " cannot run is shown from committed records, and marked. A second call measures only what"
        " is missing.",
        (
            "stepscope cs336 --edition 2026 --quick",
            "stepscope cs336 --edition 2025 --problem memory_profiling torch_compile",
            "stepscope cs336 --edition 2026 --to write-up",
            "stepscope cs336 --edition 2025 --list",
        ),
    )
    _check(options)
    problems = find_problems(options.edition, options.problem)
    if options.list:
        _list(options, problems)
        return 0
    require_writable(options.folder / "cs336.html", "choose another folder with --to")
    return _answer(options, problems)


def _check(options: CourseOptions) -> None:
    if options.timeout <= 0:
        raise UsageError(f"--timeout is {options.timeout:g}", "it must be above 0 seconds")
    if not 0 <= options.wait < float("inf"):
        raise UsageError(f"--wait is {options.wait:g}", "give 0 or more seconds")
    for name in ("new", "retry"):
        if getattr(options, name) and not options.measure:
            raise UsageError(f"--{name} and --no-measure exclude each other", "omit one of them")
    if options.to is not None and options.to.is_file():
        raise UsageError(f"{options.to} is a file", "give a folder")


def _answer(options: CourseOptions, problems: Sequence[Problem]) -> int:
    with (
        traces_in(options.out / "traces"),
        Store(options.store) as store,
        Runner(options.device, options.timeout) as runner,
    ):
        kind = runner.environment.device_kind
        setting = Setting(options.edition, kind, quick=options.quick)
        cases = _cases(problems, setting, runner.lacks)
        run = _open_run(options, runner.environment.device_name, runner.environment.torch, store)
        if options.measure:
            _measure(options, run, cases, store, runner)
        records = store.records(run.id) if run is not None else ()
    wanted = {need: {(one.study, one.key) for one in planned} for need, planned in cases.items()}
    keys = set().union(*wanted.values())
    used = [record for record in records if (record.study, record.case) in keys]
    document = course_document(problems, used, wanted, setting)
    facts = _write(document, options.folder)
    return _conclude(options, run, used, document, facts)


def _cases(problems: Sequence[Problem], setting: Setting, lacks: Mapping[str, str]) -> Cases:
    needs = dict.fromkeys(
        need
        for problem in problems
        for part in problem.parts_of(setting.edition)
        for need in part_needs(part)
    )
    return {
        need: NEEDS[need].cases(
            setting.edition, setting.device_kind, quick=setting.quick, lacks=lacks
        )
        for need in needs
    }


def _open_run(options: CourseOptions, device: str, torch: str, store: Store) -> Run | None:
    """The run of this command on this device, which later calls continue; None if there is none
    and nothing is to be measured."""
    what = ("cs336", device, torch, options.quick)
    plan = hashlib.sha256(msgspec.json.encode(what)).hexdigest()
    run = None if options.new else store.latest_with_plan(plan)
    if run is None and options.measure:
        run = msgspec.structs.replace(new_run((), _again(options)), plan=plan)
        store.add_run(run)
    return run


def _again(options: CourseOptions) -> str:
    """The command that continues this one."""
    words = ["stepscope", "cs336", "--edition", options.edition]
    words += ["--problem", *options.problem] if options.problem else []
    words += ["--quick"] if options.quick else []
    words += ["--to", str(options.to)] if options.to else []
    if options.out != StoreOptions().out:
        words += ["--out", str(options.out)]
    return shlex.join(words)


def _measure(
    options: CourseOptions, run: Run | None, by_need: Cases, store: Store, runner: Runner
) -> None:
    assert run is not None
    cases = list({(c.study, c.key): c for planned in by_need.values() for c in planned}.values())
    finished = store.finished(run.id)
    again = REPEATABLE if options.retry else ()
    pending = [c for c in cases if _is_pending(finished.get((c.study, c.key)), again)]
    store.expect(run.id, len({*finished, *((c.study, c.key) for c in cases)}))
    possible = [case for case in pending if not set(case.needs) & set(runner.lacks)]
    left = time_left(possible, store, runner.environment)
    observer = make_observer(run, len(cases), len(cases) - len(pending), left)
    try:
        with observer:
            runner.run(pending, run, store, observer, retry=options.retry, wait_s=options.wait)
    except KeyboardInterrupt:
        done = store.finished(run.id)
        saved = sum((case.study, case.key) in done for case in cases)
        write_line(
            f"\ninterrupted: {saved} of {len(cases)} cases are saved\n"
            f"resume with: {_again(options)}\n"
            f"write the document of what is saved with: {_again(options)} --no-measure"
        )
        raise


def _is_pending(done: tuple[str, int] | None, again: Sequence[str]) -> bool:
    return done is None or done[0] in again


def _write(document: Document, folder: Path) -> dict[str, Path]:
    from stepscope.report.document import (
        FIGURES,
        figure_files,
        latex_document,
        markdown_document,
    )
    from stepscope.report.html import html_document
    from stepscope.report.plots import png

    paths = {kind: folder / f"cs336.{kind}" for kind in ("html", "md", "tex")}
    # The document comes first: the images are the slow part, and the page does not need them.
    write_text(paths["html"], html_document(document))
    write_text(paths["md"], markdown_document(document))
    write_text(paths["tex"], latex_document(document))
    figures = folder / FIGURES
    figures.mkdir(exist_ok=True)
    for name, figure in figure_files(document).items():
        replace_file(figures / name, [png(figure)])
    return paths


def _conclude(
    options: CourseOptions,
    run: Run | None,
    records: Sequence[Record],
    document: Document,
    paths: Mapping[str, Path],
) -> int:
    statuses: Counter[str] = Counter(record.status for record in records)
    items = [item for chapter in document.chapters for item in chapter.items]
    here = sum(any(isinstance(block, Finding) for block in item.blocks) for item in items)
    elsewhere = sum(
        any(isinstance(block, Finding) for block in item.elsewhere)
        and not any(isinstance(block, Finding) for block in item.blocks)
        for item in items
    )
    if options.json:
        facts: dict[str, Any] = {
            "run": run.id if run else None,
            "edition": options.edition,
            "problems": [chapter.name for chapter in document.chapters],
            "questions": len(items),
            "answered_here": here,
            "answered_elsewhere": elsewhere,
            "status": dict(statuses),
            "trust": tally(records),
            "html": paths["html"],
            "markdown": paths["md"],
            "latex": paths["tex"],
        }
        print(json_line(facts))
    else:
        if document.banner:
            from stepscope.report.terminal import print_findings

            print_findings([Finding(text=document.banner, tone="warn")])
        say(
            f"{counted(len(items), 'question')}: {here} answered on this machine,"
            f" {elsewhere} from committed records of another one"
        )
        say("\n".join(f"{path.resolve()}" for path in paths.values()))
    return 1 if any(statuses[status] for status in REPEATABLE) else 0


def _list(options: CourseOptions, problems: Sequence[Problem]) -> None:
    kind = "cuda" if options.device == "cuda" else "cpu"
    setting = Setting(options.edition, kind, quick=options.quick)
    rows = [
        (problem, part, [setting.command(need) for need in part_needs(part)])
        for problem in problems
        for part in problem.parts_of(options.edition)
    ]
    if options.json:
        facts = [
            {"problem": problem.name, "part": part.label, "question": part.question, "commands": c}
            for problem, part, c in rows
        ]
        print(json_line({"edition": options.edition, "questions": facts}))
        return
    from stepscope.report.tables import col, table
    from stepscope.report.terminal import print_table

    print_table(
        table(
            "problems",
            f"Problems of the {options.edition} edition: stepscope cs336 --problem NAME",
            rows,
            [
                col("problem", lambda row: row[0].name, "code"),
                col("part", lambda row: row[1].label or None),
                col("question", lambda row: row[1].question),
            ],
        )
    )
