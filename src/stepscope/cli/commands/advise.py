"""`stepscope advise`: changes of a training step that are worth it; --verify proves them."""

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
from stepscope.analysis.advice.changes import Advice, advise, afterwards
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.analysis.plausibility import plausible
from stepscope.cli.advice_page import conclude
from stepscope.cli.common import StoreOptions, load_records, parse
from stepscope.cli.messages import log
from stepscope.cli.progress import make_observer
from stepscope.cli.scripts import split_words
from stepscope.cli.verification import Calibrating, Verification
from stepscope.errors import StepscopeError, UsageError, in_one_line, no_such_file
from stepscope.records.names import file_name
from stepscope.records.schema import Environment, Record, Run
from stepscope.records.store import Store
from stepscope.report.format import counted
from stepscope.studies.base import PlannedCase
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import STUDY_NAME as OWN_NAME
from stepscope.studies.own.cases import OwnFlags, OwnStep
from stepscope.studies.page import explained
from stepscope.studies.program.rows import Watched
from stepscope.studies.runner.runner import Runner, new_run, plan_digest


class AdviseOptions(StoreOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """A training script and what it is given; or records of `inspect` or of the study `own`: a
    file, or a run."""
    model: str = ""
    """package.module:function that builds a model (see `stepscope run own --help`)."""
    module: bool = False
    """What follows is a module, as for `python -m` (also: -m)."""
    batch: int = 8
    """Of the step of --model as it is now."""
    dtype: str = "float32"
    """Of the step of --model as it is now."""
    compile: str = "no"
    """Of the step of --model as it is now."""
    optimizer: str = "adamw"
    """Of the step of --model as it is now."""
    verify: bool = False
    """Try each change in turns with the step as it is, then those that are kept together."""
    rounds: int = 15
    """Turns in which both steps are timed."""
    only: str = ""
    """Codes of the changes to try, with commas between them; all that apply if empty."""
    within: float = 0.0
    """Seconds for all trials: those that would end later are not begun, and one that still runs is
    ended then; --resume tries it again. 0 is no limit."""
    resume: bool = False
    """Go on with the latest run of this request: what was recorded and tried is not done again."""
    loss_steps: int = 20
    """Steps over which the losses are compared, at least."""
    warmup: int = 5
    """Steps of a script that are left out at the beginning."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure a model; auto takes the GPU where there is one. A script chooses itself."""
    timeout: float = 600.0
    """Seconds after which a trial is given up."""
    json: bool = False
    """Print one line of JSON instead of the tables."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, AdviseOptions)
    is_script = target is not None and ("--module" in own or target.endswith(".py"))
    options = parse(
        AdviseOptions,
        own if is_script else words,
        "advise",
        "List the changes that apply to a training step, with the predicted gain in time and\n"
        "memory and the risk of each. --verify tries them on this machine. No file of yours is\n"
        "changed: changes are made from outside, in processes of their own. A script is run from\n"
        "its beginning for each trial, for some tens of steps, and what it writes on its way it\n"
        "writes again. Options of advise stand before the script, the script's after it.",
        (
            "stepscope advise train.py --batch-size 8",
            "stepscope advise --verify train.py --batch-size 8",
            "stepscope advise --verify --within 300 --resume train.py --batch-size 8",
            "stepscope advise --verify --only bfloat16,compile train.py",
            "stepscope advise stepscope-out/train.jsonl",
            "stepscope advise --model examples.slow:build --verify",
        ),
    )
    if options.rounds < 5 or options.loss_steps < 4 or options.warmup < 4:
        raise UsageError(
            f"rounds is {options.rounds}, loss-steps {options.loss_steps} and warmup"
            f" {options.warmup}",
            "at least 5 rounds, 4 steps and 4 steps of warm-up are needed to tell anything",
        )
    if options.within < 0 or options.timeout <= 0:
        raise UsageError(
            f"within is {options.within:g} and timeout {options.timeout:g}",
            "within is 0 or more seconds, timeout more than 0",
        )
    if is_script:
        assert target is not None
        return _advise_script(options, target, rest, words)
    if bool(options.source) == bool(options.model):
        raise UsageError(
            "there is no step to advise on", "name a script, records, or --model; one of them"
        )
    if not options.source:
        return _advise_model(options, words)
    if options.verify:
        raise UsageError("records cannot be tried again", "name the script, or give --model")
    return _show(options, load_records(options.source, options))


def _advice(
    record: Record, lacks: Sequence[str] = (), before: str | None = None
) -> tuple[Advice, ...]:
    return advise(facts_of(record, lacks=lacks), _factors(record, before))


def _advice_after(
    record: Record, codes: Sequence[str], lacks: Sequence[str], before: str
) -> tuple[Advice, ...]:
    """For the step with changes of these codes made."""
    facts = facts_of(record, lacks=lacks)
    return advise(afterwards(facts, codes), _factors(record, before))


def _factors(record: Record, before: str | None) -> dict[str, float]:
    """From what was verified on this device `before` a moment: a run that goes on gives the advice
    that it gave."""
    past = [one for one in read_history() if before is None or one.when < before]
    return factors(past, record.environment.device_name)


def _show(options: AdviseOptions, records: Sequence[Record]) -> int:
    from stepscope.studies.program.cases import STUDY_NAME

    judged = [plausible(r) for r in records if r.study in (STUDY_NAME, OWN_NAME)]
    meant = [r for r in judged if r.status == "ok"]
    if not meant:
        why = f": {in_one_line(judged[0].reason)}" if judged else ""
        raise StepscopeError(
            f"{options.source} has no step to advise on{why}",
            "use records of `inspect` or `run own`",
        )
    is_file = Path(options.source).is_file()
    base, lacks = _with_ceilings(meant[0], options)
    page = _page(options, Path(options.source).stem if is_file else _subject(base))
    with explained(base.study):
        return conclude(page, options.json, base, _advice(base, lacks), records)


def _with_ceilings(record: Record, options: AdviseOptions) -> tuple[Record, tuple[str, ...]]:
    """The record with the ceilings of this machine, from the cache or measured now, where it has
    none and was made here; and what this machine lacks."""
    if any(one.source == "measured" for one in record.ceilings):
        return record, ()
    try:
        with Runner(record.environment.device_kind, options.timeout) as runner:
            if _machine(runner.environment) != _machine(record.environment):
                return record, ()
            found = runner.ceilings(Calibrating())
            return msgspec.structs.replace(record, ceilings=found), tuple(runner.lacks)
    except UsageError:
        # No device of that kind: these are records of another machine.
        return record, ()
    except StepscopeError as error:
        log(f"the ceilings of this machine are not known: {error}")
        return record, ()


def _machine(environment: Environment) -> tuple[object, ...]:
    """What tells whether records were made on this machine, or on one that is alike."""
    return (
        environment.device_kind, environment.device_name, environment.cpu, environment.cpu_cores,
        environment.host_memory_bytes,
    )  # fmt: skip


def _page(options: AdviseOptions, name: str) -> Path:
    """Beside the page of `inspect`, for each program its own."""
    return options.out / f"{file_name(name)}-advice.html"


def _subject(record: Record) -> str:
    """The script or the function that builds the model, as part of the name of a file."""
    return Watched(record).name.removesuffix(".py").replace(":", "-")


def _find_run(
    options: AdviseOptions, store: Store, cases: Sequence[PlannedCase], words: Sequence[str]
) -> tuple[Run, bool]:
    """`cases` are the request. The latest run of the same is gone on with, where asked for; a new
    one is not in the store yet."""
    held = store.latest_with_plan(plan_digest(cases)) if options.resume else None
    if held is not None:
        return held, False
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
        raise UsageError("there are a script and a model", "name one of them")
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "a module is named after -m")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several ranks cannot be tried in turns",
            "record them with `torchrun -m stepscope inspect`, then `stepscope advise` the records",
        )
    script = Script(target=target, module=options.module, words=tuple(rest), warmup=options.warmup)
    request = PlannedCase(study=STUDY_NAME, key=script.key, config=msgspec.to_builtins(script))
    with Store(options.store) as store:
        run, new = _find_run(options, store, [request], words)
        held = [] if new else [one for one in store.records(run.id) if one.study == STUDY_NAME]
        if held:
            base = held[0]
        else:
            log(f"recording some steps of {target}")
            base = record_script(
                Order(
                    target=target, module=options.module, words=tuple(rest), warmup=options.warmup,
                    timed=10, traced=3, memory=True, stop=True,
                )
            )  # fmt: skip
        with Runner(base.environment.device_kind, options.timeout) as runner, _kept(store, run):
            if not held:
                with make_observer(run, 0, 0) as observer:
                    ceilings = runner.ceilings(observer)
                base = msgspec.structs.replace(base, run=run.id, ceilings=ceilings)
                base = with_advice(base, _advice(base, tuple(runner.lacks), run.created))
                # No run without a record: it would be the latest.
                with store.transaction():
                    if new:
                        store.add_run(run)
                    store.add(base)
            advice = advice_given(base) or ()
            _verify(options, advice, OF_SCRIPTS, Verification(
                runner, store, run, lambda some: _trial(options, base, some, script=script),
                lambda codes: _advice_after(base, codes, tuple(runner.lacks), run.created),
                within_s=options.within, only=_codes(options, advice),
            ))  # fmt: skip
        records = store.records(run.id)
    # A script and a module of one name are two programs.
    page = _page(options, f"{target}-module" if options.module else Path(target).stem)
    return conclude(page, options.json, base, advice, records)


def _advise_model(options: AdviseOptions, words: Sequence[str]) -> int:
    flags = OwnFlags(
        model=options.model, batch=(options.batch,), dtype=(options.dtype,),
        compile=(options.compile,), optimizer=(options.optimizer,),
    )  # fmt: skip
    cases = OWN.planned(flags)
    with Store(options.store) as store, Runner(options.device, options.timeout) as runner:
        runner.refuse_impossible(cases)
        # Not the same request as that of the study, which is the first part of it.
        request = (*cases, PlannedCase(study=TRIALS, key="trials", config={}))
        run, new = _find_run(options, store, request, words)
        if new:
            store.add_run(msgspec.structs.replace(run, cases=len(cases)))
        with _kept(store, run):
            with make_observer(run, len(cases), 0) as observer:
                runner.run(cases, run, store, observer)
            base = next(one for one in store.records(run.id) if one.study == OWN_NAME)
            if base.status != "ok":
                raise StepscopeError(f"{base.case}: {base.reason or base.status}")
            advice = _advice(base, tuple(runner.lacks), run.created)
            case = msgspec.convert(base.config, OwnStep)
            _verify(options, advice, OF_MODELS, Verification(
                runner, store, run, lambda some: _trial(options, base, some, case=case),
                lambda codes: _advice_after(base, codes, tuple(runner.lacks), run.created),
                within_s=options.within, only=_codes(options, advice),
            ))  # fmt: skip
        records = store.records(run.id)
    return conclude(_page(options, _subject(base)), options.json, base, advice, records)


def _codes(options: AdviseOptions, advice: Sequence[Advice]) -> tuple[str, ...]:
    wanted = tuple(code.strip() for code in options.only.split(",") if code.strip())
    known = [one.code for one in advice]
    for code in wanted:
        if code not in known:
            raise UsageError(
                f"{code} is not advised here", f"these are: {', '.join(known) or 'none'}"
            )
    return wanted


def _verify(
    options: AdviseOptions,
    advice: Sequence[Advice],
    settings: frozenset[str],
    verification: Verification,
) -> None:
    if options.verify:
        verification.verify(advice, settings)


@contextmanager
def _kept(store: Store, run: Run) -> Iterator[None]:
    """What was tried before an interrupt is kept, and how to go on is said."""
    try:
        yield
    except KeyboardInterrupt:
        done = store.finished(run.id)
        if done:
            tried = counted(sum(study == TRIALS for study, _ in done), "trial")
            log(f"interrupted: {tried} kept in run {run.id}\ngo on with: {run.command}")
        raise


def _trial(
    options: AdviseOptions, base: Record, advice: tuple[Advice, ...], *,
    case: OwnStep | None = None, script: Script | None = None,
) -> Trial:  # fmt: skip
    facts = facts_of(base)
    together = gain_ms(facts, afterwards(facts, [one.code for one in advice]))
    return Trial(
        base=case,
        program=script,
        advice=advice,
        step_ms=facts.step_ms,
        batch=None if script is None else facts.batch,
        together_ms=together if len(advice) > 1 else None,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )
