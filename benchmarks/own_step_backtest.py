"""What the rules of `advise` predict today for steps whose changes were tried before.

    python benchmarks/own_step_backtest.py
    python benchmarks/own_step_backtest.py results/advise-slow_h200.jsonl --facts

A file of `advise --verify` has the step as it was recorded, with the summary of its trace, its
settings and the machine's ceilings, and each trial. So a rule can be improved without the machine:
the prediction is made anew from the record, without corrections of past trials, and held against
what came out then. `--facts` prints what the rules see.
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
from stepscope.analysis.advice.changes import advise, afterwards, judged
from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.ranges import gain_range
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record

RESULTS = Path("results")
FIRST = 3
"""Pieces of advice of a step that count."""


class Again(NamedTuple):
    code: str
    step_ms: float
    then_ms: float
    """Predicted when it was tried."""
    now_ms: float | None
    """Predicted by the rules as they are; None where they do not name the change any more."""
    realised_ms: float
    verdict: str
    together: bool
    low_ms: float | None = None
    high_ms: float | None = None
    """The range that is predicted today; None for changes together."""

    @property
    def inside(self) -> bool | None:
        """Whether the realised gain lies in the range."""
        if self.low_ms is None or self.high_ms is None:
            return None
        return self.low_ms <= self.realised_ms <= self.high_ms

    @property
    def right(self) -> bool:
        return self.now_ms is not None and is_right(
            Verified(
                device="", code=self.code, predicted_ms=self.now_ms, realised_ms=self.realised_ms,
                step_ms=self.step_ms,
            )
        )  # fmt: skip


def facts_in(records: Sequence[Record]) -> Facts:
    base = next((one for one in records if one.study != STUDY_NAME and one.status == "ok"), None)
    if base is None:
        raise StepscopeError("no step was recorded", "name a file of `advise --verify`")
    return facts_of(base)


def again(records: Sequence[Record]) -> Iterator[Again]:
    """Every trial that ran, those that the rules name first today first."""
    facts = facts_in(records)
    order = [one.code for one in advise(facts)]
    trials = [Tried(one) for one in records if one.study == STUDY_NAME]
    place = {one.trial.code: order.index(one.trial.code) for one in trials
             if one.trial.code in order}  # fmt: skip
    for one in sorted(trials, key=lambda one: place.get(one.trial.code, len(order))):
        if one.realised_ms is None or one.predicted_ms is None or one.base_ms is None:
            continue
        codes = [advice.code for advice in one.trial.advice]
        predicted = _predicted(facts, codes)
        # As the same share of the step in its trial: the machine may have been slower then.
        scale = one.base_ms / facts.step_ms
        low, high = (None, None)
        if predicted is not None and len(codes) == 1:
            low, high = (scale * end for end in gain_range(codes[0], predicted, facts))
        yield Again(
            one.trial.code, one.base_ms, one.predicted_ms,
            None if predicted is None else scale * predicted,
            one.realised_ms, one.verdict, len(codes) > 1, low, high,
        )  # fmt: skip


def _predicted(facts: Facts, codes: Sequence[str]) -> float | None:
    if len(codes) > 1:
        return gain_ms(facts, afterwards(facts, codes))
    return next((one.advice.gain_ms for one in judged(facts) if one.advice.code == codes[0]), None)


def table(found: Sequence[Again]) -> str:
    lines = [
        "| change | step (ms) | predicted then | now | realised | | range | verdict then |",
        "| :--- | ---: | ---: | ---: | ---: | :--- | :--- | :--- |",
    ]
    for one in found:
        now = "–" if one.now_ms is None else f"{one.now_ms:.4g}"
        lines.append(
            f"| {one.code} | {one.step_ms:.4g} | {one.then_ms:.4g} | {now} |"
            f" {one.realised_ms:.4g} | {'right' if one.right else 'wrong'} | {_range(one)} |"
            f" {one.verdict} |"
        )
    return "\n".join(lines)


def _range(one: Again) -> str:
    if one.inside is None:
        return "–"
    return f"{one.low_ms:.3g} to {one.high_ms:.3g}: {'inside' if one.inside else 'outside'}"


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("files", type=Path, nargs="*")
    words.add_argument("--facts", action="store_true")
    given = words.parse_args()
    files = given.files or sorted(RESULTS.glob("advise-*.jsonl"))
    right = counted = inside = ranges = 0
    for file in files:
        records = read_records(file)
        found = list(again(records))
        print(f"\n{file}\n\n{table(found)}")
        if given.facts:
            print(msgspec.json.format(msgspec.json.encode(facts_in(records)), indent=1).decode())
        first = [one for one in found if not one.together][:FIRST]
        counted += len(first)
        right += sum(one.right for one in first)
        ranges += sum(one.inside is not None for one in found)
        inside += sum(bool(one.inside) for one in found)
    print(f"{right} of {counted} of the first {FIRST} changes of each are right", file=sys.stderr)
    print(f"{inside} of {ranges} gains lie in their ranges", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
