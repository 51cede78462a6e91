"""Claims on advice: predictions against measured gains, and rehearsals of published jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from advice_backtest import FILES, pairs
from foreign_page import first_trial, is_right
from rehearsal_published import PAIRS
from walkthrough_page import first_advice_right

from claims.records import Claim, Line, lines_of, records_of, share
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS
from stepscope.advisor.advise.outcome import Tried
from stepscope.report.format import duration, number, percent

_EXAMPLE = "advise-slow_h200.jsonl"
_EXAMPLE_ON_CPU = "advise-slow_cpu.jsonl"


def _backtest(results: Path) -> str:
    files = [(name, records_of(results / name)) for name in FILES]
    advised = [one for one in pairs(files) if one.advised]
    return share(sum(one.right for one in advised), len(advised))


def _first(results: Path, machine: str) -> str:
    return share(*first_advice_right(results, machine))


def _foreign(results: Path, machine: str) -> str:
    trials = [first_trial(line) for line in lines_of(results / f"foreign_{machine}.jsonl")]
    tried = [one for one in trials if one is not None]
    return share(sum(map(is_right, tried)), len(tried))


def _dcgan(results: Path) -> Line:
    (line,) = (
        one for one in lines_of(results / "foreign_h200.jsonl") if one["program"] == "torch_dcgan"
    )
    trial = first_trial(line)
    assert trial is not None
    assert not is_right(trial)
    return trial


def _tried(results: Path, name: str) -> list[Tried]:
    records = records_of(results / name)
    return [Tried(one) for one in records if one.study == TRIALS]


def _changes(results: Path, alone: bool) -> str:
    tried = _tried(results, _EXAMPLE)
    return str(sum((len(one.trial.advice) == 1) == alone for one in tried))


def _compiled_on_cpu(results: Path) -> str:
    one = next(one for one in _tried(results, _EXAMPLE_ON_CPU) if one.trial.code == "compile")
    assert one.predicted_ms is not None
    assert one.realized is not None
    gained = one.realized
    return (
        f"{duration(one.predicted_ms, 2)} predicted, {number(gained.low, 2)} to"
        f" {duration(gained.high, 2)} measured"
    )


def _unmeasured(results: Path) -> str:
    """Programs for a GPU with a recorded trial but no independent measurement."""
    lines = lines_of(results / "foreign_h200.jsonl")
    return share(sum("hook_ms" not in line for line in lines), len(lines))


def _lost(_: Path) -> str:
    """Largest loss of throughput of a published job with an unchanged batch per rank."""
    losses = [1 - pair.predicted.rate / pair.recorded.rate for pair in PAIRS if _same_batch(pair)]
    return percent(max(losses))


def _same_batch(pair: object) -> bool:
    return pair.recorded.tokens == pair.predicted.tokens  # type: ignore[attr-defined]


CLAIMS: dict[str, Claim] = {
    "advice.backtest": _backtest,
    "advice.first-h200": partial(_first, machine="h200"),
    "advice.first-cpu": partial(_first, machine="cpu"),
    "advice.foreign-h200": partial(_foreign, machine="h200"),
    "advice.foreign-cpu": partial(_foreign, machine="cpu"),
    "advice.dcgan-predicted": lambda results: duration(_dcgan(results)["predicted_ms"], 2),
    "advice.dcgan-step": lambda results: duration(_dcgan(results)["base_ms"], 2),
    "advice.tried-alone": partial(_changes, alone=True),
    "advice.tried-together": partial(_changes, alone=False),
    "advice.compile-on-cpu": _compiled_on_cpu,
    "advice.no-independent": _unmeasured,
    "rehearsal.lost": _lost,
}
