"""`stepscope inspect`: profile the training step of an unmodified script."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tyro

from stepscope.advisor.inspect.background import Background
from stepscope.advisor.inspect.order import TIMED, TIMED_WITHIN_S, Order
from stepscope.advisor.inspect.rendezvous import SharedDirectory, shared_directory
from stepscope.cli.answer import Answer, AnswerOptions, for_shell, in_directory, print_answer
from stepscope.cli.common import json_line, parse, require_writable, write_text
from stepscope.cli.messages import log, write_line
from stepscope.cli.scripts import split_words
from stepscope.errors import StepscopeError, UsageError, no_such_file, one_line
from stepscope.files import copy_file
from stepscope.processes import script_command, torchrun_command
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Record
from stepscope.report.format import bytes_, duration
from stepscope.runner.load import let_threads_sleep

_OTHER_RANKS_WITHIN_S = 60.0
_FIX = "let it run more steps, or give a smaller --warmup and --steps"
_ALIKE = 0.7, 3.0
"""Plausible range of traced over timed step time: a profiler can double the time of short
operators."""


class InspectOptions(AnswerOptions, frozen=True, kw_only=True):
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """The training script and its arguments."""
    nproc: int = 0
    """Start that many ranks with torchrun on this machine."""
    page: Path | None = None
    """Page to write. Without it: SCRIPT.html, or MODULE-module.html with -m, in the directory of
    --out."""
    warmup: int = 5
    """First steps of the script, which are not recorded."""
    steps: int | None = None
    """Steps that are timed, without a profiler. Without it: 10, or those of 30 s, but at least
    5."""
    profiled_steps: int = 3
    """Steps that are recorded with torch.profiler, after the timed ones."""
    memory: bool = True
    """Record the memory of one step, tensor by tensor. This resets CUDA's peak statistics."""
    plans: Literal["auto", "yes", "no"] = "auto"
    """Predict time against memory of the step after the recorded ones, also with twice the batch
    and twice the context: what its blocks may recompute or copy to host memory. auto: on a GPU."""
    stop_early: bool = False
    """End the script, with exit code 0, as soon as its steps are recorded."""
    keep_traces: bool = False
    """Keep the traces and memory snapshots next to the page."""
    module: bool = False
    """Run SCRIPT as a module, like `python -m` (short: -m)."""
    explain: bool = False
    """Define the parts of the breakdown below the verdict."""
    json: bool = False
    """When the script has ended, print one line of JSON to standard error, because standard output
    belongs to the script: page, records, times in ms, peak memory in bytes, verdict, exit code."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an inspection; with several ranks, the slowest step and the highest peak."""

    page: Path | None = None
    records: Path | None = None
    run: str = ""
    """The run in the store; empty if it could not be added."""
    step_ms: float | None = None
    traced_ms: float | None = None
    peak_bytes: float | None = None
    verdict: dict[str, Any] | None = None
    """The verdict of the page, as plain data."""
    reason: str = ""
    """Reason why there is no page, or why it is incomplete."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, InspectOptions)
    options = parse(
        InspectOptions,
        own,
        "inspect",
        "Run an unmodified training script and record a few of its steps: where their time and\n"
        "memory go, what limits them, and which parts take the most. The script's output and exit\n"
        "code are unchanged. Options of inspect go before the script, the script's options after\n"
        "it. Under torchrun, all ranks of a machine share one page; with several machines, each\n"
        "writes its own (NAME.node-0.html, ...).",
        (
            "stepscope inspect train.py --batch-size 8",
            "stepscope inspect --stop-early --page first.html train.py config/small.yaml",
            "stepscope inspect -m mylab.train --steps 100",
            "stepscope inspect --nproc 2 train.py",
            "torchrun --nproc-per-node 2 -m stepscope inspect train.py",
        ),
    )
    if target is None:
        raise UsageError("no script is given", "use: stepscope inspect [options] script.py")
    if options.nproc > 0 and "RANK" not in os.environ:
        command = torchrun_command(options.nproc, "-P", "-m", "stepscope", "inspect", *words)
        os.execv(command[0], command)
    order = _order(options, target, rest)
    # A script and a module of the same name are different programs.
    name = f"{target}-module" if options.module else Path(target).stem
    page = _page_of_this_machine(options.page or options.out / f"{name}.html")
    require_writable(page, "give another path with --page")
    let_threads_sleep(log)
    shared = shared_directory()
    if shared.alone:
        rank = os.environ.get("RANK", "0")
        log(f"rank {rank} is recorded separately from the other ranks: {shared.alone}")
    try:
        return _run(order, shared, page if shared.leads else None, options)
    finally:
        shared.leave()


def _order(options: InspectOptions, target: str, words: list[str]) -> Order:
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "give a module after -m")
    steps = TIMED if options.steps is None else options.steps
    if steps < 1 or options.profiled_steps < 1 or options.warmup < 0:
        raise UsageError(
            f"--warmup is {options.warmup}, --steps {steps} and --profiled-steps"
            f" {options.profiled_steps}",
            "at least one step must be timed and one profiled, and --warmup must be 0 or above",
        )
    return Order(
        target=target,
        module=options.module,
        words=tuple(words),
        warmup=options.warmup,
        timed=steps,
        within_s=TIMED_WITHIN_S if options.steps is None else 0.0,
        traced=options.profiled_steps,
        memory=options.memory,
        plans=options.plans,
        stop=options.stop_early,
    )


def _page_of_this_machine(page: Path) -> Path:
    """Path of this machine's page. The ranks of a machine share one; each machine writes its own,
    since it cannot read the temporary directory of another."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return page
    return page.with_name(f"{page.stem}.node-{os.environ.get('GROUP_RANK', '0')}{page.suffix}")


def _run(order: Order, shared: SharedDirectory, page: Path | None, options: InspectOptions) -> int:
    from stepscope.advisor.inspect.child import Child, describe_end, end_alike

    folder = shared.folder
    text = msgspec.json.encode(order).decode()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    child = Child(script_command(str(folder), text, *flags))
    # After the child has blocked its signals in this thread: the threads that numpy starts inherit
    # that. One that does not block Ctrl-C would take it, and this process would end before the
    # script does.
    from stepscope.advisor.inspect.gather import parts
    from stepscope.advisor.inspect.progress import CHILD_STEPPED, read_progress, why_nothing

    ranks = 1 if shared.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    writing: Background[Outcome] | None = None

    def write_when_there() -> None:
        nonlocal writing
        if page is None or writing is not None or len(parts(folder)) < ranks:
            return
        # An incomplete recording also reports how the script ended, so wait for its end.
        if read_progress(folder).complete:
            writing = Background(partial(_write, folder, page, options, order.command))

    status = child.wait(write_when_there)
    outcome = None if writing is None else writing.result()
    if page is not None and outcome is None:
        _wait_for_parts(folder, ranks)
        if parts(folder):
            outcome = _write(folder, page, options, order.command, describe_end(status))
        else:
            stepped = (folder / CHILD_STEPPED).exists()
            progress = read_progress(folder)
            why = why_nothing(progress, order.name, status, stepped, _FIX)
            if progress.out_of_memory:
                why += f" (plan what fits: stepscope fit --verify {order.command})"
            outcome = _failed(why, options)
    if options.json and outcome is not None:
        code = os.waitstatus_to_exitcode(status)
        # Standard output belongs to the script.
        write_line(json_line(msgspec.to_builtins(outcome, enc_hook=str) | {"exit_code": code}))
    return end_alike(status)


def _wait_for_parts(folder: Path, ranks: int) -> None:
    """Wait for the other ranks, which may still be writing their parts."""
    from stepscope.advisor.inspect.gather import parts

    deadline = time.monotonic() + (_OTHER_RANKS_WITHIN_S if ranks > 1 and parts(folder) else 0.0)
    while len(parts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(
    folder: Path,
    page: Path,
    options: InspectOptions,
    command: str,
    ending: str = "",
) -> Outcome:
    """Write the page and the records. A failure is reported and does not affect the script.
    `ending` describes how the script ended, if it has."""
    from rich.console import Console

    from stepscope.advisor.inspect.gather import gather
    from stepscope.report.html import html_page
    from stepscope.report.verdict import verdict_facts
    from stepscope.studies.page import make_page, study_sections
    from stepscope.studies.trusted import banner
    from stepscope.views.program.rows import ProgramRecord

    saved: Path | None = None
    try:
        records, run = _stored(gather(folder, ending, command), command, options)
        saved = _save(records, page.with_suffix(".jsonl"))
        content = make_page(records)
        # Without a store, the file has the recording.
        verdict = for_shell(content.verdict, options, run or shlex.quote(str(saved)))
        content = msgspec.structs.replace(content, verdict=verdict)
        write_text(page, html_page(content))
        if options.keep_traces:
            for path in (*folder.glob("*.trace.json.gz"), *folder.glob("*.pickle")):
                copy_file(path, page.with_name(f"{page.stem}.{path.name}"))
    except Exception as error:
        why = str(error) if isinstance(error, StepscopeError) else one_line(error)
        text = f"{why}; the records are in {saved}" if saved else why
        return _failed(text, options, saved)
    ranks = [ProgramRecord(record) for record in records]
    times = [ms for one in ranks if (ms := one.step_ms) is not None]
    traced = [one.summary.wall_ms for one in ranks if one.summary is not None]
    peaks = [size for record in records if (size := record.quantity("peak_bytes")) is not None]
    outcome = Outcome(
        page=page.resolve(),
        records=saved,
        run=run,
        step_ms=max(times, default=None),
        traced_ms=max(traced, default=None),
        peak_bytes=max(peaks, default=None),
        verdict=verdict_facts(content.verdict),
        reason=next((why for one in ranks if (why := one.incomplete)), ""),
    )
    if not options.json:
        more = in_directory(f"stepscope show --full {'' if run else saved}".rstrip(), options)
        answer = Answer(content.verdict, tuple(study_sections(records)), more)
        console = Console(stderr=True, highlight=False)
        print_answer(answer, options, console=console)
        waited_less = max((one.waited_less_ms for one in ranks), default=0.0)
        if text := _in_short(outcome, len(records), waited_less):
            log(text)
        if warning := banner(records):
            log(warning)
        if outcome.reason:
            short = any("cut_short" in record.notes for record in records)
            log(f"the recording is incomplete: {outcome.reason}{f' ({_FIX})' if short else ''}")
        machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        whose = (
            f" (of this machine; each of the {machines} machines writes its own)"
            if machines > 1
            else ""
        )
        log(f"page: {outcome.page}{whose}")
    return outcome


def _stored(
    records: Sequence[Record], command: str, options: InspectOptions
) -> tuple[list[Record], str]:
    """Add the records to the store as one run; return them with its id, which is empty if the store
    cannot be written: the file next to the page has the recording as well."""
    from stepscope.records.store import Store
    from stepscope.runner.runner import new_run
    from stepscope.studies.base import PlannedCase

    cases = [PlannedCase(study=one.study, key=one.case, config=one.config) for one in records]
    run = new_run(cases, f"stepscope inspect {command}")
    records = [msgspec.structs.replace(record, run=run.id) for record in records]
    try:
        with Store(options.store) as store, store.transaction():
            store.add_run(run)
            for record in records:
                store.add(record)
    except StepscopeError as error:
        log(f"the recording is not in the store: {error}")
        return records, ""
    return records, run.id


def _save(records: Sequence[Record], path: Path) -> Path:
    """Save the records next to the page, or in a temporary directory if that fails; return the
    path."""
    try:
        write_records(records, path)
    except StepscopeError:
        path = Path(tempfile.mkdtemp(prefix="stepscope-records-")) / path.name
        write_records(records, path)
    return path.resolve()


def _in_short(outcome: Outcome, ranks: int, waited_less_ms: float) -> str:
    parts = []
    if outcome.step_ms is not None:
        took = f"a step takes {duration(outcome.step_ms)}"
        traced = outcome.traced_ms
        alike = ((traced or 0.0) + waited_less_ms) / outcome.step_ms
        if traced and not _ALIKE[0] < alike < _ALIKE[1]:
            took += f" (traced steps: {duration(traced)}, so they differ from the timed steps)"
        parts.append(took)
    if outcome.peak_bytes is not None:
        parts.append(f"peak memory {bytes_(outcome.peak_bytes)}")
    return ", ".join(parts) + (f" (maximum over {ranks} ranks)" if parts and ranks > 1 else "")


def _failed(why: str, options: InspectOptions, records: Path | None = None) -> Outcome:
    if not options.json:
        log(why)
    return Outcome(reason=why, records=records)
