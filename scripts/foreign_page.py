"""docs/results/foreign.md: programs of other libraries, from `benchmarks/foreign.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from page_parts import commits_of, lines_of

from stepscope.report.blocks import Cell, Column, Interval, Table
from stepscope.report.format import counted, percent
from stepscope.report.text import markdown

Line = dict[str, Any]
MACHINES = {"h200": "One H200", "cpu": "A CPU"}
WITHIN = 1 / 3
"""A prediction is right if the verified gain differs from it by at most this fraction."""

_INTRODUCTION = (
    "The programs of `benchmarks/programs` use transformers, Accelerate, PEFT, Lightning, timm,"
    " torchvision or plain torch, each in the style of that library, and do not import Stepscope."
    " `python benchmarks/foreign.py` runs each of them plainly, under `stepscope inspect` and under"
    " `stepscope advise --verify`, and measures the same quantities with an independent hook"
    " (`benchmarks/independent_hook.py`). This page is generated from its results by"
    " `python scripts/make_docs.py`."
)


def foreign_pages(results: Path) -> dict[str, str]:
    """Return path under docs/results/ and text; empty if there are no results."""
    results_of = {name: lines_of(results / f"foreign_{name}.jsonl") for name in MACHINES}
    if not any(results_of.values()):
        return {}
    parts = ["# Programs of other libraries", _INTRODUCTION]
    for machine, title in MACHINES.items():
        if lines := results_of[machine]:
            parts += [f"## {title}", *_section(machine, lines)]
    return {"foreign.md": "\n\n".join(parts) + "\n"}


def _section(machine: str, lines: Sequence[Line]) -> Iterator[str]:
    known = [line for line in lines if "device" in line]
    if known:
        here = known[0]
        loads = [line["load_average"] for line in known if line["load_average"] is not None]
        busy = f" Load average at most {max(loads):.1f} on {here['cores']} cores." if loads else ""
        yield (
            f"`results/foreign_{machine}.jsonl`: {len(lines)} programs, {here['device']}, torch"
            f" {here['torch']}, Python {here['python']},"
            f" {commits_of(str(line['commit']) for line in known)}.{busy}"
        )
    yield "\n".join(f"- {sentence}" for sentence in summary_sentences(lines))
    yield markdown(foreign_table(lines)).strip()
    if any(len(verified(line)) > 1 for line in lines):
        yield markdown(trials_table(lines)).strip()
    failed = [(line["program"], error) for line in lines for error in line["errors"]]
    if failed:
        yield "Not measured:\n\n" + "\n".join(f"- {name}: {error}" for name, error in failed)


def verified(line: Line) -> list[Line]:
    """The trials of a program that measured a gain, in the order of the advice."""
    return [
        one
        for one in line.get("tried", [])
        if one["verified_ms"] is not None and not one["without_effect"]
    ]


def first_trial(line: Line) -> Line | None:
    """The trial of the first advice that could be tried."""
    return next(iter(verified(line)), None)


def is_right(trial: Line) -> bool:
    """True if the verified gain is within a third of the predicted one."""
    predicted, gained = trial["predicted_ms"], trial["verified_ms"]
    return bool(gained > 0 and abs(gained - predicted) <= WITHIN * predicted)


def in_range(trial: Line) -> bool:
    """True if the verified gain is inside the predicted range."""
    low, high = trial["range_ms"]
    return bool(low <= trial["verified_ms"] <= high)


def summary_sentences(lines: Sequence[Line]) -> Iterator[str]:
    first = [one for line in lines if (one := first_trial(line)) is not None]
    if first:
        yield (
            f"Of {len(first)} first pieces of advice that were tried, {sum(map(is_right, first))}"
            " gained within a third of the prediction."
        )
        trials = [one for line in lines for one in verified(line)]
        ranged = [one for one in trials if one["range_ms"] is not None]
        yield (
            f"{len(ranged)} of all {len(trials)} predictions that were tried have a range, and"
            f" {sum(map(in_range, ranged))} of the verified gains are inside it."
        )
    by_hand = [line for line in lines if "hand_ms" in line]
    if by_hand:
        differences = [abs(_share(_first(line)) - _hand_share(line)) for line in by_hand]
        yield (
            f"Applied with the program's own flag, {len(by_hand)} of these changes gain a fraction"
            f" of the step that differs by at most {percent(max(differences))} of the step from the"
            " verified one."
        )
    timed = [line for line in lines if "inspect_ms" in line]
    if timed:
        worst = max(abs(line["inspect_ms"] / line["hook_ms"] - 1) for line in timed)
        yield (
            f"The step time of `inspect` differs by at most {percent(worst)} from the hook's time"
            f" of the same steps, in {counted(len(timed), 'program')}."
        )
    both = [line for line in timed if line.get("hook_flops") and line["inspect_flops"]]
    if both:
        worst = max(abs(line["inspect_flops"] / line["hook_flops"] - 1) for line in both)
        yield (
            f"FLOPs differ by at most {percent(worst)} from the independent count, in"
            f" {counted(len(both), 'program')}."
        )


def _first(line: Line) -> Line:
    trial = first_trial(line)
    assert trial is not None
    return trial


def _share(trial: Line) -> float:
    """The verified gain as a fraction of the plain step of its trial."""
    return float(trial["verified_ms"] / trial["base_ms"])


def _hand_share(line: Line) -> float:
    return float(line["hand_ms"] / line["hand_base_ms"])


def foreign_table(lines: Sequence[Line]) -> Table:
    return Table(
        name="foreign",
        title="Stepscope against independent measurements",
        columns=(
            Column(title="program"),
            Column(title="step, hook", kind="number", unit="ms"),
            Column(title="inspect", kind="number", unit="ms"),
            Column(title="difference", kind="percent"),
            Column(title="FLOPs, independent", kind="rate", unit="FLOP"),
            Column(title="inspect", kind="rate", unit="FLOP"),
            Column(title="later steps against plain", kind="percent"),
            Column(title="full run", kind="number", unit="s more"),
            Column(title="first advice"),
            Column(title="predicted", kind="number", unit="ms"),
            Column(title="verified", kind="number", unit="ms"),
            Column(title="right"),
            Column(title="verified", kind="percent"),
            Column(title="by hand", kind="percent"),
        ),
        rows=tuple(_row(line) for line in lines),
        caption="`difference`: the step time of `inspect` against the hook's for the same steps."
        " `later steps against plain`: steps after the recording, while the page is written,"
        " against those of a plain run; `full run`: additional time of the program under"
        " `inspect`, including recording and page. Predicted gains have their range, verified ones"
        " the interval of their trial; `right`: within a third of the prediction, or inside its"
        " range. The last two columns are the verified gain and that of the same change applied"
        " with the program's own flag, as fractions of the step.",
    )


def trials_table(lines: Sequence[Line]) -> Table:
    """Every change that was tried, not only the first of each program."""
    return Table(
        name="foreign-trials",
        title="All changes that were tried",
        columns=(
            Column(title="program"),
            Column(title="change"),
            Column(title="predicted", kind="number", unit="ms"),
            Column(title="verified", kind="number", unit="ms"),
            Column(title="right"),
            Column(title="verified", kind="percent"),
        ),
        rows=tuple(
            (line["program"], *_trial_cells(one)) for line in lines for one in verified(line)
        ),
    )


def _row(line: Line) -> tuple[Cell, ...]:
    get = line.get
    ratio = None if "inspect_ms" not in line else line["inspect_ms"] / line["hook_ms"] - 1
    after = None
    if "after_ms" in line and "plain_after_ms" in line:
        after = line["after_ms"] / line["plain_after_ms"] - 1
    more = line["inspect_s"] - line["plain_s"] if {"inspect_s", "plain_s"} <= set(line) else None
    trial = first_trial(line)
    return (
        line["program"],
        get("hook_ms") or get("plain_ms"),
        get("inspect_ms"),
        ratio,
        get("hook_flops"),
        get("inspect_flops"),
        after,
        more,
        *(_advice_cells(line) if trial is None else _trial_cells(trial)),
        _hand_share(line) if "hand_ms" in line else None,
    )


def _advice_cells(line: Line) -> tuple[Cell, ...]:
    """Cells of a program for which no change was tried."""
    advised = line.get("advised")
    text = None if advised is None else f"{advised[0]}, not tried" if advised else "none"
    return (text, None, None, None, None)


def _trial_cells(trial: Line) -> tuple[Cell, ...]:
    return (
        trial["code"],
        _interval(trial, "predicted_ms", "range_ms"),
        _interval(trial, "verified_ms", "interval_ms"),
        _verdict(trial),
        _share(trial),
    )


def _interval(trial: Line, name: str, ends: str) -> Cell:
    value = float(trial[name])
    if trial[ends] is None:
        return value
    low, high = trial[ends]
    return Interval(value=value, low=low, high=high)


def _verdict(trial: Line) -> str:
    words = ["within a third"] if is_right(trial) else []
    if trial["range_ms"] is not None and in_range(trial):
        words.append("in range")
    return ", ".join(words) or "no"
