"""`stepscope check`: grade a user's own implementation."""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import tyro

from stepscope.cli.common import StoreOptions, json_line, parse
from stepscope.cli.messages import log, say
from stepscope.cli.progress import make_observer
from stepscope.errors import UsageError, no_such_file, unknown_name
from stepscope.grading.check import STUDY
from stepscope.grading.check.cases import AnyCase, CriterionCase, SpeedCase
from stepscope.grading.check.kinds import (
    ADAPTERS,
    KINDS,
    Kind,
    check_criteria,
    find_criteria,
    find_kind,
    kind_of,
)
from stepscope.grading.check.view import failing
from stepscope.records.schema import Record
from stepscope.records.store import Store
from stepscope.report.blocks import Finding
from stepscope.report.terminal import print_findings, print_sections
from stepscope.runner.nursery import may_have_gpu
from stepscope.runner.runner import Runner, new_run
from stepscope.studies.page import study_sections
from stepscope.studies.trusted import banner

_INTERPRET = "TRITON_INTERPRET"
_CALL_S, _STEP_S = 60.0, 20.0


class CheckOptions(StoreOptions, frozen=True, kw_only=True):
    target: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[FILE:NAME …]")
    ] = ()
    """Implementations: FILE.py:NAME or package.module:NAME. A file alone means everything in it
    with the name of a kind."""
    kind: Annotated[str, tyro.conf.arg(name="as")] = ""
    """Kind of the implementations, if their names do not say it: FlashAttention, rmsnorm, DDP,
    DDPBucketed, FSDP, ShardedOptimizer."""
    adapters: Path | None = None
    """A file with the functions of the course's tests/adapters.py: grade what they return."""
    only: tuple[str, ...] = ()
    """Criteria to grade, by name (see --list)."""
    list: bool = False
    """List the kinds, their interfaces and criteria."""
    speed: bool = True
    """Time the implementation beside Stepscope's and torch's."""
    rounds: int = 20
    """Timed rounds."""
    hang_after: float | None = None
    """Seconds after which a call, or a step on the ranks, counts as hanging; by default 60 for a
    call, which may compile, and 20 for a step."""
    timeout: float = 300.0
    """Time limit of each criterion, in seconds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of FlashAttention and rmsnorm; wrappers are graded on two CPU ranks, with gloo."""
    json: bool = False
    """Print one line of JSON: findings, criteria and the run."""


class Named(NamedTuple):
    """An implementation to grade."""

    source: str
    name: str
    kind: Kind
    adapters: bool = False


def main(words: list[str]) -> int:
    options = parse(
        CheckOptions,
        words,
        "check",
        "Grade your own implementation of attention, RMSNorm, DDP, FSDP or a sharded optimizer.\n"
        "Results and gradients are compared with float64, weights on two ranks with training in\n"
        "one process. A finding says what is wrong and the likely cause. Then its speed is\n"
        "measured beside Stepscope's and torch's. Your code runs in processes of its own, with\n"
        "time limits. The exit code is 1 if a criterion fails.",
        (
            "stepscope check my_file.py:FlashAttention",
            "stepscope check ddp.py:MyWrapper --as DDP --only weights start --no-speed",
            "stepscope check --adapters tests/adapters.py",
            "stepscope check --list",
        ),
    )
    if options.list:
        say("\n".join(_listed()))
        return 0
    if (options.hang_after or 1) < 0 or options.timeout <= 0 or options.rounds < 1:
        raise UsageError("--hang-after and --timeout must be above 0, and --rounds at least 1")
    named, missing = _named(options)
    if not named and missing:
        if options.json:
            print(json_line(_facts((), (), missing)))
        else:
            log(f"not implemented: {', '.join(missing)}")
        return 0
    check_criteria([one.kind for one in named], options.only)
    records = _measure(options, _cases(options, named), words)
    wrong = failing(STUDY.results(records))
    if options.json:
        print(json_line(_facts(records, wrong, missing)))
    else:
        if warning := banner(records):
            print_findings([Finding(text=warning, tone="warn")])
        print_sections(study_sections(records))
        if missing:
            log(f"not implemented: {', '.join(missing)}")
        if wrong:
            log(f"fails: {', '.join(wrong)}")
    return 1 if wrong else 0


def _listed() -> Iterator[str]:
    for kind in KINDS.values():
        yield f"{kind.name}: {kind.interface}"
        width = max(len(one.name) for one in kind.criteria)
        for one in kind.criteria:
            beyond = " (beyond the course)" if one.beyond else ""
            yield f"  {one.name:<{width}}  {one.title}{beyond}"


def _named(options: CheckOptions) -> tuple[list[Named], list[str]]:
    """The implementations to grade, and the adapters that are not implemented."""
    if options.adapters is None and not options.target:
        raise UsageError(
            "there is nothing to grade", "use: stepscope check my_file.py:FlashAttention"
        )
    named = [one for target in options.target for one in _of_target(target, options.kind)]
    missing: list[str] = []
    if options.adapters is not None:
        defined = _definitions(options.adapters)
        known = [one for one in ADAPTERS if one.function in defined]
        if not known:
            raise UsageError(
                f"{options.adapters} defines none of the course's adapters",
                f"one of: {', '.join(one.function for one in ADAPTERS)}",
            )
        for adapter in known:
            if _only_raises(defined[adapter.function]):
                missing.append(adapter.function)
            else:
                kind = KINDS[adapter.kind]
                named.append(Named(str(options.adapters), adapter.function, kind, adapters=True))
    return named, missing


def _of_target(target: str, kind: str) -> Iterator[Named]:
    source, _, name = target.partition(":")
    if not source.endswith(".py"):
        if not name:
            raise UsageError(f"{target} names no class or function", f"use: {source}:NAME")
        yield Named(source, name, _kind_of(name, kind))
        return
    defined = _definitions(Path(source))
    if name:
        if name.partition(".")[0] not in defined and "*" not in defined:
            raise unknown_name(f"in {source}, the implementation", name, defined)
        yield Named(source, name, _kind_of(name, kind))
        return
    found = [
        one
        for one, node in defined.items()
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and not one.startswith("_")
        and kind_of(one)
    ]
    if not found:
        raise UsageError(
            f"{source} defines nothing with the name of a kind", f"name it: {source}:NAME --as KIND"
        )
    for one in found:
        yield Named(source, one, _kind_of(one, kind))


def _kind_of(name: str, given: str) -> Kind:
    kind = given or kind_of(name.rpartition(".")[2])
    if not kind:
        raise UsageError(
            f"the name {name} does not say what it is", f"add --as with one of: {', '.join(KINDS)}"
        )
    return find_kind(kind)


def _definitions(file: Path) -> dict[str, ast.stmt]:
    """Names that a file defines or imports at its top level, found without running it."""
    if not file.is_file():
        raise no_such_file(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{file}{line}: {error.args[0]}", "fix it first") from error
    names: dict[str, ast.stmt] = {}
    nodes: list[ast.AST] = list(tree.body)
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {one.id: node for one in targets if isinstance(one, ast.Name)}
        else:
            # Within `if` and `try`.
            nodes += ast.iter_child_nodes(node)
    return names


def _only_raises(node: ast.stmt) -> bool:
    """True for a function whose body is `raise NotImplementedError`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    body = [
        one
        for one in node.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    return (
        len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplemented" in ast.dump(body[0])
    )


def _cases(options: CheckOptions, named: Sequence[Named]) -> list[AnyCase]:
    cases: list[AnyCase] = []
    for one in named:
        source = str(Path(one.source).resolve()) if one.source.endswith(".py") else one.source
        shared: dict[str, Any] = {
            "source": source,
            "name": one.name,
            "kind": one.kind.name,
            "adapters": one.adapters,
            "seconds": options.hang_after or (_STEP_S if one.kind.ranks else _CALL_S),
        }
        cases += [
            CriterionCase(**shared, criterion=criterion.name)
            for criterion in find_criteria(one.kind, options.only)
        ]
        if options.speed and not options.only:
            cases.append(SpeedCase(**shared, rounds=options.rounds))
    return cases


def _measure(
    options: CheckOptions, cases: Sequence[AnyCase], words: Sequence[str]
) -> tuple[Record, ...]:
    planned = [STUDY.plan(case) for case in cases]
    run = new_run(planned, shlex.join(["stepscope", "check", *words]))
    with (
        _interpreted(options.device),
        Store(options.store) as store,
        Runner(options.device, options.timeout) as runner,
    ):
        store.add_run(run)
        try:
            with make_observer(run, len(planned), 0) as observer:
                runner.run(planned, run, store, observer, with_ceilings=False)
        except KeyboardInterrupt:
            log(f"the finished criteria are saved: stepscope show {run.id} --full")
            raise
        return store.records(run.id)


@contextmanager
def _interpreted(device: str) -> Iterator[None]:
    """Run Triton kernels in the interpreter where there is no GPU: in the worker, Triton reads the
    variable when it is imported."""
    if may_have_gpu(device) or _INTERPRET in os.environ:
        yield
        return
    os.environ[_INTERPRET] = "1"
    try:
        yield
    finally:
        del os.environ[_INTERPRET]


def _facts(
    records: Sequence[Record], wrong: Sequence[str], missing: Sequence[str]
) -> dict[str, Any]:
    findings = [
        block
        for section in study_sections(records)
        for block in section.blocks
        if isinstance(block, Finding)
    ]
    return {
        "run": records[0].run if records else None,
        "fails": wrong,
        "not_implemented": missing,
        "findings": [msgspec.to_builtins(one) | {"sentence": one.sentence} for one in findings],
        "criteria": [
            {
                "implementation": one.config["name"],
                "criterion": one.config.get("criterion", "speed"),
                "status": one.status,
                "outcome": one.attachments.get("outcome"),
            }
            for one in records
        ],
    }
