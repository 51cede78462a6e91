"""Criteria of wrappers and optimizers on several ranks: weights against one process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.errors import some
from stepscope.grading.check.cases import Checked
from stepscope.grading.criteria.accuracy import allowed_error, largest
from stepscope.grading.criteria.attempt import Attempt
from stepscope.grading.criteria.implementation import Implementation, in_folder
from stepscope.grading.ranks.collectives import describe
from stepscope.grading.ranks.rank import RankRun, run
from stepscope.grading.ranks.reference import (
    State,
    Wrong,
    as_factor,
    trained,
    wrong_averages,
    wrong_updates,
)
from stepscope.grading.ranks.scenarios import RANKS, Net, Scenario, build, scenario_of, state_of
from stepscope.parallel import Limits, RankFailed, launch
from stepscope.report.format import number

_START_S = 120.0
_BEAT_S = 30.0
_EXPLAINED = 0.02
_SHARDED_BELOW = 0.75
"""Largest share of the elements that a rank of two may keep if they are sharded at all; an even
division has 0.5, and one by whole tensors a little more."""
_MAY_REFUSE = ("unused", "uneven", "dtypes", "few", "groups", "one-bucket")
_IN_USERS_FILE = re.compile(r'File "([^"]+)", line (\d+)')
_ERROR = re.compile(r"raised (\w+)")
_REFUSAL_NAMES = ("RuntimeError", "ValueError", "NotImplementedError", "AssertionError")


def grade(case: Checked, criterion: str, attempt: Attempt) -> None:
    """Train on two ranks and compare every weight with training in one process."""
    made = Implementation(case)
    scenario = scenario_of(case.kind, criterion)
    runs = _train(case, criterion, scenario, attempt)
    if runs is None:
        return
    if runs[0].refused:
        attempt.note(f"not graded: {runs[0].refused}")
        return
    model = build(scenario, made.layers())
    if scenario.seeds_differ and not _equal_start(model, runs, attempt, criterion):
        return
    if criterion == "sharded":
        _require_sharded(case, model, runs, attempt)
        return
    _compare(case, model, scenario, runs, attempt)
    if criterion == "buffers":
        _name_buffers(model, runs, attempt)


def _train(
    case: Checked, criterion: str, scenario: Scenario, attempt: Attempt
) -> list[RankRun] | None:
    """The results of the ranks; None if they failed, which is then a finding."""
    # Longer than a step: the import of the user's file comes before the first one.
    limits = Limits(
        start=max(_START_S, case.seconds) if case.seconds >= _BEAT_S else case.seconds + _BEAT_S,
        step=case.seconds,
        beat=_BEAT_S,
        total=_START_S + 4 * case.seconds,
    )
    with tempfile.TemporaryDirectory(prefix="stepscope-check-") as folder:
        try:
            return launch(
                run,
                (case, scenario, folder),
                ranks=RANKS,
                backend="gloo",
                device="cpu",
                limits=limits,
                threads=1,
            )
        except RankFailed as failed:
            _explain_failure(failed, folder, criterion, attempt)
            return None


def _explain_failure(failed: RankFailed, folder: str, criterion: str, attempt: Attempt) -> None:
    # Steps are counted from 1 here.
    what = re.sub(r" at step (\d+)$", lambda m: f" at step {int(m[1]) + 1}", str(failed))
    mismatch = describe(folder, RANKS)
    step = {"step": failed.step}
    if "is stuck" in what or "was not finished" in what or "stopped" in what:
        where = "; ".join(filter(None, (mismatch, _stacks(failed, attempt.folder))))
        attempt.fault("hang", f"the ranks hang at step {failed.step + 1}: {where}", **step)
        return
    line = _users_line(failed.stacks.get(failed.rank, ""), attempt.folder)
    text = f"{what}{f' ({line})' if line else ''}"
    raised = _ERROR.search(what)
    in_torch = "torch/distributed/" in _last_file(failed.stacks.get(failed.rank, ""))
    # Gloo ends a process whose message has another size than it expects.
    if mismatch and (in_torch or raised is None):
        attempt.fault("mismatch", f"{text}; {mismatch}", **step)
    elif criterion in _MAY_REFUSE and raised and raised[1] in (*_REFUSAL_NAMES, "ParallelError"):
        attempt.note(f"refuses it: {text}")
    else:
        attempt.fault("raises", text, **step)


def _stacks(failed: RankFailed, users: str) -> str:
    lines = {rank: _users_line(stack, users) for rank, stack in sorted(failed.stacks.items())}
    return ", ".join(
        f"rank {rank} is at {line or 'an unknown line'}" for rank, line in lines.items()
    )


def _users_line(stack: str, users: str) -> str:
    """The innermost line of the user's code in a traceback or a dump of the stacks."""
    files = [(m[1], m[2]) for m in _IN_USERS_FILE.finditer(stack) if in_folder(m[1], users)]
    if not files:
        return ""
    # A dump has the most recent call first, a traceback has it last.
    file, line = files[0] if "most recent call first" in stack else files[-1]
    return f"{file.rpartition('/')[2]}:{line}"


def _last_file(stack: str) -> str:
    files = _IN_USERS_FILE.findall(stack)
    return files[-1][0] if files else ""


def _equal_start(model: Net, runs: Sequence[RankRun], attempt: Attempt, criterion: str) -> bool:
    """Compare parameters after wrapping with those of rank 0 before it."""
    first = state_of(model)
    for rank, ran in enumerate(runs):
        wrong = _differing(ran.start, first)
        if not wrong:
            continue
        if criterion != "start":
            attempt.note("not graded: the parameters differ between the ranks at the start")
            return False
        error = max(largest(ran.start[name].double() - first[name].double()) for name in wrong)
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        of = "parameters that need no gradient" if set(wrong) <= frozen else "parameters"
        attempt.fault(
            "missing-broadcast",
            f"after wrapping, {of} of rank {rank} differ from those that rank 0 had before, by up"
            f" to {number(error)} ({some(wrong)}): they are not broadcast from rank 0",
            rank=rank,
            error=error,
            of=of,
        )
        return False
    return True


def _differing(state: State, first: State) -> list[str]:
    return [name for name in first if not torch.equal(state[name], first[name])]


def _name_buffers(model: Net, runs: Sequence[RankRun], attempt: Attempt) -> None:
    """Wrong weights follow from buffers that each rank keeps for itself."""
    first = dict(model.named_buffers())
    for rank, ran in enumerate(runs):
        if attempt.faults and (wrong := _differing(ran.states[0], first)):
            text = f"buffers of rank {rank} that the forward pass reads differ from those of rank 0"
            attempt.faults = []
            attempt.fault(
                "missing-broadcast",
                f"{text} ({some(wrong)}): they are not broadcast from rank 0, so that the weights"
                " differ from training in one process",
                rank=rank,
                of="buffers",
            )


def _require_sharded(case: Checked, model: Net, runs: Sequence[RankRun], attempt: Attempt) -> None:
    if case.kind == "FSDP":
        full = sum(p.numel() for p in model.parameters())
        what = "parameters"
    else:
        # Adam has two moments.
        full = 2 * sum(p.numel() for p in model.parameters())
        what = "optimizer state"
        if not any(ran.elements for ran in runs):
            attempt.note("not graded: the state of the optimizer was not found")
            return
    for rank, ran in enumerate(runs):
        share = ran.elements / full
        if share > _SHARDED_BELOW:
            attempt.fault(
                "not-sharded",
                f"rank {rank} of {len(runs)} keeps {share:.0%} of the elements of the {what}"
                " between steps",
                share=share,
            )
            return


class Deviation(NamedTuple):
    """The first step after which the weights of a rank are wrong."""

    step: int
    rank: int
    names: list[str]
    error: float


def _compare(
    case: Checked,
    model: Net,
    scenario: Scenario,
    runs: Sequence[RankRun],
    attempt: Attempt,
) -> None:
    sharded = case.kind == "ShardedOptimizer"
    exact = trained(model, scenario, sharded=sharded, exact=True)
    near = trained(model, scenario, sharded=sharded, exact=False)
    first = _first_deviation(model, runs, exact, near, attempt)
    if first is None:
        return
    before = [{name: x.double() for name, x in state_of(model).items()}, *exact]
    step, rank, names, error = first
    observed = runs[rank].states[step]
    apart = max(
        largest(runs[0].states[step][name].double() - runs[1].states[step][name].double())
        for name in names
    )
    wrongs = (
        wrong_updates(model, scenario, before, step)
        if sharded
        else wrong_averages(model, scenario, before, step, rank)
    )
    code, why = _cause(names, observed, exact[step], before[step], wrongs)
    waits = runs[rank].pending
    if sharded and code == "stale-shard":
        others = "" if apart else ", as on the other ranks: no rank updates them"
        why = f"rank {rank} keeps the weights from before the step{others}"
        why += ": the update of their owner does not arrive" if apart else ""
    elif code == "unchanged" and case.kind == "FSDP":
        code, why = (
            "stale-shard",
            (
                "the gathered weights are those from before the step: the optimizer updates another"
                " copy than the one that is gathered"
            ),
        )
    elif code == "stale-weights" and case.kind == "FSDP":
        code = "stale-shard"
    if waits:
        why = f"{some(waits)} issues a collective that is not waited for before the step; {why}"
        code = "missing-wait"
    who = f"ranks differ by {number(apart)}" if apart > error / 4 else "all ranks are off"
    attempt.fault(
        code or "wrong-weights",
        f"after step {step + 1} {some(names)} of rank {rank} differ from training in one process by"
        f" {number(error)} ({who}){': ' if why else ''}{why.rstrip('; ')}",
        step=step + 1,
        rank=rank,
        error=error,
        parameters=len(names),
    )


def _first_deviation(
    model: Net,
    runs: Sequence[RankRun],
    exact: Sequence[State],
    near: Sequence[State],
    attempt: Attempt,
) -> Deviation | None:
    for step, right in enumerate(exact):
        found = []
        for rank, ran in enumerate(runs):
            state = ran.states[step]
            missing = [name for name in right if name not in state]
            if missing:
                attempt.fault("missing-parameters", f"the full parameters have no {some(missing)}")
                return None
            errors: dict[str, float] = {}
            for name, one in right.items():
                dtype = dict(model.named_parameters())[name].dtype
                allowed = allowed_error(one, near[step][name], dtype)
                if state[name].shape != one.shape:
                    shapes = f"{tuple(state[name].shape)} instead of {tuple(one.shape)}"
                    attempt.fault("wrong-shape", f"{name} has the shape {shapes}")
                    return None
                error = largest(state[name].double() - one)
                # A NaN compares false.
                if not error <= allowed:
                    errors[name] = error
            if errors:
                found.append(Deviation(step, rank, list(errors), max(errors.values())))
        if found:
            # Where one rank is right, the other shows what is wrong.
            return max(found, key=lambda one: (len(one.names), one.error))
    return None


def _cause(
    names: Sequence[str],
    observed: State,
    exact: State,
    before: State,
    wrongs: Iterable[Wrong],
) -> tuple[str, str]:
    """Code and text of the mistake that explains all wrong weights; empty if none does."""
    best: tuple[float, str, str] | None = None
    for wrong in wrongs:
        if not all(name in wrong.state for name in names):
            continue
        left = max(_left(observed[name], wrong.state[name], exact[name]) for name in names)
        if left <= _EXPLAINED and (best is None or left < best[0] / 2):
            best = left, wrong.code, wrong.text
    if best is not None:
        return best[1], best[2]
    factors = {as_factor(observed[name], exact[name], before[name]) for name in names}
    if len(factors) == 1 and (text := factors.pop()):
        return "wrong-average", text
    return "", ""


def _left(observed: Tensor, wrong: Tensor, exact: Tensor) -> float:
    """Part of a deviation that a mistake does not explain."""
    return largest(observed.double() - wrong) / largest(observed.double() - exact)
