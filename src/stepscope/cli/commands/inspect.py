"""`stepscope inspect`: what an existing training script does in a step, without a change to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.advisor.inspect.background import Background
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.rendezvous import Meeting, meet
from stepscope.cli.common import StoreOptions, json_line, parse, require_writable, write_text
from stepscope.cli.messages import log, write_line
from stepscope.cli.scripts import split_words
from stepscope.errors import StepscopeError, UsageError, no_such_file, one_line
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Record
from stepscope.report.format import bytes_, duration

_OTHER_RANKS_WITHIN_S = 60.0
_MEND = "let it make more, or give a smaller --warmup and --timed"
_ALIKE = 0.7, 3.0
"""Traced steps as a share of timed ones: a profiler makes short operators take twice as long."""


class InspectOptions(StoreOptions, frozen=True, kw_only=True):
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """The training script, and what it is given."""
    page: Path | None = None
    """The page to write; where it is not given, NAME.html of a script or NAME-module.html of a
    module, in the folder of the reports."""
    warmup: int = 5
    """Steps left out at the beginning."""
    timed: int = 10
    """Steps timed as they are."""
    traced: int = 3
    """Steps under the profiler."""
    memory: bool = True
    """One step in which every tensor is counted. It resets CUDA's peak statistics."""
    stop: bool = False
    """End the script with exit code 0 once its steps are recorded."""
    keep: bool = False
    """Keep the traces and snapshots beside the page."""
    module: bool = False
    """What follows is a module, as for `python -m` (also: -m)."""
    json: bool = False
    """Print one line of JSON when the script has ended: page, records, step, traced step, peak,
    what is missing, exit code. On standard error, since standard output is the script's."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; of several ranks, the slowest step and the highest peak."""

    page: Path | None = None
    records: Path | None = None
    step_ms: float | None = None
    traced_ms: float | None = None
    peak_bytes: float | None = None
    reason: str = ""
    """Why there is no page, or not all in it."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, InspectOptions)
    options = parse(
        InspectOptions,
        own,
        "inspect",
        "Run a training script as it is and record a few of its steps: where their time and\n"
        "memory go, what limits them, which parts take the most. The script's output and exit\n"
        "code are its own. Options of inspect stand before the script, the script's after it.\n"
        "Under torchrun: one page for all ranks of the machine; of several machines, each writes\n"
        "its own (NAME.node-0.html, ...).",
        (
            "stepscope inspect train.py --batch-size 8",
            "stepscope inspect --stop --page first.html train.py config/small.yaml",
            "stepscope inspect -m mylab.train --steps 100",
            "torchrun --nproc-per-node 2 -m stepscope inspect train.py",
        ),
    )
    if target is None:
        raise UsageError("there is no script to inspect", "stepscope inspect [options] script.py")
    order = _order(options, target, rest)
    # A script and a module of one name are two programs.
    name = f"{target}-module" if options.module else Path(target).stem
    page = _of_this_machine(options.page or options.out / f"{name}.html")
    require_writable(page, "name another place with --page")
    meeting = meet()
    if meeting.alone:
        rank = os.environ.get("RANK", "0")
        log(f"rank {rank} is recorded apart from the other ranks: {meeting.alone}")
    try:
        return _run(order, meeting, page if meeting.leads else None, options)
    finally:
        meeting.leave()


def _order(options: InspectOptions, target: str, words: list[str]) -> Order:
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "a module is named after -m")
    if options.timed < 1 or options.traced < 1 or options.warmup < 0:
        raise UsageError(
            f"warmup {options.warmup}, timed {options.timed} and traced {options.traced} make no"
            " recording",
            "at least one step must be timed and one traced",
        )
    return Order(
        target=target, module=options.module, words=tuple(words), warmup=options.warmup,
        timed=options.timed, traced=options.traced, memory=options.memory, stop=options.stop,
    )  # fmt: skip


def _of_this_machine(page: Path) -> Path:
    """Ranks of one machine share a page; of several machines, each has its own, since none can read
    what is in another one's temporary directory."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return page
    return page.with_name(f"{page.stem}.node-{os.environ.get('GROUP_RANK', '0')}{page.suffix}")


def _run(order: Order, meeting: Meeting, page: Path | None, options: InspectOptions) -> int:
    from stepscope.advisor.inspect.child import Child, describe_end, end_alike
    from stepscope.advisor.inspect.gather import parts
    from stepscope.advisor.inspect.progress import CHILD_STEPPED, read_progress, why_nothing

    folder = meeting.folder
    ranks = 1 if meeting.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    writing: Background[Outcome] | None = None

    def write_when_there() -> None:
        nonlocal writing
        if page is None or writing is not None or len(parts(folder)) < ranks:
            return
        # Where it is not whole, how the script ends is to be told too.
        if read_progress(folder).whole:
            writing = Background(partial(_write, folder, page, options))

    text = msgspec.json.encode(order).decode()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    child = Child(
        [sys.executable, *flags, "-m", "stepscope.advisor.scope.launch", str(folder), text]
    )
    status = child.wait(write_when_there)
    outcome = None if writing is None else writing.result()
    if page is not None and outcome is None:
        _wait_for_parts(folder, ranks)
        if parts(folder):
            outcome = _write(folder, page, options, describe_end(status))
        else:
            stepped = (folder / CHILD_STEPPED).exists()
            ending = describe_end(status)
            why = why_nothing(read_progress(folder), order.name, ending, stepped, _MEND)
            outcome = _failed(why, options)
    if options.json and outcome is not None:
        code = os.waitstatus_to_exitcode(status)
        # Not on standard output, which is the script's.
        write_line(json_line(msgspec.to_builtins(outcome, enc_hook=str) | {"exit_code": code}))
    return end_alike(status)


def _wait_for_parts(folder: Path, ranks: int) -> None:
    """Other ranks may still be writing theirs."""
    from stepscope.advisor.inspect.gather import parts

    deadline = time.monotonic() + (_OTHER_RANKS_WITHIN_S if ranks > 1 and parts(folder) else 0.0)
    while len(parts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(folder: Path, page: Path, options: InspectOptions, ending: str = "") -> Outcome:
    """The page and the records; whatever fails here is said and takes nothing from the script.
    `ending` says how the script ended, if it has."""
    from stepscope.advisor.inspect.gather import gather
    from stepscope.report.html import html_page
    from stepscope.report.verdict import verdict_lines
    from stepscope.studies.page import make_page, verdict_of
    from stepscope.studies.program.rows import Watched
    from stepscope.studies.trusted import banner

    kept: Path | None = None
    try:
        records = gather(folder, ending)
        kept = _keep(records, page.with_suffix(".jsonl"))
        write_text(page, html_page(make_page(records)))
        if options.keep:
            for path in (*folder.glob("*.trace.json.gz"), *folder.glob("*.pickle")):
                shutil.copy(path, page.with_name(f"{page.stem}.{path.name}"))
    except Exception as error:
        why = str(error) if isinstance(error, StepscopeError) else one_line(error)
        told = f"{why}; the records are in {kept}" if kept else why
        return _failed(told, options, kept)
    ranks = [Watched(record) for record in records]
    times = [ms for one in ranks if (ms := one.step_ms) is not None]
    traced = [one.summary.wall_ms for one in ranks if one.summary is not None]
    peaks = [size for record in records if (size := record.quantity("peak_bytes")) is not None]
    outcome = Outcome(
        page=page.resolve(), records=kept,
        step_ms=max(times, default=None), traced_ms=max(traced, default=None),
        peak_bytes=max(peaks, default=None),
        reason=next((why for one in ranks if (why := one.not_whole)), ""),
    )  # fmt: skip
    if not options.json:
        if verdict := verdict_of(records):
            for line in verdict_lines(verdict):
                write_line(line)
        elif told := _in_short(outcome, len(records)):
            log(told)
        if warning := banner(records):
            log(warning)
        if outcome.reason:
            log(f"not all of it was recorded: {outcome.reason}")
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        whose = f" (of this machine; each of the {machines} writes its own)" if machines > 1 else ""
        log(f"page: {outcome.page}{whose}")
    return outcome


def _keep(records: Sequence[Record], path: Path) -> Path:
    """Where the records are: beside the page, or where that is full, among the temporary files."""
    try:
        write_records(records, path)
    except StepscopeError:
        path = Path(tempfile.mkdtemp(prefix="stepscope-records-")) / path.name
        write_records(records, path)
    return path.resolve()


def _in_short(outcome: Outcome, ranks: int) -> str:
    parts = []
    if outcome.step_ms is not None:
        took = f"a step takes {duration(outcome.step_ms)}"
        traced = outcome.traced_ms
        if traced and not _ALIKE[0] < traced / outcome.step_ms < _ALIKE[1]:
            took += f" (the traced ones {duration(traced)}: others than the timed)"
        parts.append(took)
    if outcome.peak_bytes is not None:
        parts.append(f"peak memory {bytes_(outcome.peak_bytes)}")
    return ", ".join(parts) + (f" (the most of {ranks} ranks)" if parts and ranks > 1 else "")


def _failed(why: str, options: InspectOptions, records: Path | None = None) -> Outcome:
    if not options.json:
        log(why)
    return Outcome(reason=why, records=records)
