"""`stepscope advise`: changes to a training step that are worth making; --verify measures them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS, Script, Trial
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.given import advice_given, with_advice
from stepscope.advisor.advise.history import read_history
from stepscope.analysis.advice.calibration import factors
from stepscope.analysis.advice.changes import Advice, advise, afterwards, not_applicable
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import REGISTRY
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.analysis.plausibility import plausible
from stepscope.cli.advice_page import conclude
from stepscope.cli.common import StoreOptions, load_records, parse, with_new_names
from stepscope.cli.messages import log
from stepscope.cli.progress import make_observer
from stepscope.cli.scripts import split_words
from stepscope.cli.verification import Calibrating, Verification
from stepscope.errors import StepscopeError, UsageError, in_one_line, no_such_file, unknown_name
from stepscope.records.names import file_name
from stepscope.records.schema import Environment, Record, Run
from stepscope.records.store import Store
from stepscope.report.format import counted
from stepscope.studies.base import PlannedCase
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import STUDY_NAME as OWN_NAME
from stepscope.studies.own.cases import OwnFlags, OwnStep
from stepscope.studies.page import explained
from stepscope.studies.program.rows import ProgramRecord
from stepscope.studies.runner.runner import Runner, new_run, plan_digest


class AdviseOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """A training script and its arguments; or a .jsonl file or a run (id, latest) that was recorded
    by `stepscope inspect` or `stepscope run own`."""
    model: str = ""
    """Advise on a model instead of a script: package.module:function that builds it (see
    `stepscope run own --help`)."""
    module: bool = False
    """Run SCRIPT as a module, like `python -m` (short: -m)."""
    batch: int = 8
    """With --model: batch size of the unchanged step, in sequences or samples."""
    dtype: str = "float32"
    """With --model: dtype of the unchanged step."""
    compile: str = "no"
    """With --model: torch.compile of the unchanged step (no, block, model)."""
    optimizer: str = "adamw"
    """With --model: optimizer of the unchanged step."""
    verify: bool = False
    """Try the changes on this machine: each one alternates with the unchanged step (A/B), then
    those that made it faster are tried together."""
    rounds: int = 15
    """Rounds of a trial; each round times the unchanged and the changed step."""
    only: str = ""
    """Codes of the changes to try, separated by commas (bfloat16,compile). Without it: all that
    apply."""
    total_timeout: float = 0.0
    """Time limit of all trials together, in seconds; 0 means no limit. A trial that would end later
    is not started, and a running one is ended; --resume tries them again."""
    resume: bool = False
    """Continue the newest run of the same request: finished trials are not repeated."""
    loss_steps: int = 20
    """Least number of steps over which the losses with and without a change are compared."""
    warmup: int = 5
    """First steps of the script, which are not recorded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for --model; auto uses a GPU if there is one. A script chooses its own device."""
    timeout: float = 600.0
    """Time limit of each trial, in seconds."""
    json: bool = False
    """Print one line of JSON instead of the tables."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, AdviseOptions, "advise")
    is_script = target is not None and ("--module" in own or target.endswith(".py"))
    options = parse(
        AdviseOptions,
        own if is_script else with_new_names(words, "advise"),
        "advise",
        "List the changes that apply to a training step, with the predicted gain in time and\n"
        "memory and the risk of each. --verify measures them on this machine. Your files are not\n"
        "modified: changes are applied at run time, in a separate process for each trial. A trial\n"
        "runs the script from its beginning for a few tens of steps, so files that it writes are\n"
        "written again. Options of advise go before the script, the script's options after it.",
        (
            "stepscope advise train.py --batch-size 8",
            "stepscope advise --verify train.py --batch-size 8",
            "stepscope advise --verify --total-timeout 300 --resume train.py --batch-size 8",
            "stepscope advise --verify --only bfloat16,compile train.py",
            "stepscope advise stepscope-out/train.jsonl",
            "stepscope advise --model examples.slow:build --verify",
        ),
    )
    if options.rounds < 5 or options.loss_steps < 4 or options.warmup < 4:
        raise UsageError(
            f"--rounds is {options.rounds}, --loss-steps {options.loss_steps} and --warmup"
            f" {options.warmup}",
            "use at least 5 rounds, 4 loss steps and 4 warm-up steps",
        )
    if options.total_timeout < 0 or options.timeout <= 0:
        raise UsageError(
            f"--total-timeout is {options.total_timeout:g} and --timeout {options.timeout:g}",
            "--total-timeout must be 0 or above, --timeout above 0 seconds",
        )
    for code in _wanted(options):
        if code not in (known := [entry.code for entry in REGISTRY]):
            raise unknown_name("change", code, known)
    if is_script:
        assert target is not None
        return _advise_script(options, target, rest, words)
    if bool(options.source) == bool(options.model):
        raise UsageError(
            "there is no step to advise on", "give exactly one of a script, records, or --model"
        )
    if not options.source:
        return _advise_model(options, words)
    if options.verify:
        raise UsageError("--verify cannot run records", "give the script, or --model")
    return _show(options, load_records(options.source, options))


def _advice(
    record: Record, lacks: Sequence[str] = (), before: str | None = None
) -> tuple[Advice, ...]:
    return advise(facts_of(record, lacks=lacks), _factors(record, before))


def _advice_after(
    record: Record, codes: Sequence[str], lacks: Sequence[str], before: str
) -> tuple[Advice, ...]:
    """Advise on the step with the changes `codes` applied."""
    facts = facts_of(record, lacks=lacks)
    return advise(afterwards(facts, codes), _factors(record, before))


def _factors(record: Record, before: str | None) -> dict[str, float]:
    """Correction factors from the changes verified on this device before the time `before`, so that
    a resumed run gives the same advice again."""
    past = [one for one in read_history() if before is None or one.when < before]
    return factors(past, record.environment.device_name)


def _show(options: AdviseOptions, records: Sequence[Record]) -> int:
    from stepscope.studies.program.cases import STUDY_NAME

    judged = [plausible(r) for r in records if r.study in (STUDY_NAME, OWN_NAME)]
    usable = [r for r in judged if r.status == "ok"]
    if not usable:
        why = f": {in_one_line(judged[0].reason)}" if judged else ""
        raise StepscopeError(
            f"{options.source} has no step to advise on{why}",
            "use records of `inspect` or `run own`",
        )
    is_file = Path(options.source).is_file()
    base, lacks = _with_ceilings(usable[0], options)
    page = _page(options, Path(options.source).stem if is_file else _subject(base))
    with explained(base.study):
        return conclude(page, options.json, base, _advice(base, lacks), records)


def _with_ceilings(record: Record, options: AdviseOptions) -> tuple[Record, tuple[str, ...]]:
    """Add this machine's ceilings, cached or measured now, to a record that has none and was made
    here; also return what this machine lacks."""
    if any(one.source == "measured" for one in record.ceilings):
        return record, ()
    try:
        with Runner(record.environment.device_kind, options.timeout) as runner:
            if _machine(runner.environment) != _machine(record.environment):
                return record, ()
            ceilings = runner.ceilings(Calibrating())
            return msgspec.structs.replace(record, ceilings=ceilings), tuple(runner.lacks)
    except UsageError:
        # There is no device of that kind, so the records are of another machine.
        return record, ()
    except StepscopeError as error:
        log(f"the ceilings of this machine could not be measured: {error}")
        return record, ()


def _machine(environment: Environment) -> tuple[object, ...]:
    """Properties that identify this machine, or an identical one."""
    return (
        environment.device_kind,
        environment.device_name,
        environment.cpu,
        environment.cpu_cores,
        environment.host_memory_bytes,
    )


def _page(options: AdviseOptions, name: str) -> Path:
    """Path of the advice page, next to the page of `inspect`, one per program."""
    return options.out / f"{file_name(name)}-advice.html"


def _subject(record: Record) -> str:
    """Name of the script or of the function that builds the model, usable in a file name."""
    return ProgramRecord(record).name.removesuffix(".py").replace(":", "-")


def _find_run(
    options: AdviseOptions, store: Store, cases: Sequence[PlannedCase], words: Sequence[str]
) -> tuple[Run, bool]:
    """Return the run for the request `cases` and whether it is new. With --resume the latest run of
    the same request is continued. A new run is not in the store yet."""
    latest = store.latest_with_plan(plan_digest(cases)) if options.resume else None
    if latest is not None:
        return latest, False
    if options.resume:
        log("no earlier run of this request; starting one")
    plain = [word for word in words if word != "--resume"]
    return new_run(cases, shlex.join(["stepscope", "advise", "--resume", *plain])), True


def _advise_script(
    options: AdviseOptions, target: str, rest: list[str], words: Sequence[str]
) -> int:
    from stepscope.advisor.inspect.order import Order
    from stepscope.advisor.inspect.recording import record_script
    from stepscope.studies.program.cases import STUDY_NAME

    if options.model:
        raise UsageError("both a script and --model are given", "give one of them")
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "give a module after -m")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "changes cannot be tried with several ranks",
            "record them with `torchrun -m stepscope inspect`, then `stepscope advise` the records",
        )
    script = Script(target=target, module=options.module, words=tuple(rest), warmup=options.warmup)
    request = PlannedCase(study=STUDY_NAME, key=script.key, config=msgspec.to_builtins(script))
    with Store(options.store) as store:
        run, new = _find_run(options, store, [request], words)
        recorded = [] if new else [one for one in store.records(run.id) if one.study == STUDY_NAME]
        if recorded:
            base = recorded[0]
        else:
            log(f"recording a few steps of {target}")
            base = record_script(
                Order(
                    target=target,
                    module=options.module,
                    words=tuple(rest),
                    warmup=options.warmup,
                    timed=10,
                    traced=3,
                    memory=True,
                    stop=True,
                )
            )
        with (
            Runner(base.environment.device_kind, options.timeout) as runner,
            _saved_on_interrupt(store, run),
        ):
            if not recorded:
                with make_observer(run, 0, 0) as observer:
                    ceilings = runner.ceilings(observer)
                base = msgspec.structs.replace(base, run=run.id, ceilings=ceilings)
                base = with_advice(base, _advice(base, tuple(runner.lacks), run.created))
                # A run without a record would become `latest`.
                with store.transaction():
                    if new:
                        store.add_run(run)
                    store.add(base)
            advice = advice_given(base) or ()
            _verify(options, runner, store, run, base, advice, script)
        records = store.records(run.id)
    # A script and a module of the same name are different programs.
    page = _page(options, f"{target}-module" if options.module else Path(target).stem)
    return conclude(page, options.json, base, advice, records)


def _advise_model(options: AdviseOptions, words: Sequence[str]) -> int:
    flags = OwnFlags(
        model=options.model,
        batch=(options.batch,),
        dtype=(options.dtype,),
        compile=(options.compile,),
        optimizer=(options.optimizer,),
    )
    cases = OWN.planned(flags)
    with Store(options.store) as store, Runner(options.device, options.timeout) as runner:
        runner.refuse_impossible(cases)
        # Distinguishes this request from `stepscope run own`, which plans the same first cases.
        request = (*cases, PlannedCase(study=TRIALS, key="trials", config={}))
        run, new = _find_run(options, store, request, words)
        if new:
            store.add_run(msgspec.structs.replace(run, cases=len(cases)))
        with _saved_on_interrupt(store, run):
            with make_observer(run, len(cases), 0) as observer:
                runner.run(cases, run, store, observer)
            base = next(one for one in store.records(run.id) if one.study == OWN_NAME)
            if base.status != "ok":
                raise StepscopeError(f"{base.case}: {base.reason or base.status}")
            advice = _advice(base, tuple(runner.lacks), run.created)
            case = msgspec.convert(base.config, OwnStep)
            _verify(options, runner, store, run, base, advice, case)
        records = store.records(run.id)
    return conclude(_page(options, _subject(base)), options.json, base, advice, records)


def _wanted(options: AdviseOptions) -> tuple[str, ...]:
    return tuple(code.strip() for code in options.only.split(",") if code.strip())


def _codes(options: AdviseOptions, advice: Sequence[Advice], facts: Facts) -> tuple[str, ...]:
    wanted = _wanted(options)
    known = [one.code for one in advice]
    for code in wanted:
        if code not in known:
            reasons = {one.code: one.reason for one in not_applicable(facts)}
            why = f": {reasons[code]}" if code in reasons else ""
            raise UsageError(
                f"{code} is not advised for this step{why}",
                f"choose from: {', '.join(known) or 'none'}",
            )
    return wanted


def _verify(
    options: AdviseOptions,
    runner: Runner,
    store: Store,
    run: Run,
    base: Record,
    advice: Sequence[Advice],
    subject: Script | OwnStep,
) -> None:
    """Try the advised changes of a script or a model if that is requested; check --only anyway."""
    verification = Verification(
        runner,
        store,
        run,
        lambda some: _trial(options, base, some, subject),
        lambda codes: _advice_after(base, codes, tuple(runner.lacks), run.created),
        within_s=options.total_timeout,
        only=_codes(options, advice, facts_of(base)),
    )
    if options.verify:
        verification.verify(advice, OF_SCRIPTS if isinstance(subject, Script) else OF_MODELS)


@contextmanager
def _saved_on_interrupt(store: Store, run: Run) -> Iterator[None]:
    """On an interrupt, print how many trials are saved and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        done = store.finished(run.id)
        if done:
            tried = counted(sum(study == TRIALS for study, _ in done), "trial")
            log(f"interrupted: {tried} saved in run {run.id}\nresume with: {run.command}")
        raise


def _trial(
    options: AdviseOptions, base: Record, advice: tuple[Advice, ...], subject: Script | OwnStep
) -> Trial:
    facts = facts_of(base)
    together = gain_ms(facts, afterwards(facts, [one.code for one in advice]))
    return Trial(
        base=None if isinstance(subject, Script) else subject,
        program=subject if isinstance(subject, Script) else None,
        advice=advice,
        step_ms=facts.step_ms,
        batch=facts.batch if isinstance(subject, Script) else None,
        together_ms=together if len(advice) > 1 else None,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )
