"""`stepscope advise`: changes of a training step that are worth it; --verify proves them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import tyro

from stepscope.analysis.advice.calibration import factors
from stepscope.analysis.advice.changes import Advice, advise, applicable
from stepscope.cli.common import Place, json_line, load_records, parse, write_text
from stepscope.cli.progress import make_observer
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.schema import Record, Run
from stepscope.records.store import Store
from stepscope.report.blocks import Page, Section, Table
from stepscope.studies.advice import STUDY_NAME as TRIALS
from stepscope.studies.advice import Trial
from stepscope.studies.advice.facts_of import facts_of
from stepscope.studies.advice.history import add_to_history, read_history
from stepscope.studies.advice.view import Tried, advice_table
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own import STUDY_NAME as OWN_NAME
from stepscope.studies.own import OwnCase, OwnFlags
from stepscope.studies.runner import Runner, new_run

_QUESTION = "Which changes apply, what would each gain, and what does it risk?"


class AdviseOptions(Place, frozen=True, kw_only=True):
    source: Annotated[str, tyro.conf.Positional] = ""
    """Records of `inspect` or of the study `own`: a file, or a run. Instead of --model."""
    model: str = ""
    """package.module:function that builds a model (see `stepscope run own --help`)."""
    batch: int = 8
    """Of the step as it is now."""
    dtype: str = "float32"
    """Of the step as it is now."""
    compile: str = "no"
    """Of the step as it is now."""
    optimizer: str = "adamw"
    """Of the step as it is now."""
    verify: bool = False
    """Try each change in turns with the step as it is, then those that are kept together."""
    rounds: int = 15
    """Turns in which both steps are timed."""
    loss_steps: int = 20
    """Steps over which the losses are compared."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure; auto takes the GPU where there is one."""
    timeout: float = 600.0
    """Seconds after which a case is given up."""
    json: bool = False
    """Print one line of JSON instead of the tables."""


def main(words: list[str]) -> int:
    options = parse(
        AdviseOptions,
        words,
        "advise",
        "List the changes that apply to a training step, with the predicted gain in time and\n"
        "memory and the risk of each. --verify tries them on this machine. No file of yours is\n"
        "changed.",
        (
            "stepscope advise stepscope-out/train.jsonl",
            "stepscope advise --model examples.slow:build --batch 8",
            "stepscope advise --model examples.slow:build --verify",
        ),
    )
    if bool(options.source) == bool(options.model):
        raise UsageError("there is no step to advise on", "name records, or --model, not both")
    if options.rounds < 5 or options.loss_steps < 4:
        raise UsageError(
            f"rounds is {options.rounds} and loss-steps {options.loss_steps}",
            "at least 5 rounds and 4 steps are needed to tell anything",
        )
    if options.source:
        if options.verify:
            raise UsageError("only a model can be tried again", "give --model for --verify")
        return _show(options, load_records(options.source, options))
    return _measure(options, words)


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


def _measure(options: AdviseOptions, words: Sequence[str]) -> int:
    flags = OwnFlags(
        model=options.model, batch=(options.batch,), dtype=(options.dtype,),
        compile=(options.compile,), optimizer=(options.optimizer,),
    )  # fmt: skip
    cases = OWN.cases(flags)
    run = new_run(cases, shlex.join(["stepscope", "advise", *words]))
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
            trials = [_trial(options, base, (one,)) for one in applicable(advice)]
            kept = [a for one in _try(trials, runner, store, run) for a in one.trial.advice]
            if len(kept) > 1:
                _try([_trial(options, base, tuple(kept))], runner, store, run)
        records = store.records(run.id)
    return _conclude(options, base, advice, records)


def _trial(options: AdviseOptions, base: Record, advice: tuple[Advice, ...]) -> Trial:
    return Trial(
        base=msgspec.convert(base.config, OwnCase),
        advice=advice,
        step_ms=facts_of(base).step_ms,
        rounds=options.rounds,
        loss_steps=options.loss_steps,
    )


def _try(trials: Sequence[Trial], runner: Runner, store: Store, run: Run) -> list[Tried]:
    """Those that are kept."""
    cases = [trial.case() for trial in trials]
    keys = {case.key for case in cases}
    with make_observer(run, len(cases), 0) as observer:
        runner.run(cases, run, store, observer)
    tried = [Tried(record) for record in store.records(run.id) if record.case in keys]
    add_to_history([found for one in tried if (found := one.verified()) is not None])
    return [one for one in tried if one.kept]


def _conclude(
    options: AdviseOptions, base: Record, advice: Sequence[Advice], records: Sequence[Record]
) -> int:
    from stepscope.report.html import html_page
    from stepscope.report.terminal import print_sections
    from stepscope.studies.page import make_page, study_sections

    table = advice_table(advice, facts_of(base).step_ms)
    section = Section(name="advice", title="Advice", question=_QUESTION, blocks=(table,))
    made = make_page(records)
    trials = [one for one in made.sections if one.name == TRIALS]
    rest = [one for one in made.sections if one.name != TRIALS]
    tables = [block for one in trials for block in one.blocks if isinstance(block, Table)]
    page = Page(
        title=f"Advice for {base.config.get('script') or base.config['model']}",
        subtitle=made.subtitle,
        headline=tables[0] if tables else made.headline,
        sections=(*trials, section, *rest),
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
