"""`stepscope judge`: is a changed training script faster at the same training?"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.advisor.advise.cases import Script
from stepscope.advisor.judge.criteria import DEFAULT_DTYPE, GRADIENT_ERROR, Outcome, Verdict
from stepscope.advisor.judge.evidence import FEWEST_STEPS
from stepscope.advisor.judge.referee import referee
from stepscope.cli.common import json_line, parse
from stepscope.cli.messages import log, say
from stepscope.cli.patching import Silent
from stepscope.errors import UsageError, in_one_line, no_such_file, unknown_name
from stepscope.records.stats import FEWEST_PAIRS
from stepscope.runner.load import let_threads_sleep

_CODES: dict[Outcome, int] = {"faster": 0, "refused": 3, "not faster": 3, "cannot tell": 4}
_MARKS = {"pass": "ok", "fail": "FAILS", "unknown": "cannot tell"}


class JudgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    original: Annotated[str, tyro.conf.Positional]
    """The original script; quote it together with its arguments: "train.py --batch-size 8"."""
    changed: Annotated[str, tyro.conf.Positional] = ""
    """The changed script. Without it, --commits names two versions of the first one."""
    commits: tuple[str, ...] = ()
    """Two commits of the repository of the script, the original first."""
    steps: int = 100
    """Steps that are observed; a changed script that ends earlier than the original is refused."""
    rounds: int = 15
    """Rounds of the timing, each with a few steps of both scripts."""
    dtype: str = DEFAULT_DTYPE
    """Lowest dtype of matmuls whose error is accepted in the gradients."""
    json: bool = False
    """Print one line of JSON."""


def main(words: list[str]) -> int:
    options = parse(
        JudgeOptions,
        words,
        "judge",
        "Decide whether a changed training script is faster at the same training. It has to\n"
        "process the same samples with the same model FLOPs; its gradients, on the same batches\n"
        "with the same weights, have to agree within the error of the dtype, and its losses must\n"
        "be statistically indistinguishable. Otherwise the answer says what differs. Exit code 0:\n"
        "it counts as faster, 3: it does not, 4: cannot tell. Both scripts run from their\n"
        "beginning, twice, with seeded random numbers.",
        (
            "stepscope judge train.py train_fast.py",
            'stepscope judge "train.py --steps 500" "train_fast.py --steps 500" --json',
            "stepscope judge train.py --commits main HEAD",
        ),
    )
    if bool(options.changed) == bool(options.commits) or len(options.commits) not in (0, 2):
        raise UsageError(
            "there are not two scripts to judge", "give a changed script, or --commits A B"
        )
    if options.steps < FEWEST_STEPS or options.rounds < FEWEST_PAIRS:
        raise UsageError(
            f"--steps is {options.steps} and --rounds {options.rounds}",
            f"use at least {FEWEST_STEPS} steps and {FEWEST_PAIRS} rounds",
        )
    if options.dtype not in GRADIENT_ERROR:
        raise unknown_name("dtype", options.dtype, GRADIENT_ERROR)
    with _scripts(options) as (original, changed):
        let_threads_sleep(log)
        log("observing both scripts, then timing them interleaved")
        verdict = referee(
            original,
            changed,
            steps=options.steps,
            rounds=options.rounds,
            lowest=options.dtype,
            bench=Silent(),
        )
    _print(verdict, options.json)
    return _CODES[verdict.outcome]


def _print(verdict: Verdict, as_json: bool) -> None:
    if as_json:
        facts = {
            "outcome": verdict.outcome,
            "failed": verdict.failed,
            "sentence": verdict.sentence,
            "criteria": msgspec.to_builtins(verdict.criteria),
            "gain": None if verdict.gain is None else msgspec.to_builtins(verdict.gain),
        }
        print(json_line(facts))
        return
    width = max(len(one.name) for one in verdict.criteria)
    for one in verdict.criteria:
        say(f"{one.name:<{width}}  {_MARKS[one.result]}: {one.text}")
    say(verdict.sentence)


@contextmanager
def _scripts(options: JudgeOptions) -> Iterator[tuple[Script, Script]]:
    """The two scripts; those of commits are in a temporary copy of the repository."""
    first, *words = shlex.split(options.original) or [""]
    if not Path(first).is_file():
        raise no_such_file(first, "script")
    if not options.commits:
        second, *more = shlex.split(options.changed)
        if not Path(second).is_file():
            raise no_such_file(second, "script")
        yield Script(target=first, words=tuple(words)), Script(target=second, words=tuple(more))
        return
    root = Path(_git("rev-parse", "--show-toplevel", at=Path(first).resolve().parent).strip())
    with tempfile.TemporaryDirectory(prefix="stepscope-judge-") as name:
        scripts = []
        for number, commit in enumerate(options.commits):
            folder = Path(name) / str(number)
            folder.mkdir()
            _git("archive", "-o", f"{folder}.tar", _commit(commit, root), at=root)
            subprocess.run(["tar", "xf", f"{folder}.tar", "-C", str(folder)], check=True)
            target = folder / Path(first).resolve().relative_to(root)
            if not target.is_file():
                raise UsageError(f"commit {commit} has no {first}", "give commits that have it")
            scripts.append(Script(target=str(target), words=tuple(words)))
        yield scripts[0], scripts[1]


def _commit(name: str, root: Path) -> str:
    return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}", at=root).strip()


def _git(*words: str, at: Path) -> str:
    done = subprocess.run(["git", "-C", str(at), *words], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"git {words[0]}: {in_one_line(done.stderr)}", "give two commits")
    return done.stdout
