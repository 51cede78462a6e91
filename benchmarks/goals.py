"""Compare the goals of this project with measurements: reached, missed or inconclusive.

    python benchmarks/goals.py                       the committed records, results/*.jsonl
    python benchmarks/goals.py FILE ...              other records
    python benchmarks/goals.py --strict FILE ...     exit with 1 if a goal is missed

The goals are in benchmarks/goals.toml. A goal is reached or missed if the 95 % interval of its
value is on one side of the threshold, and inconclusive if the threshold is inside; a value without
an interval (one block of consecutive steps, a memory peak) decides alone. The margin is the
distance to the threshold as a fraction of it, positive if the goal is reached.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from paired_ratio import STUDY as AGAINST_TORCH
from paired_ratio import paired
from rehearsal_check import STUDY as REHEARSAL_CHECK
from rehearsal_check.view import Row, check_of
from step_race import STUDY as STEP
from step_race.rows import StepRace
from step_race.rows import races as step_races

from stepscope.errors import StepscopeError, UsageError, no_such_file
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record
from stepscope.records.stats import Ratio, Summary, summarize
from stepscope.report.blocks import Interval
from stepscope.report.format import number
from stepscope.studies.ddp import STUDY as DDP
from stepscope.studies.ddp.view import DDPResult, against_torch
from stepscope.studies.flash import STUDY as FLASH
from stepscope.studies.flash.races import Comparison, compared, geometric_mean, lowest, short_races
from stepscope.studies.flash.rows import OURS, AttentionRace
from stepscope.studies.flash.rows import races as attention_races

ROOT = Path(__file__).resolve().parent.parent
GOALS = Path(__file__).with_suffix(".toml")
REACHED, MISSED, INCONCLUSIVE, NOT_MEASURED = "reached", "missed", "inconclusive", "not measured"


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A threshold for one measure of one or several cases; goals.toml explains the fields."""

    measure: str
    case: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    aim: bool = False
    device: str = ""
    side: str = "stepscope"
    baseline: str = ""
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"measure is {self.measure}, not one of {', '.join(MEASURES)}")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.measure} needs either at_least or at_most")

    @property
    def threshold(self) -> float:
        return self.at_least if self.at_least is not None else self.at_most or 0.0

    def margin(self, value: float) -> float:
        distance = value / self.threshold - 1
        return distance if self.at_least is not None else -distance


class Value(NamedTuple):
    """The measurement for one case of a goal, with its 95 % interval."""

    case: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


class Judged(NamedTuple):
    goal: Goal
    measured: Value

    @property
    def outcome(self) -> str:
        value = self.measured.value
        if value is None:
            return NOT_MEASURED
        ends = [value if end is None else end for end in (self.measured.low, self.measured.high)]
        within = [self.goal.margin(end) >= 0 for end in ends]
        return REACHED if all(within) else INCONCLUSIVE if any(within) else MISSED


class Evidence(NamedTuple):
    """Records, and the lines of benchmarks that write plain JSON."""

    records: tuple[Record, ...]
    lines: tuple[dict[str, Any], ...]

    def on(self, device: str) -> Evidence:
        return Evidence(
            tuple(r for r in self.records if device in (r.environment.device_name or "")),
            tuple(line for line in self.lines if device in line.get("device", "")),
        )

    def of(self, study: str) -> list[Record]:
        return [r for r in self.records if r.study == study and r.status == "ok"]


def _value(case: str, measured: Ratio | Summary | Interval | float | None) -> Value:
    if measured is None or isinstance(measured, float):
        return Value(case, measured)
    middle = measured.median if isinstance(measured, Summary) else measured.value
    return Value(case, middle, measured.low, measured.high)


def _step_values(
    goal: Goal, evidence: Evidence, measured: Callable[[StepRace], Value]
) -> Iterator[Value]:
    by_name = {race.name: race for race in step_races(STEP.results(evidence.of("step-race")))}
    for name in goal.case:
        case = name if goal.side == "stepscope" else f"{name} {goal.side}"
        value = measured(by_name[name]) if name in by_name else Value(case)
        yield value._replace(case=case)


def _step_speedup(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    def speedup(race: StepRace) -> Value:
        lead = race.lead(goal.side)
        return _value("", race.ratio(goal.side) if lead is None else lead.ratio or lead.value)

    return _step_values(goal, evidence, speedup)


def _step_ms(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    return _step_values(goal, evidence, lambda race: _milliseconds(race, goal.side))


def _milliseconds(race: StepRace, side: str) -> Value:
    """Median of the blocks of consecutive steps; without blocks, the time shown on the page."""
    blocks = race.blocks(side)
    return _value("", summarize(blocks) if blocks else race.step_ms(side))


def _step_mfu(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    def utilization(race: StepRace) -> Value:
        share, took = race.mfu(goal.side), _milliseconds(race, goal.side)
        if share is None or took.value is None or took.low is None or took.high is None:
            return Value("", share)
        return Value("", share, share * took.value / took.high, share * took.value / took.low)

    return _step_values(goal, evidence, utilization)


def _step_memory(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    def share(race: StepRace) -> Value:
        baseline, own = race.peak("baseline"), race.peak(goal.side)
        return Value("", own / baseline if own and baseline else None)

    return _step_values(goal, evidence, share)


def _raced(evidence: Evidence) -> list[AttentionRace]:
    return attention_races(FLASH.results(evidence.of("flash")))


def _attention_speedup(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    ran = _raced(evidence)
    ratios = {
        pair.race.case.sizes: pair.ratio
        for pair in compared(Comparison(goal.baseline, goal.case, goal.dtype), ran)
    }
    for sizes in goal.case:
        yield _value(f"{goal.baseline} {sizes}", ratios.get(sizes))


def _attention_mean_speedup(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    """The geometric mean; not over a part of the shapes, which would be another quantity."""
    ran = _raced(evidence)
    pairs = compared(Comparison(goal.baseline, goal.case, goal.dtype), ran)
    complete = len(pairs) == len(goal.case)
    yield _value(
        f"{goal.baseline}, {len(goal.case)} shapes", geometric_mean(pairs) if complete else None
    )


def _attention_ms(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    ran = {race.case.sizes: race for race in _raced(evidence) if race.case.dtype == goal.dtype}
    for sizes in goal.case:
        yield _value(sizes, ran[sizes].times(OURS) if sizes in ran else None)


def _attention_short_speedup(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    ran = _raced(evidence)
    for ours in goal.case:
        short = short_races(ran, ours)
        least = lowest(short) if short else None
        shape = f" {least.race.case.sizes}" if least else ""
        yield _value(f"{ours}{shape}", least.ratio if least else None)


def _ddp_step_ratio(_goal: Goal, evidence: Evidence) -> Iterator[Value]:
    for result in DDP.results(evidence.of("ddp")):
        strategies = DDPResult(*result)
        if (ratio := against_torch(strategies)) is not None:
            yield _value(strategies.title, ratio[1])


def _wrapper_step_ratio(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    for record in evidence.of(AGAINST_TORCH):
        config = record.config
        if config["baseline"] in goal.case:
            case = f"{config['stepscope']}, context {config['context']}, {config['ranks']} ranks"
            yield _value(case, paired(record).wall)


def _rank_fault_seconds(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    """The slowest trial; one that named another rank or none counts as infinite."""
    for fault in goal.case:
        trials = [line for line in evidence.lines if line.get("fault") == fault]
        times = [trial["seconds"] if trial["named"] else math.inf for trial in trials]
        yield Value(f"a rank {fault}", max(times, default=None))


def _rehearsal_error(_goal: Goal, evidence: Evidence) -> Iterator[Value]:
    for result in REHEARSAL_CHECK.results(evidence.of("rehearsal-check")):
        if (check := check_of(*result)) is not None:
            yield _error(check.title, check.comparison.worst)


def _error(case: str, row: Row) -> Value:
    ends = [row.predicted_ms / ms - 1 for ms in (row.measured.low, row.measured.high)]
    low = 0.0 if min(ends) < 0 < max(ends) else min(map(abs, ends))
    return Value(case, abs(row.error), low, max(map(abs, ends)))


def _recording_cost(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    for line in evidence.lines:
        took = line.get("ms")
        for name in goal.case:
            if isinstance(took, dict) and name in took:
                pairs = zip(took[name], took["plain"], strict=False)
                yield _value(line["case"], summarize([ms / plain for ms, plain in pairs]))


def _command_seconds(goal: Goal, evidence: Evidence) -> Iterator[Value]:
    for command in goal.case:
        times = [line["seconds"] for line in evidence.lines if line.get("command") == command]
        yield Value(command, times[-1] if times else None)


MEASURES: dict[str, Callable[[Goal, Evidence], Iterator[Value]]] = {
    "step-speedup": _step_speedup,
    "step-ms": _step_ms,
    "step-mfu": _step_mfu,
    "step-memory": _step_memory,
    "attention-speedup": _attention_speedup,
    "attention-mean-speedup": _attention_mean_speedup,
    "attention-ms": _attention_ms,
    "attention-short-speedup": _attention_short_speedup,
    "ddp-step-ratio": _ddp_step_ratio,
    "wrapper-step-ratio": _wrapper_step_ratio,
    "rank-fault-seconds": _rank_fault_seconds,
    "rehearsal-error": _rehearsal_error,
    "recording-cost": _recording_cost,
    "command-seconds": _command_seconds,
}


def read_goals(path: Path = GOALS) -> list[Goal]:
    try:
        return msgspec.convert(tomllib.loads(path.read_text())["goal"], list[Goal])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, KeyError) as error:
        raise UsageError(f"{path} has an invalid goal: {error}", "correct the file") from error


def read_evidence(paths: Iterable[Path]) -> Evidence:
    records: list[Record] = []
    lines: list[dict[str, Any]] = []
    for path in paths:
        if not path.is_file():
            raise no_such_file(path)
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        if '"study"' in first:
            records += read_records(path)
        else:
            lines += _plain_lines(path)
    return Evidence(tuple(records), tuple(lines))


def _plain_lines(path: Path) -> Iterator[dict[str, Any]]:
    for index, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}, line {index} is not a record: {error}") from error


def judge(goals: Iterable[Goal], evidence: Evidence) -> list[Judged]:
    judged = []
    for goal in goals:
        values = list(MEASURES[goal.measure](goal, evidence.on(goal.device)))
        judged += [Judged(goal, value) for value in values or [Value("any case")]]
    return judged


def print_judged(judged: Sequence[Judged]) -> None:
    rows = [("outcome", "goal", "case", "measured", "95 % interval", "wanted", "margin")]
    for goal, measured in judged:
        bound = "≥" if goal.at_least is not None else "≤"
        ends = (measured.low, measured.high)
        rows.append(
            (
                Judged(goal, measured).outcome,
                goal.measure + (" (aim)" if goal.aim else ""),
                measured.case,
                "" if measured.value is None else number(measured.value, 4),
                "" if None in ends else f"[{number(ends[0], 4)}, {number(ends[1], 4)}]",
                f"{bound} {goal.threshold:g}",
                "" if measured.value is None else f"{goal.margin(measured.value):+.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip())
    outcomes = [one.outcome for one in judged]
    kinds = (REACHED, MISSED, INCONCLUSIVE, NOT_MEASURED)
    print(", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("records", nargs="*", type=Path, help="JSON Lines (results/*.jsonl)")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if a goal that is not an aim is missed"
    )
    options = parser.parse_args()
    try:
        evidence = read_evidence(options.records or sorted((ROOT / "results").glob("*.jsonl")))
        judged = judge(read_goals(), evidence)
    except StepscopeError as error:
        print(error, file=sys.stderr)
        return 2
    print_judged(judged)
    missed = any(one.outcome == MISSED and not one.goal.aim for one in judged)
    return 1 if options.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
