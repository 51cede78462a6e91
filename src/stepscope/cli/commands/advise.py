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
from msgspec.structs import replace

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.cases import Script
from stepscope.advisor.advise.given import with_advice
from stepscope.advisor.advise.interleaved import ScriptOutOfMemoryError
from stepscope.advisor.advise.step import RecordedStep
from stepscope.advisor.advise.verification import Verification, template
from stepscope.advisor.inspect.order import TIMED, TIMED_WITHIN_S, Order
from stepscope.analysis.advice.search import ORDER
from stepscope.analysis.plausibility import plausible
from stepscope.cli.advice_page import conclude
from stepscope.cli.answer import AnswerOptions
from stepscope.cli.common import load_records, parse
from stepscope.cli.memory_plan import show_plan
from stepscope.cli.messages import log
from stepscope.cli.patching import apply_verified
from stepscope.cli.progress import Calibrating, make_observer
from stepscope.cli.scripts import split_words
from stepscope.errors import StepscopeError, UsageError, in_one_line, no_such_file, unknown_name
from stepscope.processes import leave_job
from stepscope.records.names import file_name
from stepscope.records.schema import Environment, Record, Run
from stepscope.records.store import Store
from stepscope.report.format import counted
from stepscope.runner.load import let_threads_sleep
from stepscope.runner.runner import Runner, new_run, plan_digest
from stepscope.studies.base import PlannedCase
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import STUDY_NAME as OWN_NAME
from stepscope.studies.own.cases import OwnFlags, OwnStep
from stepscope.studies.page import explained
from stepscope.views.program.rows import ProgramRecord


class AdviseOptions(AnswerOptions, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """A training script and its arguments; or a .jsonl file or a run (id, latest) that was recorded
    by `stepscope inspect` or `stepscope run own`."""
    model: str = ""
    """Advise on a model instead of a script: package.module:function that builds it (see
    `stepscope run own --help`)."""
    module: bool = False
    """Run SCRIPT as a module, like `python -m` (short: -m)."""
    nproc: int = 1
    """Run SCRIPT in that many ranks on this machine, as torchrun does."""
    batch: int = 8
    """With --model: batch size of the unchanged step, in sequences or samples."""
    dtype: str = "float32"
    """With --model: dtype of the unchanged step."""
    compile: str = "no"
    """With --model: torch.compile of the unchanged step (no, block, model)."""
    optimizer: str = "adamw"
    """With --model: optimizer of the unchanged step."""
    verify: bool = False
    """Try the changes on this machine, alternating with the unchanged step (A/B): the combination
    that is predicted to be fastest first, then without each of its changes, then others."""
    apply: bool = False
    """Write the verified combination into the script as a patch, SCRIPT.stepscope.patch, after
    running the patched script against the original. No other file is written."""
    in_place: bool = False
    """With --apply: change the script itself, too."""
    keep: bool = False
    """With --apply: write the patch even if it shows no gain."""
    patch: Path | None = None
    """With --apply: file of the patch."""
    rounds: int = 15
    """Most rounds of a trial; each round times the unchanged and the changed step. A trial ends as
    soon as its gain is known."""
    only: str = ""
    """Codes of the changes to try, separated by commas (bfloat16,compile). Without it: all that
    apply."""
    total_timeout: float = 0.0
    """Time limit of all trials together, in seconds; 0 means no limit. A trial that would end later
    is not started, and a running one is ended; --resume tries them again."""
    resume: bool = False
    """Continue the newest run of the same request: finished trials are not repeated."""
    new_recording: bool = False
    """Record the steps of the script even if they were recorded in the last half hour, by `inspect`
    or `advise`, and no file has changed since."""
    plans: Literal["auto", "yes", "no"] = "auto"
    """Predict time against memory of the script's step, and plan a larger batch; auto: on a
    GPU."""
    loss_steps: int = 20
    """Least number of steps over which the losses with and without a change are compared."""
    warmup: int = 5
    """First steps of the script, which are not recorded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for --model; auto uses a GPU if there is one. A script chooses its own device."""
    timeout: float = 600.0
    """Time limit of each trial, in seconds."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, AdviseOptions)
    is_script = target is not None and ("--module" in own or target.endswith(".py"))
    options = parse(
        AdviseOptions,
        own if is_script else words,
        "advise",
        "List the changes that apply to a training step, with the predicted gain in time and\n"
        "memory and the risk of each. --verify measures them on this machine, --apply writes them\n"
        "as a patch. Your files are not modified: changes are applied at run time, in a separate\n"
        "process for each trial. A trial runs the script from its beginning for a few tens of\n"
        "steps, so files that it writes are written again. Options of advise go before the\n"
        "script, the script's options after it.",
        (
            "stepscope advise train.py --batch-size 8",
            "stepscope advise --verify train.py --batch-size 8",
            "stepscope advise --verify --total-timeout 300 --resume train.py --batch-size 8",
            "stepscope advise --verify --only bfloat16,compile train.py",
            "stepscope advise --verify --nproc 8 train.py",
            "torchrun --nproc-per-node 8 -m stepscope advise --verify train.py",
            "stepscope advise --apply train.py --batch-size 8",
            "stepscope advise --apply --in-place latest",
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
    if options.nproc < 1 or (options.nproc > 1 and not is_script):
        raise UsageError(
            f"--nproc is {options.nproc}",
            "a script runs in at least 1 rank, a model in one process",
        )
    if (options.in_place or options.keep or options.patch) and not options.apply:
        raise UsageError("--in-place, --keep and --patch belong to --apply", "give --apply, too")
    for code in _wanted(options):
        if code not in (known := [entry.code for entry in ORDER]):
            raise unknown_name("change", code, known)
    if is_script:
        assert target is not None
        return _advise_script(options, target, rest, words)
    if bool(options.source) == bool(options.model):
        raise UsageError(
            "there is no step to advise on", "give exactly one of a script, records, or --model"
        )
    if not options.source:
        if options.apply:
            raise UsageError("--apply needs a script", "--model has no training loop to edit")
        return _advise_model(options, words)
    if options.verify:
        raise UsageError("--verify cannot run records", "give the script, or --model")
    return _show(options, load_records(options.source, options))


def _show(options: AdviseOptions, records: Sequence[Record]) -> int:
    from stepscope.views.program.cases import STUDY_NAME

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
        source = shlex.quote(options.source)
        recorded = RecordedStep(base, lacks)
        code = conclude(page, options, recorded, records, source, applies=options.apply)
    return code or _apply(options, records)


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
            return replace(record, ceilings=ceilings), tuple(runner.lacks)
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
    from stepscope.advisor.advise.script_trial import order_of
    from stepscope.advisor.inspect.recording import record_script
    from stepscope.views.program.cases import STUDY_NAME

    if options.model:
        raise UsageError("both a script and --model are given", "give one of them")
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "give a module after -m")
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        if os.environ.get("LOCAL_WORLD_SIZE") != str(ranks):
            raise UsageError(
                "changes cannot be tried on several machines",
                "record the script with `torchrun -m stepscope inspect`, then `stepscope advise`"
                " the records",
            )
        if os.environ["RANK"] != "0":
            return 0
        # The first rank starts jobs of this shape.
        leave_job()
        options, words = replace(options, nproc=ranks), ["--nproc", str(ranks), *words]
    script = Script(
        target=target,
        module=options.module,
        words=tuple(rest),
        warmup=options.warmup,
        ranks=options.nproc,
    )
    let_threads_sleep(log)
    request = PlannedCase(study=STUDY_NAME, key=script.key, config=msgspec.to_builtins(script))
    with Store(options.store) as store:
        run, new = _find_run(options, store, [request], words)
        recorded = [] if new else [one for one in store.records(run.id) if one.study == STUDY_NAME]
        step: RecordedStep | None = None
        order = order_of(
            script, timed=TIMED, within_s=TIMED_WITHIN_S, traced=3, memory=True, stop=True,
            plans=options.plans,
        )  # fmt: skip
        reused = None if recorded or script.ranks > 1 else _recent(store, order, options)
        if reused is None and not recorded:
            log(f"recording a few steps of {target}")
        try:
            base, *others = recorded or ([reused] if reused else record_script(order))
        except ScriptOutOfMemoryError as error:
            return _fit(options, script, error)
        if (setting := ProgramRecord(base).setting) is not None:
            script = replace(script, optimizers=len(setting.optimizers))
        with (
            Runner(base.environment.device_kind, options.timeout) as runner,
            _saved_on_interrupt(store, run),
        ):
            if not recorded:
                with make_observer(run, 0, 0) as observer:
                    ceilings = runner.ceilings(observer)
                base = replace(base, run=run.id, ceilings=ceilings)
                step = RecordedStep(base, tuple(runner.lacks), run.created)
                base = step.record = with_advice(base, step.advice)
                # A run without a record would become `latest`.
                with store.transaction():
                    if new:
                        store.add_run(run)
                    for one in (base, *others):
                        store.add(replace(one, run=run.id))
            step = step or RecordedStep(base, tuple(runner.lacks), run.created)
            _verify(options, runner, store, run, step, script)
        records = store.records(run.id)
    # A script and a module of the same name are different programs.
    page = _page(options, f"{target}-module" if options.module else Path(target).stem)
    code = conclude(page, options, step, records, run.id, applies=options.apply)
    return code or _apply(options, records)


def _fit(options: AdviseOptions, script: Script, error: ScriptOutOfMemoryError) -> int:
    """Plan a step that ran out of memory, within the memory of its device."""
    from stepscope.advisor.advise.fitting import plan_script

    log(f"{error}; planning what its blocks save")
    show_plan(script, plan_script(script, 0), verify=options.verify, as_json=options.json)
    return 0


def _recent(store: Store, order: Order, options: AdviseOptions) -> Record | None:
    """Return a recent recording of the script, made on this machine with the same software."""
    from stepscope.advisor.advise.recent import recent_recording, same_machine

    record = None if options.new_recording else recent_recording(store, order)
    if record is None:
        return None
    try:
        with Runner(record.environment.device_kind, options.timeout) as runner:
            if not same_machine(runner.environment, record.environment):
                return None
    except UsageError:
        return None
    log(
        f"{order.name}: using the steps recorded at {record.started[11:16]} UTC; no file of its"
        " folder has changed since (--new-recording records them again)"
    )
    return record


def _apply(options: AdviseOptions, records: Sequence[Record]) -> int:
    """Write the patch of the verified changes, if that is requested."""
    if not options.apply:
        return 0
    return apply_verified(
        records,
        options.patch,
        in_place=options.in_place,
        keep=options.keep,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )


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
            store.add_run(replace(run, cases=len(cases)))
        with _saved_on_interrupt(store, run):
            with make_observer(run, len(cases), 0) as observer:
                runner.run(cases, run, store, observer)
            base = next(one for one in store.records(run.id) if one.study == OWN_NAME)
            if base.status != "ok":
                raise StepscopeError(f"{base.case}: {base.reason or base.status}")
            step = RecordedStep(base, tuple(runner.lacks), run.created)
            _verify(options, runner, store, run, step, msgspec.convert(base.config, OwnStep))
        records = store.records(run.id)
    return conclude(_page(options, _subject(base)), options, step, records, run.id)


def _wanted(options: AdviseOptions) -> tuple[str, ...]:
    return tuple(code.strip() for code in options.only.split(",") if code.strip())


def _codes(options: AdviseOptions, step: RecordedStep) -> tuple[str, ...]:
    wanted = _wanted(options)
    known = [one.code for one in step.advice]
    for code in wanted:
        if code not in known:
            reasons = {one.code: one.reason for one in step.not_applicable}
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
    step: RecordedStep,
    subject: Script | OwnStep,
) -> None:
    """Try the advised changes of a script or a model if that is requested; check --only anyway."""
    only, facts = _codes(options, step), step.facts
    if not (options.verify or options.apply):
        return
    verification = Verification(
        runner,
        store,
        run,
        step.space(only),
        template(subject, facts.step_ms, facts.batch, options.rounds, options.loss_steps),
        within_s=options.total_timeout,
        log=log,
    )
    first = verification.plan().next()
    if first is None:
        log("no trial: no change that can be made from outside is predicted to gain 3 % or more")
    with make_observer(run, len(first.combination.advice) + 1 if first else 0, 0) as observer:
        verification.verify(observer)


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
