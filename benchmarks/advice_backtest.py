"""Predictions of `advise` compared with records of an H200 that were made for other questions.

    python benchmarks/advice_backtest.py
    python benchmarks/advice_backtest.py --results results --json

Two records that differ by one setting are a change and its result. The prediction uses only the
ledger of the first one; the realized gain is the ratio of both steps, of one session if possible:
the machine's host is shared, and its speed changes from day to day. Exits with 1 if fewer than
SHARE of the advised changes are right (a gain within a third of the prediction), or if fewer memory
peaks are predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from stepscope.advisor.advise.facts import account_facts, facts_of
from stepscope.analysis.advice.changes import afterwards, predictions
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.rule import WORTH
from stepscope.analysis.advice.rules.batch import with_batch_times
from stepscope.analysis.advice.timeline import gain_ms, wall_ms
from stepscope.analysis.limits import median_ms
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.memory import saved_bytes
from stepscope.records.schema import Record
from stepscope.views.memory import Account

SHARE = 0.8
FILES = ("profile_h200.jsonl", "formats_h200.jsonl", "h200.jsonl", "compile_h200.jsonl")
MEMORY = "memory_h200.jsonl"
NEAR = 0.03
"""A peak counts as predicted if the error is at most this fraction of it."""
_SHAPE = ("size", "table", "context", "batch", "mode")
_BLOCKS = 12
"""Number of identical blocks; any number gives the same result."""


class Pair(NamedTuple):
    change: str
    case: str
    step_ms: float
    predicted_ms: float
    realized_ms: float
    source: str

    @property
    def advised(self) -> bool:
        return self.predicted_ms >= WORTH * self.step_ms

    @property
    def right(self) -> bool:
        return self.realized_ms > 0 and self.off <= 1 / 3

    @property
    def off(self) -> float:
        """Relative error of the prediction."""
        if not self.predicted_ms:
            return float("inf") if self.realized_ms else 0.0
        return abs(self.realized_ms - self.predicted_ms) / abs(self.predicted_ms)


def changed(one: Record, **settings: str) -> tuple[object, ...]:
    """Key of a record's case, with some settings replaced."""
    config = {"compile": "no", "optimizer": "torch", "attention": "reference"} | one.config
    names = (*_SHAPE, "dtype", "attention", "compile", "optimizer")
    return tuple({**config, **settings}.get(name) for name in names)


def pairs(files: Sequence[tuple[str, Sequence[Record]]]) -> Iterator[Pair]:
    steps = {
        (name, changed(record)): record
        for name, records in files
        for record in records
        if record.status == "ok" and record.study in ("profile", "benchmark")
    }
    for record in (one for _, records in files for one in records if "profile" in one.attachments):
        facts = replace(facts_of(record), blocks=_BLOCKS)
        advised = {one.advice.code: one.advice.gain_ms for one in predictions(facts)}
        for code, settings in (
            ("tf32", {"dtype": "tf32"}),
            ("bfloat16", {"dtype": "bfloat16"}),
            ("compile-blocks", {"compile": "block"}),
        ):
            for name, _ in files:
                base = steps.get((name, changed(record)))
                other = steps.get((name, changed(record, **settings)))
                if base is None or other is None or base is other or code not in advised:
                    continue
                before, after = (median_ms(one, "step") for one in (base, other))
                assert before is not None
                assert after is not None
                realized = facts.step_ms * (1 - after / before)
                yield Pair(code, record.case, facts.step_ms, advised[code], realized, name)
        yield from _together(record, facts, files)
        yield from _interleaved(record, facts, advised, files)
        yield from _replayed(record, facts)
        yield from _larger(record, facts)


def _together(
    record: Record, facts: Facts, files: Sequence[tuple[str, Sequence[Record]]]
) -> Iterator[Pair]:
    """Pairs of another session: compiled blocks with fused attention and a fused optimizer."""
    codes = ["fused-attention", "compile-blocks"]
    settings = {"attention": "sdpa", "compile": "block"}
    if record.config["mode"] == "train-step":
        codes.append("fused-optimizer")
        settings["optimizer"] = "torch-fused"
    wanted = changed(record, **settings)
    if wanted == changed(record) or record.config.get("compile", "no") != "no":
        return
    for name, records in files:
        for other in records:
            after = median_ms(other, "step")
            if other.study == "benchmark" and changed(other) == wanted and after is not None:
                predicted = gain_ms(facts, afterwards(facts, codes))
                yield Pair(
                    "together", record.case, facts.step_ms, predicted, facts.step_ms - after, name
                )


def _interleaved(
    record: Record,
    facts: Facts,
    advised: dict[str, float],
    files: Sequence[tuple[str, Sequence[Record]]],
) -> Iterator[Pair]:
    """Eager and compiled steps of one process, from the study `compile`."""
    wanted, code = changed(record, compile="block"), "compile-blocks"
    for name, records in files:
        for other in records:
            if other.study != "compile" or changed(other) != wanted or code not in advised:
                continue
            before, after = (
                median_ms(other, "step", variant=side) for side in ("eager", "compiled")
            )
            if before is not None and after is not None:
                realized = facts.step_ms * (1 - after / before)
                yield Pair(code, record.case, facts.step_ms, advised[code], realized, name)


def _replayed(record: Record, facts: Facts) -> Iterator[Pair]:
    """Replay of the step's kernels as a CUDA graph: forward and backward, without the update."""
    replay, fixed = median_ms(record, "graph_replay"), ("optimizer",)
    marks = [median_ms(record, phase) or 0.0 for phase in ("forward", "loss", "backward")]
    step = sum(marks) if any(marks) else facts.step_ms
    if replay is None:
        return
    bare = replace(facts, phases=tuple(w for w in facts.phases if w.name not in fixed))
    graph = bare.with_work(lambda work: replace(work, launches=0.0))
    predicted = step * (1 - wall_ms(graph) / wall_ms(bare))
    yield Pair("graph", record.case, step, predicted, step - replay, "profile_h200.jsonl")


def _larger(record: Record, facts: Facts) -> Iterator[Pair]:
    """A larger batch, per sample."""
    batch, took = record.quantity("larger_batch"), median_ms(record, "larger_batch")
    if batch is None or took is None:
        return
    times = round(batch / record.config["batch"])
    predicted = gain_ms(facts, with_batch_times(facts, times))
    realized = facts.step_ms - took / times
    yield Pair(
        "larger-batch", record.case, facts.step_ms, predicted, realized, "profile_h200.jsonl"
    )


class Peaks(NamedTuple):
    change: str
    case: str
    peak_bytes: int
    predicted_bytes: int
    realized_bytes: int

    @property
    def off(self) -> float:
        """Error relative to the peak, since many changes do not affect it."""
        return abs(self.predicted_bytes - self.realized_bytes) / self.peak_bytes


def peaks(records: Sequence[Record]) -> Iterator[Peaks]:
    """Reduction of a step's peak memory by a change of dtype or attention."""
    by_case = {
        changed(one): one
        for one in records
        if one.status == "ok" and one.config["mode"] == "train-step"
    }
    for record in by_case.values():
        facts = memory_facts(record)
        for code, settings in (
            ("bfloat16", {"dtype": "bfloat16"}),
            ("fused-attention", {"attention": "sdpa"}),
        ):
            other = by_case.get(changed(record, **settings))
            if other is None or other is record:
                continue
            for one in predictions(facts):
                if one.advice.code == code:
                    after = int(other.quantity("peak_bytes") or 0)
                    yield Peaks(
                        code,
                        record.case,
                        facts.peak_bytes,
                        one.advice.gain_bytes,
                        facts.peak_bytes - after,
                    )


def memory_facts(record: Record) -> Facts:
    """Facts of a record of the study `memory`, which has no times: arbitrary ones are used."""
    ledger = Account(record)
    # The study lists the tensors of one block, and the bytes of all blocks by line.
    most = max(ledger.phases, key=lambda peak: saved_bytes(peak.lines))
    scores = sum(size for line, size in most.lines.items() if "softmax" in line)
    if record.config["dtype"] == "bfloat16":
        # Saved by the softmax in float32, and by the following matmul in half of that.
        scores += scores // 2
    fields = account_facts(ledger) | {"score_bytes": scores}
    naive = PhaseWork(name="forward", classes={"matmul": 1.0, "softmax": 1.0})
    return Facts(
        on_gpu=True,
        step_ms=1.0,
        dtype=record.config["dtype"],
        phases=(naive,),
        attention=(naive,),
        peak_bytes=int(record.quantity("peak_bytes") or 0),
        **fields,
        parameters=int(record.quantity("parameters") or 0),
        rates={"float32": 1.0, "bfloat16": 2.0},
    )


def table(rows: Sequence[Pair]) -> str:
    lines = [
        "| change | step | (ms) | predicted | realized | off by | |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | :--- |",
    ]
    for one in rows:
        verdict = "right" if one.right else "wrong" if one.advised else "not advised"
        lines.append(
            f"| {one.change} | {one.case} | {one.step_ms:.4g} | {one.predicted_ms:.4g} |"
            f" {one.realized_ms:.4g} | {one.off:.0%} | {verdict} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Pair]) -> dict[str, dict[str, int]]:
    """Per change: pairs, how many would be advised, how many of those are right, and how many were
    not advised although their gain is worth it."""
    return {
        code: {
            "pairs": len(own),
            "advised": sum(one.advised for one in own),
            "right": sum(one.advised and one.right for one in own),
            "missed": sum(
                not one.advised and one.realized_ms > 2 * WORTH * one.step_ms for one in own
            ),
        }
        for code in dict.fromkeys(one.change for one in rows)
        if (own := [one for one in rows if one.change == code])
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = [
        (name, read_records(args.results / name))
        for name in FILES
        if (args.results / name).exists()
    ]
    if not any(name == FILES[0] for name, _ in files):
        raise StepscopeError(f"{args.results} has no {FILES[0]}", "name another folder")
    rows = sorted(pairs(files), key=lambda one: (one.change, one.source))
    counted = summary(rows)
    memory = args.results / MEMORY
    lowered = list(peaks(read_records(memory))) if memory.exists() else []
    near = sum(one.off <= NEAR for one in lowered)
    if args.json:
        result = {"pairs": [one._asdict() for one in rows], "summary": counted}
        result |= {"peaks": [one._asdict() for one in lowered], "peaks_near": near}
        print(json.dumps(result))
    else:
        for one in lowered:
            print(
                f"peak, {one.change}, {one.case}: {one.predicted_bytes / 2**30:.2f} GiB predicted,"
                f" {one.realized_bytes / 2**30:.2f} realized of {one.peak_bytes / 2**30:.1f}"
            )
        print(table(rows))
        for code, numbers in counted.items():
            text = ", ".join(f"{value} {name}" for name, value in numbers.items())
            print(f"{code}: {text}")
    advised = [one for one in rows if one.advised]
    right = sum(one.right for one in advised)
    print(f"{right} of {len(advised)} advised changes are right", file=sys.stderr)
    print(f"{near} of {len(lowered)} peaks within {NEAR:.0%}", file=sys.stderr)
    enough = right >= SHARE * len(advised) and near >= SHARE * len(lowered)
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
