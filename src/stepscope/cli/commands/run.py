"""`stepscope run`: measure the cases of a preset or a study, then write the report."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepscope.cli.answer import AnswerOptions
from stepscope.cli.commands.report import print_results, write_report
from stepscope.cli.common import (
    json_line,
    parse,
)
from stepscope.cli.messages import log, write_line
from stepscope.cli.progress import make_observer
from stepscope.cli.scripts import split_words
from stepscope.errors import UsageError, unknown_name
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Run
from stepscope.records.store import Store
from stepscope.runner.estimate import time_left
from stepscope.runner.runner import REPEATABLE, Runner, new_run, plan_digest
from stepscope.studies.base import PlannedCase, Study
from stepscope.studies.page import make_page
from stepscope.studies.presets import preset_cases, require_preset
from stepscope.studies.registry import all_studies, find_study, viewables
from stepscope.training.ranks.cases import follow, is_follower

_TRACES = "STEPSCOPE_TRACES"


def seconds_to_wait() -> float:
    """Default of --wait, from STEPSCOPE_WAIT."""
    text = os.environ.get("STEPSCOPE_WAIT", "30")
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"STEPSCOPE_WAIT is {text!r}", "give a number of seconds") from None


class RunOptions(AnswerOptions, frozen=True, kw_only=True):
    """Options of the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure on; auto uses a GPU if there is one."""
    timeout: float = 600.0
    """Time limit of each case, in seconds."""
    resume: bool = False
    """Continue the newest run of the same cases: finished ones are not measured again."""
    retry: bool = False
    """With --resume: measure again the cases that ended in an error or a timeout."""
    wait: float = seconds_to_wait()
    """Longest time to wait for idle CPU cores, in seconds, over the full run; a noisy case is
    measured once more. 0 disables both (environment variable: STEPSCOPE_WAIT)."""
    new_ceilings: bool = False
    """Measure this machine's ceilings (matmul rate, bandwidth, launch rate) again, which takes up
    to a minute; otherwise those of an earlier run are used."""
    report: bool = True
    """Write report.html and report.md when done."""


class PresetOptions(RunOptions, frozen=True, kw_only=True):
    """Options of the run."""

    preset: str = "quick"
    """Preset to measure: quick, seeds, cs336-2026, h200, full (`stepscope list presets`)."""


class StudyOptions(RunOptions, frozen=True, kw_only=True):
    """Options of the run."""

    preset: str | None = None
    """Measure the cases of this study in a preset (quick, seeds, cs336-2026, h200, full; see
    `stepscope list presets`) instead of those chosen by flags."""


class PresetCases(NamedTuple):
    """A request for the cases of a preset, of all studies or of one."""

    preset: str
    study: str | None = None


class StudyCases(NamedTuple):
    """A request for the cases of one study, chosen by its flags."""

    study: Study[Any, Any]
    flags: Any
    chosen: bool
    """True if at least one of the study's flags was given."""

    def on_cpu(self) -> PresetCases | None:
        """Return the study's default preset on a CPU, if no flags were given."""
        usual = self.study.on_cpu and not self.chosen
        return PresetCases(self.study.on_cpu, self.study.name) if usual else None


def main(words: list[str]) -> int:
    named = words[0] if words and not words[0].startswith("-") else ""
    if named:
        study = _study(words[0])
        _refuse_model(study, words[1:])
        fields = [("cases", study.flags), ("run", StudyOptions)]
        kind = dataclasses.make_dataclass("StudyRun", fields)
        request: Any = parse(kind, words[1:], f"run {study.name}", study.question, study.examples)
        if request.run.preset is None:
            if not study.cases(request.cases):
                raise UsageError(
                    "there are no cases to measure", "give every flag at least one value"
                )
            flags = {f"--{name.replace('_', '-')}" for name in study.flags.__struct_fields__}
            chosen = any(word.partition("=")[0].replace("_", "-") in flags for word in words)
            return _run(request.run, StudyCases(study, request.cases, chosen), words)
        require_preset(request.run.preset)
        if request.cases != study.flags():
            raise UsageError(
                "--preset and flags that choose cases exclude each other", "omit one of them"
            )
        return _run(request.run, PresetCases(request.run.preset, study.name), words)
    own, target, rest = split_words(words, PresetOptions)
    if target in all_studies():
        right = shlex.join(["stepscope", "run", str(target), *own, *rest])
        raise UsageError(f"{target} comes after options", f"put the study first: {right}")
    options = parse(
        PresetOptions,
        words,
        "run",
        "Measure the studies of a preset and write the report. `stepscope run STUDY --help` shows"
        " the options of one study, and `stepscope list` the names of studies and presets.",
        (
            "stepscope run",
            "stepscope run --preset seeds --resume",
            "stepscope run benchmark --help",
        ),
    )
    require_preset(options.preset)
    return _run(options, PresetCases(options.preset), words)


def _study(name: str) -> Study[Any, Any]:
    """Find a study by name. Studies recorded by other commands are refused, with a hint, and not
    suggested."""
    if name not in all_studies():
        if name in viewables():
            recorded_by = viewables()[name].recorded_by
            raise UsageError(
                f"the study {name} cannot be run", f"its records come from `{recorded_by}`"
            )
        raise unknown_name("study", name, all_studies())
    return find_study(name)


def _refuse_model(study: Study[Any, Any], words: Sequence[str]) -> None:
    if not any(word.partition("=")[0] == "--model" for word in words):
        return
    if study.no_model:
        taking = [
            name
            for name, one in all_studies().items()
            if "model" in one.flags.__struct_fields__ and not one.no_model
        ]
        raise UsageError(
            f"{study.name} does not support --model: {study.no_model}",
            f"these studies do: {', '.join(taking)}",
        )


def _run(options: RunOptions, wanted: StudyCases | PresetCases, words: Sequence[str]) -> int:
    if options.timeout <= 0:
        raise UsageError(f"--timeout is {options.timeout:g}", "it must be above 0 seconds")
    if not 0 <= options.wait < math.inf:
        raise UsageError(f"--wait is {options.wait:g}", "give 0 or more seconds")
    if options.retry and not options.resume:
        raise UsageError("--retry repeats cases of an earlier run", "combine it with --resume")
    if is_follower():
        follow()
    with (
        traces_in(options.out / "traces"),
        Store(options.store) as store,
        Runner(options.device, options.timeout) as runner,
    ):
        cases = _cases(wanted, runner)
        run, done = _open_run(options, cases, store, words)
        finished = store.finished(run.id)
        pending = [case for case in cases if (case.study, case.key) not in finished]
        possible = [case for case in pending if not set(case.needs) & set(runner.lacks)]
        left = time_left(possible, store, runner.environment)
        observer = make_observer(run, len(cases), done, left)
        try:
            with observer:
                runner.run(
                    cases,
                    run,
                    store,
                    observer,
                    retry=options.retry,
                    new_ceilings=options.new_ceilings,
                    wait_s=options.wait,
                )
        except KeyboardInterrupt:
            saved = len(store.finished(run.id))
            write_line(
                f"\ninterrupted: {saved} of {len(cases)} cases are saved in run {run.id}\n"
                f"show them with: stepscope show {run.id}\n"
                f"resume with: {run.command}"
            )
            raise
    return _conclude(options, run)


@contextmanager
def traces_in(folder: Path) -> Iterator[None]:
    """Have studies with traces save them next to the store; worker processes inherit this."""
    before = os.environ.get(_TRACES)
    os.environ[_TRACES] = str(folder.resolve())
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TRACES]
        else:
            os.environ[_TRACES] = before


def _cases(wanted: StudyCases | PresetCases, runner: Runner) -> tuple[PlannedCase, ...]:
    if isinstance(wanted, StudyCases) and runner.environment.device_kind == "cpu":
        instead = wanted.on_cpu()
        if instead is not None:
            text = f"on a CPU: the cases of preset {instead.preset}; choose others with flags"
            write_line(text)
            wanted = instead
    if isinstance(wanted, PresetCases):
        return preset_cases(wanted.preset, runner.environment, wanted.study, runner.lacks)
    cases = wanted.study.planned(wanted.flags, runner.lacks)
    runner.refuse_impossible(cases)
    return cases


def _open_run(
    options: RunOptions, cases: Sequence[PlannedCase], store: Store, words: Sequence[str]
) -> tuple[Run, int]:
    """Return the run to work on, and how many of its cases are done."""
    if options.resume:
        latest = store.latest_with_plan(plan_digest(cases))
        if latest is not None:
            again = REPEATABLE if options.retry else ()
            done = [status for status, _ in store.finished(latest.id).values()]
            return latest, sum(status not in again for status in done)
        log("no earlier run of this request; starting one")
    plain = [word for word in words if word not in ("--resume", "--retry")]
    run = new_run(cases, shlex.join(["stepscope", "run", *plain, "--resume"]))
    store.add_run(run)
    return run, 0


def _conclude(options: RunOptions, run: Run) -> int:
    """Export the records, write the report, and return the exit code."""
    with Store(options.store, create=False) as store:
        records = store.records(run.id)
        source = "latest" if store.find_run("latest").id == run.id else run.id
    tally: Counter[str] = Counter(record.status for record in records)
    exported = options.out / f"{run.id}.jsonl"
    write_records(records, exported)
    facts: dict[str, Any] = {
        "run": run.id,
        "cases": run.cases,
        "status": dict(tally),
        "store": options.store,
        "records": exported,
    }
    # An out-of-memory is a result too: the report shows what occupied the memory.
    shown = tally["ok"] or tally["oom"]
    if options.report and shown:
        facts |= write_report(records, options, source)
    elif not options.json:
        print_results(make_page(records), options, source)
        if options.report:
            log("no case succeeded, so no report is written")
    if options.json:
        from stepscope.report.verdict import verdict_facts
        from stepscope.studies.page import verdict_of

        facts.setdefault("verdict", verdict_facts(verdict_of(records)))
        print(json_line(facts))
    return 1 if any(tally[status] for status in REPEATABLE) else 0
