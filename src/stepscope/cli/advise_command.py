"""`stepscope advise`: changes of a training step that are worth it; --verify proves them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from stepscope.analysis.advice.calibration import factors
from stepscope.analysis.advice.changes import Advice, advise
from stepscope.cli.common import Place, json_line, load_records, parse, write_text
from stepscope.cli.progress import make_observer
from stepscope.cli.scripts import split_words
from stepscope.cli.verification import OF_MODELS, OF_SCRIPTS, Verification, say
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Record
from stepscope.records.store import Store
from stepscope.report.blocks import Page, Section, Table
from stepscope.studies.advice import STUDY_NAME as TRIALS
from stepscope.studies.advice import Script, Trial
from stepscope.studies.advice.facts_of import facts_of
from stepscope.studies.advice.history import read_history
from stepscope.studies.advice.history_view import history_blocks
from stepscope.studies.advice.view import Tried, advice_table, lines_table
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own import STUDY_NAME as OWN_NAME
from stepscope.studies.own import OwnCase, OwnFlags
from stepscope.studies.runner import Runner, new_run

_QUESTION = "Which changes apply, what would each gain, and what does it risk?"
_SO_FAR = "How far off were predictions on this device, and what is learnt from that?"


class AdviseOptions(Place, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional] = ""
    """A training script; or records of `inspect` or of the study `own`: a file, or a run."""
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
    loss_steps: int = 20
    """Steps over which the losses are compared, at least."""
    warmup: int = 5
    """Steps of a script that are left out at the beginning."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure a model; auto takes the GPU where there is one. A script chooses itself."""
    timeout: float = 600.0
    """Seconds after which a case is given up."""
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
    command = shlex.join(["stepscope", "advise", *words])
    if is_script:
        assert target is not None
        return _advise_script(options, target, rest, command)
    if bool(options.source) == bool(options.model):
        raise UsageError(
            "there is no step to advise on", "name a script, records, or --model; one of them"
        )
    if not options.source:
        return _advise_model(options, command)
    if options.verify:
        raise UsageError("records cannot be tried again", "name the script, or give --model")
    return _show(options, load_records(options.source, options))


def _advice(record: Record, lacks: Sequence[str] = ()) -> tuple[Advice, ...]:
    known = factors(read_history(), record.environment.device_name)
    return advise(facts_of(record, lacks=lacks), known)


def _show(options: AdviseOptions, records: Sequence[Record]) -> int:
    from stepscope.studies.inspected import STUDY_NAME

    meant = [r for r in records if r.study in (STUDY_NAME, OWN_NAME) and r.status == "ok"]
    if not meant:
        raise StepscopeError(
            f"{options.source} has no step to advise on", "use records of `inspect` or `run own`"
        )
    return _conclude(options, meant[0], _advice(meant[0]), records)


def _advise_script(options: AdviseOptions, target: str, words: list[str], command: str) -> int:
    from stepscope.studies.inspected.order import Order
    from stepscope.studies.inspected.recording import record_script

    if options.model:
        raise UsageError("there are a script and a model", "name one of them")
    if not options.module and not Path(target).is_file():
        raise UsageError(f"there is no script {target}", "name a Python file, or a module with -m")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "several ranks cannot be tried in turns",
            "record them with `torchrun -m stepscope inspect`, then `stepscope advise` the records",
        )
    script = Script(target=target, module=options.module, words=tuple(words), warmup=options.warmup)
    say(f"recording some steps of {target}")
    base = record_script(
        Order(
            target=target, module=options.module, words=tuple(words), warmup=options.warmup,
            timed=10, traced=3, memory=True, stop=True,
        )
    )  # fmt: skip
    run = new_run((), command)
    base = msgspec.structs.replace(base, run=run.id)
    kind = base.environment.device_kind
    with Store(options.store) as store, Runner(kind, options.timeout) as runner:
        store.add_run(run)
        with make_observer(run, 0, 0) as observer:
            ceilings = runner.ceilings(observer)
        if not base.ceilings:
            base = msgspec.structs.replace(base, ceilings=ceilings)
        store.add(base)
        advice = _advice(base, tuple(runner.lacks))
        if options.verify:
            Verification(
                runner, store, run,
                lambda some: _trial(options, base, some, script=script),
            ).verify(advice, OF_SCRIPTS)  # fmt: skip
        records = store.records(run.id)
    return _conclude(options, base, advice, records)


def _advise_model(options: AdviseOptions, command: str) -> int:
    flags = OwnFlags(
        model=options.model, batch=(options.batch,), dtype=(options.dtype,),
        compile=(options.compile,), optimizer=(options.optimizer,),
    )  # fmt: skip
    cases = OWN.cases(flags)
    run = new_run(cases, command)
    with Store(options.store) as store, Runner(options.device, options.timeout) as runner:
        runner.refuse_impossible(cases)
        store.add_run(run)
        with make_observer(run, len(cases), 0) as observer:
            runner.run(cases, run, store, observer)
        (base,) = store.records(run.id)
        if base.status != "ok":
            raise StepscopeError(f"{base.case}: {base.reason or base.status}")
        advice = _advice(base, tuple(runner.lacks))
        if options.verify:
            case = msgspec.convert(base.config, OwnCase)
            Verification(
                runner, store, run, lambda some: _trial(options, base, some, case=case)
            ).verify(advice, OF_MODELS)
        records = store.records(run.id)
    return _conclude(options, base, advice, records)


def _trial(
    options: AdviseOptions, base: Record, advice: tuple[Advice, ...], *,
    case: OwnCase | None = None, script: Script | None = None,
) -> Trial:  # fmt: skip
    return Trial(
        base=case,
        program=script,
        advice=advice,
        step_ms=facts_of(base).step_ms,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )


def _conclude(
    options: AdviseOptions, base: Record, advice: Sequence[Advice], records: Sequence[Record]
) -> int:
    from stepscope.report.html import html_page
    from stepscope.report.terminal import print_sections
    from stepscope.studies.page import make_page, study_sections

    listed = [
        advice_table(advice, facts_of(base).step_ms),
        lines_table(advice, "advise-how", "How each is written"),
    ]
    section = Section(
        name="advice", title="Advice", question=_QUESTION,
        blocks=tuple(table for table in listed if table.rows),
    )  # fmt: skip
    made = make_page(records)
    past = history_blocks(read_history(), base.environment.device_name)
    history = Section(name="history", title="Predictions so far", question=_SO_FAR, blocks=past)
    trials = [one for one in made.sections if one.name == TRIALS]
    rest = [one for one in made.sections if one.name != TRIALS]
    tables = [block for one in trials for block in one.blocks if isinstance(block, Table)]
    # The first stands on top of the page.
    trials = [
        msgspec.structs.replace(
            one, blocks=tuple(block for block in one.blocks if block not in tables[:1])
        )
        for one in trials
    ]
    page = Page(
        title=f"Advice for {base.config.get('script') or base.config['model']}",
        subtitle=made.subtitle,
        headline=tables[0] if tables else made.headline,
        sections=(*trials, section, *((history,) if past else ()), *rest),
    )
    path = options.out / "advice.html"
    write_text(path, html_page(page))
    own = [record for record in records if record.study == TRIALS]
    tried = [Tried(record) for record in own]
    if options.json:
        facts = {
            "advice": advice,
            "tried": [{"change": t.trial.code, "predicted_ms": t.predicted_ms,
                       "realised_ms": t.realised_ms, "verdict": t.verdict} for t in tried],
            "report": path,
        }  # fmt: skip
        print(json_line(facts))
        return 0
    print_sections([section, *study_sections(own)])
    if not advice:
        print("No change that is known here is predicted to gain 3 % or more.")
    print(f"page: {path.resolve()}")
    return 0
