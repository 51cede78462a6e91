"""The order of the trials of `advise --verify`, against the best combination of changes.

    python benchmarks/advice_search.py                      recorded programs; needs no GPU
    python benchmarks/advice_search.py --measure            programs of foreign.py; on a GPU
    python benchmarks/advice_search.py --measure --only hf_llama nano_gpt --resume
    python benchmarks/advice_search.py --show results/advice-search_h200.jsonl

Without `--measure` the search is repeated for the steps in `results/advise-*.jsonl`: its first
trial and the best of the combinations that were tried at the time.

With `--measure` each program is recorded once. Then all consistent combinations of the changes that
are predicted to gain 3 % or more, alone or in the best combination, run once for one block of
`BLOCK_S` seconds each, at most `MOST` per program, the best predictions first. One line of JSON per
program is written when it is finished. From these times it follows what the search finds with each
number of trials; no program runs for that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "scripts"))

from foreign import ENDLESS, PROGRAMS, Program  # noqa: E402

from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS  # noqa: E402
from stepscope.advisor.advise.interleaved import (  # noqa: E402
    ScriptEndedError,
    TrialProcess,
)
from stepscope.advisor.advise.outcome import Tried, best_of  # noqa: E402
from stepscope.advisor.advise.step import RecordedStep  # noqa: E402
from stepscope.advisor.inspect.order import Order  # noqa: E402
from stepscope.advisor.inspect.recording import record_script  # noqa: E402
from stepscope.analysis.advice.plan import Plan, Result  # noqa: E402
from stepscope.analysis.advice.rule import WORTH, Advice  # noqa: E402
from stepscope.analysis.advice.search import Combination, Space  # noqa: E402
from stepscope.records.jsonl import read_records  # noqa: E402
from stepscope.records.stats import Ratio  # noqa: E402

BLOCK_S = 3.0
MOST = 32
TRIALS_COUNTED = 5
WITHIN, FIRST_WITHIN = 0.05, 0.15
"""Accepted distances from the best combination: of the search, and of its first trial."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One combination, run once."""

    advice: tuple[Advice, ...]
    predicted_ms: float
    step_ms: float | None = None
    failed: str = ""
    missing: tuple[str, ...] = ()
    took_s: float = 0.0

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(one.code for one in self.advice)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A program with all of its combinations: one line of the record."""

    program: str
    device: str
    step_ms: float
    """Of the unchanged program, as recorded."""
    base_ms: float | None
    """Of the unchanged program in a block."""
    record: Any
    blocks: tuple[Block, ...]

    def space(self) -> Space:
        from stepscope.records.schema import Record

        return RecordedStep(msgspec.convert(self.record, Record)).space()


class Found(NamedTuple):
    """What the search finds in a program."""

    program: str
    best: Block
    found: tuple[tuple[frozenset[str], float | None], ...]
    """The combination of each trial, and the time of the best one so far over the best of all."""


def gaining(space: Space) -> set[str]:
    """Return the changes that are predicted to gain 3 % or more."""
    best = space.best()
    chosen = set() if best is None else set(best.codes)
    single = (space.chain((one,)) for one in space.reachable)
    limit = (1 - WORTH) * space.facts.step_ms
    return chosen | {code for one in single if one.step_ms <= limit for code in one.codes}


def combinations(space: Space) -> list[Combination]:
    """Return the combinations to run, best prediction first."""
    wanted = gaining(space)
    unwanted = {entry.code for entry in space.entries()} - wanted
    found = space.combinations(without=unwanted, every=True)
    by_codes = {one.codes: one for one in found if one.advice}
    return sorted(by_codes.values(), key=lambda one: one.step_ms)[:MOST]


def search(measured: Measured) -> Found | None:
    """Repeat the search with the measured times in place of trials. A combination that was not
    run counts as one that cannot be made."""
    known = {one.codes: one for one in measured.blocks}
    times = {one.codes: one.step_ms for one in measured.blocks if one.step_ms is not None}
    if not times or measured.base_ms is None:
        return None
    best = min(times.values())
    space, results, found = measured.space(), [], []
    fastest = measured.base_ms
    while len(results) < TRIALS_COUNTED:
        planned = Plan(space, results).next()
        if planned is None:
            break
        codes = planned.combination.codes
        ms, block = times.get(codes), known.get(codes)
        ratio = None if ms is None else ms / measured.base_ms
        refuted = frozenset() if block is None else _refuted(block)
        interval = None if ratio is None else Ratio(value=ratio, low=ratio, high=ratio, level=0.99)
        results.append(Result(planned.combination.advice, interval, ms is not None, refuted))
        fastest = min(fastest, ms or fastest)
        found.append((codes, fastest / best))
    block = next(one for one in measured.blocks if one.step_ms == best)
    return Found(measured.program, block, tuple(found))


def _refuted(block: Block) -> frozenset[str]:
    return frozenset(
        one.code
        for one in block.advice
        for name in block.missing
        if name in one.setting or name in one.setting.values()
    )


def measure(program: Program, args: argparse.Namespace) -> Measured:
    from stepscope.studies.runner.runner import Runner

    words = ("--scale", args.scale, "--device", args.device, "--steps", str(ENDLESS))
    order = Order(
        target=str(program.path), words=words, warmup=5, timed=10, traced=3, memory=True, stop=True
    )
    base = record_script(order)
    with Runner(base.environment.device_kind, 600.0) as runner:
        ceilings = runner.ceilings(_Quiet())
    base = msgspec.structs.replace(base, ceilings=ceilings)
    space = RecordedStep(base).space()
    order = msgspec.structs.replace(order, timed=1, traced=1, memory=False, stop=False)
    step_ms, *_ = _block(order, {}, space.facts.step_ms)
    blocks = []
    for one in combinations(space):
        settings = {name: value for a in one.advice for name, value in a.setting.items()}
        begun = time.monotonic()
        ms, failed, missing = _block(order, settings, one.step_ms)
        took = time.monotonic() - begun
        print(f"  {'+'.join(sorted(one.codes))}: {ms or failed} ({took:.0f} s)", flush=True)
        blocks.append(
            Block(
                advice=one.advice,
                predicted_ms=one.step_ms,
                step_ms=ms,
                failed=failed,
                missing=missing,
                took_s=took,
            )
        )
    return Measured(
        program=program.name,
        device=base.environment.device_name,
        step_ms=space.facts.step_ms,
        base_ms=step_ms,
        record=msgspec.to_builtins(base),
        blocks=tuple(blocks),
    )


class _Quiet:
    def calibrating(self, progress: object) -> None: ...


def _block(
    order: Order, settings: dict[str, str], step_ms: float
) -> tuple[float | None, str, tuple[str, ...]]:
    """Return the step time of one block, or why there is none, and what could not be changed."""
    try:
        with TrialProcess(order, settings) as run:
            ready = run.ready()
            if ready.missing:
                return (
                    None,
                    "; ".join(f"{k}: {v}" for k, v in ready.missing.items()),
                    tuple(ready.missing),
                )
            each = min(step_ms, ready.step_ms) or 1.0
            return run.turn(max(3, round(1e3 * BLOCK_S / each))).step_ms, "", ()
    except ScriptEndedError as ended:
        return None, str(ended), ()


def from_results(folder: Path) -> Iterator[list[str]]:
    """Yield, for each recorded program: its first trial, what was best at the time, and what is
    predicted for that."""
    for path in sorted(folder.glob("advise-*.jsonl")):
        records = read_records(path)
        base = next(one for one in records if one.study != TRIALS)
        tried = [Tried(one) for one in records if one.study == TRIALS]
        before = time.perf_counter()
        space = RecordedStep(base).space()
        first = Plan(space, []).next()
        took_ms = 1e3 * (time.perf_counter() - before)
        best = best_of(tried)
        named = None if best is None else space.chain(best.trial.advice)
        measured = {frozenset(a.code for a in one.trial.advice): one.ratio for one in tried}
        chosen = None if first is None else first.combination
        ratio = None if chosen is None else measured.get(chosen.codes)
        yield [
            path.stem,
            "–" if chosen is None else " + ".join(sorted(chosen.codes)),
            "–" if chosen is None else f"{chosen.step_ms / space.facts.step_ms:.3f}",
            "–" if ratio is None else f"{ratio.value:.3f}",
            "–" if best is None else best.trial.code.replace("+", " + "),
            "–" if named is None else f"{named.step_ms / space.facts.step_ms:.3f}",
            "–" if best is None or best.ratio is None else f"{best.ratio.value:.3f}",
            f"{took_ms:.0f}",
        ]


def show(found: Sequence[Found]) -> Iterator[str]:
    for one in found:
        yield f"{one.program}: best {'+'.join(sorted(one.best.codes))}, {one.best.step_ms:.4g} ms"
        for number, (codes, over) in enumerate(one.found, start=1):
            yield f"  {number}. {'+'.join(sorted(codes))}: {over - 1:+.1%} from the best"
    last = [one.found[-1][1] for one in found if one.found]
    first = [one.found[0][1] for one in found if one.found]
    yield (
        f"within {WITHIN:.0%} after {TRIALS_COUNTED} trials: {_count(last, WITHIN)} of {len(last)};"
        f" first trial within {FIRST_WITHIN:.0%}: {_count(first, FIRST_WITHIN)} of {len(first)}"
    )


def _count(ratios: Sequence[float | None], within: float) -> int:
    return sum(one is not None and one <= 1 + within for one in ratios)


def read(path: Path) -> dict[str, Measured]:
    if not path.exists():
        return {}
    lines = (msgspec.json.decode(line, type=Measured) for line in path.read_bytes().splitlines())
    return {one.program: one for one in lines}


def write(path: Path, measured: Mapping[str, Measured]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in measured.values()))
    partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in PROGRAMS])
    parser.add_argument("--resume", action="store_true", help="skip programs that have a line")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", default="gpu", choices=["cpu", "gpu"])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "advice-search_h200.jsonl")
    parser.add_argument("--show", type=Path, help="print what the search finds in a record")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.measure and args.show is None:
        rows = list(from_results(ROOT / "results"))
        names = ["record", "first trial", "predicted", "measured", "best recorded", "predicted",
                 "measured", "ms"]  # fmt: skip
        if args.json:
            print(json.dumps([dict(zip((*names[:5], "best predicted", "best measured", "ms"), row,
                                       strict=True)) for row in rows]))  # fmt: skip
            return 0
        print("\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * 8, *rows)))
        return 0
    measured = read(args.show or args.out) if args.show or args.resume else {}
    for program in PROGRAMS if args.measure else ():
        wanted = program.name in args.only if args.only else program.on_gpu
        if wanted and program.ranks == 1 and not (args.resume and program.name in measured):
            print(program.name, flush=True)
            measured[program.name] = measure(program, args)
            write(args.out, measured)
    found = [one for one in map(search, measured.values()) if one is not None]
    print("\n".join(show(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
