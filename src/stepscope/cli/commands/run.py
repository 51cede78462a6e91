"""`stepscope run`: measure, keep, report."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from stepscope.cli.commands.report import print_results, write_report
from stepscope.cli.common import StoreOptions, json_line, parse
from stepscope.cli.messages import log, write_line
from stepscope.cli.progress import make_observer
from stepscope.cli.scripts import split_words
from stepscope.errors import UsageError, unknown_name
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Run
from stepscope.records.store import Store
from stepscope.studies.base import PlannedCase, Study
from stepscope.studies.presets import preset_cases, require_preset
from stepscope.studies.ranks.cases import follow, is_follower
from stepscope.studies.registry import all_studies, find_study, viewables
from stepscope.studies.runner.runner import REPEATABLE, Runner, new_run, plan_digest


def seconds_to_wait() -> float:
    text = os.environ.get("STEPSCOPE_WAIT", "30")
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"STEPSCOPE_WAIT is {text!r}", "give a number of seconds") from None


class RunOptions(StoreOptions, frozen=True, kw_only=True):
    """How to run it."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; auto takes the GPU where there is one."""
    timeout: float = 600.0
    """Seconds after which a case is given up."""
    resume: bool = False
    """Go on with the newest run of the same request: finished cases are not repeated."""
    retry: bool = False
    """With --resume: repeat the cases that ended in an error or a timeout."""
    wait: float = seconds_to_wait()
    """Seconds to wait for other work on this machine to end, in all; a case that still comes out
    noisy is measured once more. 0 does neither (or set STEPSCOPE_WAIT)."""
    new_ceilings: bool = False
    """Measure this machine's ceilings again instead of taking them from the cache."""
    report: bool = True
    """Write report.html and report.md when done."""
    json: bool = False
    """Print one line of JSON instead of the table."""


class PresetOptions(RunOptions, frozen=True, kw_only=True):
    """How to run it."""

    preset: str = "quick"
    """Which cases: quick, seeds, cs336-2026, h200, full (`stepscope list presets`)."""


class StudyOptions(RunOptions, frozen=True, kw_only=True):
    """How to run it."""

    preset: str | None = None
    """This study's cases of a preset, instead of naming your own (`stepscope list presets`)."""


class Share(NamedTuple):
    """The cases of a preset, of all studies or of one."""

    preset: str
    study: str | None = None


class Asked(NamedTuple):
    """The cases of one study, by its flags."""

    study: Study[Any, Any]
    flags: Any
    chosen: bool
    """Somebody gave at least one of the flags."""

    def on_cpu(self) -> Share | None:
        """What stands for them on a CPU where nobody chose."""
        usual = self.study.on_cpu and not self.chosen
        return Share(self.study.on_cpu, self.study.name) if usual else None


def main(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        study = _study(words[0])
        _refuse_model(study, words[1:])
        fields = [("cases", study.flags), ("run", StudyOptions)]
        kind = dataclasses.make_dataclass("StudyRun", fields)
        asked: Any = parse(kind, words[1:], f"run {study.name}", study.question, study.examples)
        if asked.run.preset is None:
            if not study.cases(asked.cases):
                raise UsageError(
                    "there is no case to measure", "give every flag at least one value"
                )
            named = {f"--{name.replace('_', '-')}" for name in study.flags.__struct_fields__}
            chosen = any(word.partition("=")[0].replace("_", "-") in named for word in words)
            return _run(asked.run, Asked(study, asked.cases, chosen), words)
        require_preset(asked.run.preset)
        if asked.cases != study.flags():
            raise UsageError("a preset has its own cases", "leave --preset or the other flags out")
        return _run(asked.run, Share(asked.run.preset, study.name), words)
    own, target, rest = split_words(words, PresetOptions)
    if target in all_studies():
        right = shlex.join(["stepscope", "run", str(target), *own, *rest])
        raise UsageError(f"{target} comes after options", f"name the study first: {right}")
    options = parse(
        PresetOptions,
        words,
        "run",
        "Measure the cases of a preset, or name a study first: `stepscope run STUDY --help`.",
        (
            "stepscope run",
            "stepscope run --preset seeds --resume",
            "stepscope run benchmark --help",
        ),
    )
    require_preset(options.preset)
    return _run(options, Share(options.preset), words)


def _study(name: str) -> Study[Any, Any]:
    """Those that other commands record are refused with a word on that, and not offered."""
    if name not in all_studies():
        if name in viewables():
            recorded_by = viewables()[name].recorded_by
            raise UsageError(
                f"{name} has no cases to run", f"its records come from `{recorded_by}`"
            )
        raise unknown_name("study", name, all_studies())
    return find_study(name)


def _refuse_model(study: Study[Any, Any], words: Sequence[str]) -> None:
    if not any(word.partition("=")[0] == "--model" for word in words):
        return
    if study.no_model:
        taking = [
            name for name, one in all_studies().items()
            if "model" in one.flags.__struct_fields__ and not one.no_model
        ]  # fmt: skip
        raise UsageError(
            f"{study.name} cannot take a model of your own: {study.no_model}",
            f"these can: {', '.join(taking)}",
        )


def _run(options: RunOptions, wanted: Asked | Share, words: Sequence[str]) -> int:
    if options.timeout <= 0:
        raise UsageError(f"timeout is {options.timeout:g}", "it must be above 0 seconds")
    if not 0 <= options.wait < math.inf:
        raise UsageError(f"wait is {options.wait:g}", "give 0 or more seconds")
    if options.retry and not options.resume:
        raise UsageError("--retry repeats cases of an earlier run", "give --resume with it")
    if is_follower():
        follow()
    # A study that traces keeps its traces beside the store; its worker inherits this.
    os.environ["STEPSCOPE_TRACES"] = str((options.out / "traces").resolve())
    with Store(options.store) as store, Runner(options.device, options.timeout) as runner:
        cases = _cases(wanted, runner)
        run, done = _open_run(options, cases, store, words)
        observer = make_observer(run, len(cases), done)
        try:
            with observer:
                runner.run(
                    cases, run, store, observer,
                    retry=options.retry, new_ceilings=options.new_ceilings,
                    wait_s=options.wait,
                )  # fmt: skip
        except KeyboardInterrupt:
            kept = len(store.finished(run.id))
            write_line(
                f"\ninterrupted: {kept} of {len(cases)} cases are kept in run {run.id}\n"
                f"go on with: {run.command}"
            )
            raise
    return _conclude(options, run)


def _cases(wanted: Asked | Share, runner: Runner) -> tuple[PlannedCase, ...]:
    if isinstance(wanted, Asked) and runner.environment.device_kind == "cpu":
        instead = wanted.on_cpu()
        if instead is not None:
            told = f"on a CPU: the cases of preset {instead.preset}; others by their flags"
            write_line(told)
            wanted = instead
    if isinstance(wanted, Share):
        return preset_cases(wanted.preset, runner.environment, wanted.study, runner.lacks)
    cases = wanted.study.planned(wanted.flags, runner.lacks)
    runner.refuse_impossible(cases)
    return cases


def _open_run(
    options: RunOptions, cases: Sequence[PlannedCase], store: Store, words: Sequence[str]
) -> tuple[Run, int]:
    """The run to work on, and how many of its cases are done."""
    if options.resume:
        held = store.latest_with_plan(plan_digest(cases))
        if held is not None:
            again = REPEATABLE if options.retry else ()
            done = [status for status, _ in store.finished(held.id).values()]
            return held, sum(status not in again for status in done)
        log("no earlier run of this request; starting one")
    plain = [word for word in words if word not in ("--resume", "--retry")]
    run = new_run(cases, shlex.join(["stepscope", "run", *plain, "--resume"]))
    store.add_run(run)
    return run, 0


def _conclude(options: RunOptions, run: Run) -> int:
    """Export, report, and say how it went."""
    with Store(options.store, create=False) as store:
        records = store.records(run.id)
    tally: Counter[str] = Counter(record.status for record in records)
    exported = options.out / f"{run.id}.jsonl"
    write_records(records, exported)
    facts: dict[str, Any] = {
        "run": run.id, "cases": run.cases, "status": dict(tally), "store": options.store,
        "records": exported,
    }  # fmt: skip
    # An out-of-memory says something: what held the memory.
    shown = tally["ok"] or tally["oom"]
    if options.report and shown:
        facts |= write_report(records, options.out, quiet=options.json)
    elif not options.json:
        print_results(records)
        if options.report:
            log("no case succeeded, so no report is written")
    if options.json:
        print(json_line(facts))
    return 1 if any(tally[status] for status in REPEATABLE) else 0
