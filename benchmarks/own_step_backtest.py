"""Predictions of the current `advise` rules for steps whose changes were tried before.

    python benchmarks/own_step_backtest.py
    python benchmarks/own_step_backtest.py results/advise-slow_h200.jsonl --facts

A file of `advise --verify` has the recorded step, with the summary of its trace, its settings and
the machine's ceilings, and each trial. A rule can therefore be improved without the machine: the
prediction is repeated from the record, without corrections of past trials, and compared with the
result of the trial. `--facts` prints the input of the rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepscope.advisor.advise.cases import STUDY_NAME
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.outcome import Tried
from stepscope.analysis.advice.calibration import Verified, is_right
from stepscope.analysis.advice.changes import advise, afterwards, predictions
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record

RESULTS = Path("results")
FIRST = 3
"""Number of first pieces of advice of a step that count."""


class Repredicted(NamedTuple):
    code: str
    step_ms: float
    then_ms: float
    """Prediction at the time of the trial."""
    now_ms: float | None
    """Prediction of the current rules; None if they no longer name the change."""
    realized_ms: float
    verdict: str
    together: bool
    low_ms: float | None = None
    high_ms: float | None = None
    """Range predicted by the current rules; None for combined changes."""

    @property
    def inside(self) -> bool | None:
        """True if the realized gain is inside the range; None without a range."""
        if self.low_ms is None or self.high_ms is None:
            return None
        return self.low_ms <= self.realized_ms <= self.high_ms

    @property
    def right(self) -> bool:
        return self.now_ms is not None and is_right(
            Verified(
                device="",
                code=self.code,
                predicted_ms=self.now_ms,
                realized_ms=self.realized_ms,
                step_ms=self.step_ms,
            )
        )


def facts_in(records: Sequence[Record]) -> Facts:
    base = next((one for one in records if one.study != STUDY_NAME and one.status == "ok"), None)
    if base is None:
        raise StepscopeError("no step was recorded", "name a file of `advise --verify`")
    return facts_of(base)


def repredicted(records: Sequence[Record]) -> Iterator[Repredicted]:
    """Every trial that ran, in the order of the current advice."""
    facts = facts_in(records)
    order = [one.code for one in advise(facts)]
    trials = [Tried(one) for one in records if one.study == STUDY_NAME]
    position = {
        one.trial.code: order.index(one.trial.code) for one in trials if one.trial.code in order
    }
    for one in sorted(trials, key=lambda one: position.get(one.trial.code, len(order))):
        if one.realized_ms is None or one.predicted_ms is None or one.base_ms is None:
            continue
        codes = [advice.code for advice in one.trial.advice]
        predicted = _predicted(facts, codes)
        # As the same fraction of the step in its trial: the machine may have been slower then.
        scale = one.base_ms / facts.step_ms
        low, high = (None, None)
        if predicted is not None and len(codes) == 1:
            low, high = (scale * end for end in gain_range(codes[0], predicted, facts))
        yield Repredicted(
            one.trial.code,
            one.base_ms,
            one.predicted_ms,
            None if predicted is None else scale * predicted,
            one.realized_ms,
            one.verdict,
            len(codes) > 1,
            low,
            high,
        )


def _predicted(facts: Facts, codes: Sequence[str]) -> float | None:
    if len(codes) > 1:
        return gain_ms(facts, afterwards(facts, codes))
    return next(
        (one.advice.gain_ms for one in predictions(facts) if one.advice.code == codes[0]), None
    )


def table(rows: Sequence[Repredicted]) -> str:
    lines = [
        "| change | step (ms) | predicted then | now | realized | | range | verdict then |",
        "| :--- | ---: | ---: | ---: | ---: | :--- | :--- | :--- |",
    ]
    for one in rows:
        now = "–" if one.now_ms is None else f"{one.now_ms:.4g}"
        lines.append(
            f"| {one.code} | {one.step_ms:.4g} | {one.then_ms:.4g} | {now} |"
            f" {one.realized_ms:.4g} | {'right' if one.right else 'wrong'} | {_range(one)} |"
            f" {one.verdict} |"
        )
    return "\n".join(lines)


def _range(one: Repredicted) -> str:
    if one.inside is None:
        return "–"
    return f"{one.low_ms:.3g} to {one.high_ms:.3g}: {'inside' if one.inside else 'outside'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--facts", action="store_true")
    args = parser.parse_args()
    files = args.files or sorted(RESULTS.glob("advise-*.jsonl"))
    right = counted = inside = ranges = 0
    for file in files:
        records = read_records(file)
        rows = list(repredicted(records))
        print(f"\n{file}\n\n{table(rows)}")
        if args.facts:
            print(msgspec.json.format(msgspec.json.encode(facts_in(records)), indent=1).decode())
        first = [one for one in rows if not one.together][:FIRST]
        counted += len(first)
        right += sum(one.right for one in first)
        ranges += sum(one.inside is not None for one in rows)
        inside += sum(bool(one.inside) for one in rows)
    print(f"{right} of {counted} of the first {FIRST} changes of each are right", file=sys.stderr)
    print(f"{inside} of {ranges} gains are inside their ranges", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
