"""The order of the trials of `advise --verify`, against the best combination of changes.

    python benchmarks/advice_search.py                      recorded programs; needs no GPU
    python benchmarks/advice_search.py --measure            programs of foreign.py; on a GPU
    python benchmarks/advice_search.py --measure --most 8 --minutes 5       first of each program
    python benchmarks/advice_search.py --measure --resume --only hf_llama nano_gpt
    python benchmarks/advice_search.py --show results/advice-search_h200.jsonl

Without `--measure` the search is repeated for the steps in `results/advise-*.jsonl`: its first
trial and the best of the combinations that were tried at the time.

With `--measure` each program is recorded once. Then all consistent combinations of the changes that
are predicted to gain 3 % or more, alone or in the best combination, run once for one block of
`BLOCK_S` seconds, at most `MOST` per program; a block ends after `FIRST_S` seconds if its
combination is far from the best one. The trials of the search come first. From these times it
follows what the search finds with each number of trials; no program runs for that.

The record has one line of JSON per program and is written after each recording and each block, so
that `--resume` continues with the next one. After `--minutes` nothing else starts; recordings that
are running then end as usual.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "scripts"))

from advice_blocks import Blocks, Timed, Wanted, recorded  # noqa: E402
from foreign import ENDLESS, PROGRAMS, Program  # noqa: E402

from stepscope.advisor.advise.cases import OF_SCRIPTS  # noqa: E402
from stepscope.advisor.advise.cases import STUDY_NAME as TRIALS  # noqa: E402
from stepscope.advisor.advise.facts import facts_of  # noqa: E402
from stepscope.advisor.advise.outcome import Tried, best_of  # noqa: E402
from stepscope.advisor.advise.step import RecordedStep  # noqa: E402
from stepscope.advisor.inspect.order import Order  # noqa: E402
from stepscope.analysis.advice.plan import Plan, Result  # noqa: E402
from stepscope.analysis.advice.rule import WORTH, Advice  # noqa: E402
from stepscope.analysis.advice.search import Combination, Space  # noqa: E402
from stepscope.errors import StepscopeError  # noqa: E402
from stepscope.records.jsonl import read_records  # noqa: E402
from stepscope.records.schema import Record  # noqa: E402
from stepscope.records.stats import Ratio  # noqa: E402
from stepscope.runner.runner import Runner  # noqa: E402

RECORD = ROOT / "results" / "advice-search_h200.jsonl"
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
    timed_s: float = 0.0
    """Of timed steps."""
    took_s: float = 0.0
    """Since the start of the process; several start beside each other."""

    @property
    def codes(self) -> frozenset[str]:
        return frozenset(one.code for one in self.advice)


class Measured(msgspec.Struct, kw_only=True, dict=True):
    """A program with all of its combinations: one line of the record."""

    program: str
    device: str
    step_ms: float
    """Of the unchanged program, as recorded."""
    base_ms: float | None = None
    """Of the unchanged program in a block."""
    record: Any
    lacks: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    left: int = 0
    """Combinations that were not run yet."""

    @cached_property
    def space(self) -> Space:
        """Without the corrections that this machine has learnt from other programs."""
        return Space(facts_of(msgspec.convert(self.record, Record), lacks=self.lacks), OF_SCRIPTS)

    @cached_property
    def combinations(self) -> list[Combination]:
        return combinations(self.space)


class Found(NamedTuple):
    """What the search finds in a program."""

    program: str
    best: frozenset[str]
    best_ms: float
    base_ms: float
    found: tuple[tuple[frozenset[str], float], ...]
    """The combination of each trial, and the time of the best one so far over the best of all."""
    left: int
    """Combinations that were not run."""


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
    """Repeat the search with the measured times in place of trials, as far as these go."""
    times = {one.codes: one.step_ms for one in measured.blocks if one.step_ms is not None}
    if not times or measured.base_ms is None:
        return None
    unchanged: frozenset[str] = frozenset()
    times[unchanged] = measured.base_ms
    best, fastest, found = min(times, key=times.__getitem__), measured.base_ms, []
    for result in _results(measured):
        fastest = min(fastest, times.get(result.codes, fastest))
        found.append((result.codes, fastest / times[best]))
    return Found(measured.program, best, times[best], measured.base_ms, tuple(found), measured.left)


def _results(measured: Measured) -> list[Result]:
    """Return what the search gets from its trials, up to the first one that was not run."""
    assert measured.base_ms is not None
    known = {one.codes: one for one in measured.blocks}
    results: list[Result] = []
    while len(results) < TRIALS_COUNTED:
        planned = Plan(measured.space, results).next()
        block = None if planned is None else known.get(planned.combination.codes)
        if planned is None or block is None:
            break
        ratio = None
        if block.step_ms is not None:
            value = block.step_ms / measured.base_ms
            ratio = Ratio(value=value, low=value, high=value, level=0.99)
        results.append(
            Result(planned.combination.advice, ratio, ratio is not None, _refuted(block))
        )
    return results


def wanted(measured: Measured) -> list[Combination]:
    """Return the combinations that were not run yet: first those of the search, then by their
    predictions."""
    known = {one.codes for one in measured.blocks}
    if measured.base_ms is None:
        planned = [Plan(measured.space, []).next()]
    else:
        results = _results(measured)
        open_trials = Plan(measured.space, results).trials()
        planned = list(open_trials) if len(results) < TRIALS_COUNTED else []
    by_codes = {one.combination.codes: one.combination for one in planned if one is not None}
    by_codes |= {one.codes: one for one in measured.combinations if one.codes not in by_codes}
    return [one for codes, one in by_codes.items() if codes not in known]


def _refuted(block: Block) -> frozenset[str]:
    return frozenset(
        one.code
        for one in block.advice
        for name in block.missing
        if name in one.setting or name in one.setting.values()
    )


class Measurement:
    """All programs, each with its combinations, one after the other."""

    def __init__(self, measured: dict[str, Measured], args: argparse.Namespace) -> None:
        self.measured, self._args = measured, args
        self._begun = time.monotonic()
        self._until = self._begun + 60 * args.minutes
        self._names = [one.name for one in _programs(args)]
        self._orders = {one.name: _order(one, args) for one in _programs(args)}

    def run(self) -> None:
        # Several programs compile at a time.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        missing = {name: o for name, o in self._orders.items() if name not in self.measured}
        self._record(missing)
        memory = 0.8 * torch_memory(self._args.device)
        Blocks(self._next, self._done, self._similar, self._best_ms,
               beside=self._args.beside, memory_bytes=memory, until=self._until).run()  # fmt: skip

    def _record(self, orders: Mapping[str, Order]) -> None:
        if not orders:
            return
        with Runner(self._args.device, 600.0) as runner:
            ceilings, lacks = runner.ceilings(_Quiet()), tuple(runner.lacks)
        self._log("ceilings")
        for name, record in recorded(orders, beside=self._args.beside, until=self._until):
            if isinstance(record, StepscopeError):
                self._log(f"{name}: not recorded: {record}")
                continue
            record = msgspec.structs.replace(record, ceilings=ceilings)
            measured = Measured(
                program=name,
                device=record.environment.device_name,
                step_ms=0.0,
                record=msgspec.to_builtins(record),
                lacks=lacks,
            )
            measured.step_ms = measured.space.facts.step_ms
            self.measured[name] = measured
            self._left(measured)
            self._log(f"{name}: recorded, {measured.step_ms:.4g} ms, {measured.left} combinations")
            self._write()

    def _log(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:5.0f} s  {text}", flush=True)

    def _write(self) -> None:
        order = [one.name for one in PROGRAMS]
        write(self._args.out, sorted(self.measured.values(), key=lambda m: order.index(m.program)))

    def _left(self, measured: Measured) -> list[Wanted]:
        """Return what is left to time of a program, the unchanged program first."""
        facts = measured.space.facts
        unchanged: dict[str, str] = {}
        found = [(unchanged, facts.step_ms)] if measured.base_ms is None else []
        found += [(_settings(one), one.step_ms) for one in wanted(measured)]
        measured.left = len(found)
        order = msgspec.structs.replace(
            self._orders[measured.program], timed=1, traced=1, memory=False, stop=False
        )
        return [
            Wanted(measured.program, order, settings, ms, facts.peak_bytes)
            for settings, ms in found
        ]

    def _next(self, starting: Sequence[Wanted]) -> Wanted | None:
        for name in self._names:
            measured = self.measured.get(name)
            if measured is None or len(measured.blocks) >= self._args.most:
                continue
            for one in self._left(measured):
                if not any(other.covers(one) for other in starting):
                    return one
        return None

    def _similar(self, started: Wanted) -> list[Wanted]:
        measured = self.measured[started.program]
        left = [one for one in self._left(measured) if started.covers(one)]
        return left[: max(0, self._args.most - len(measured.blocks))]

    def _best_ms(self, program: str) -> float | None:
        times = [one.step_ms for one in self.measured[program].blocks if one.step_ms is not None]
        return min(times, default=None)

    def _done(self, wanted_: Wanted, timed: Timed, took_s: float) -> None:
        measured = self.measured[wanted_.program]
        name = _named(frozenset())
        if not wanted_.settings:
            measured.base_ms = timed.step_ms
            if timed.step_ms is None:
                self._names.remove(wanted_.program)
        else:
            (one,) = (c for c in wanted(measured) if _settings(c) == wanted_.settings)
            name = _named(one.codes)
            block = Block(
                advice=one.advice,
                predicted_ms=one.step_ms,
                step_ms=timed.step_ms,
                timed_s=timed.seconds,
                failed=timed.failed,
                missing=timed.missing,
                took_s=took_s,
            )
            measured.blocks = (*measured.blocks, block)
        self._left(measured)
        self._write()
        ms = timed.failed if timed.step_ms is None else f"{timed.step_ms:.4g} ms"
        self._log(f"{wanted_.program}: {name}: {ms} ({wanted_.step_ms:.4g} predicted,"
                  f" {timed.seconds:.1f} of {took_s:.0f} s); {measured.left} left")  # fmt: skip


def _settings(combination: Combination) -> dict[str, str]:
    return {name: value for one in combination.advice for name, value in one.setting.items()}


def _programs(args: argparse.Namespace) -> list[Program]:
    if args.only:
        return [next(one for one in PROGRAMS if one.name == name) for name in args.only]
    return [one for one in PROGRAMS if one.on_gpu and one.ranks == 1]


def _order(program: Program, args: argparse.Namespace) -> Order:
    words = ("--scale", args.scale, "--device", args.device, "--steps", str(ENDLESS))
    return Order(
        target=str(program.path), words=words, warmup=5, timed=10, traced=3, memory=True, stop=True
    )


def torch_memory(device: str) -> float:
    """Return the bytes of the GPU, or of this machine."""
    import torch

    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class _Quiet:
    def calibrating(self, progress: object) -> None: ...


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
        left = f"; {one.left} combinations were not run" if one.left else ""
        yield (
            f"{one.program}: best {_named(one.best)}, {one.best_ms:.4g} of"
            f" {one.base_ms:.4g} ms{left}"
        )
        for number, (codes, over) in enumerate(one.found, start=1):
            ms = over * one.best_ms
            yield f"  {number}. {_named(codes)}: {ms:.4g} ms, {over - 1:+.1%} from the best"
    for which, some in (
        ("all programs", found),
        ("programs with all combinations", [one for one in found if not one.left]),
    ):
        last = [one.found[-1][1] for one in some if one.found]
        first = [one.found[0][1] for one in some if one.found]
        yield (
            f"{which}: within {WITHIN:.0%} after at most {TRIALS_COUNTED} trials:"
            f" {_count(last, WITHIN)} of {len(last)}; first trial within {FIRST_WITHIN:.0%}:"
            f" {_count(first, FIRST_WITHIN)} of {len(first)}"
        )


def _named(codes: frozenset[str]) -> str:
    return "+".join(sorted(codes)) or "unchanged"


def _count(ratios: Sequence[float], within: float) -> int:
    return sum(one <= 1 + within for one in ratios)


def read(path: Path) -> dict[str, Measured]:
    if not path.exists():
        return {}
    lines = (msgspec.json.decode(line, type=Measured) for line in path.read_bytes().splitlines())
    return {one.program: one for one in lines}


def write(path: Path, measured: Iterable[Measured]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in measured))
    partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], choices=[one.name for one in PROGRAMS])
    parser.add_argument("--resume", action="store_true", help="continue with --out, or results")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it")
    parser.add_argument(
        "--most", type=int, default=MOST, help="combinations of a program to run this time, at most"
    )
    parser.add_argument("--beside", type=int, default=6, help="programs that start at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", default="gpu", choices=["cpu", "gpu"])
    parser.add_argument("--out", type=Path, default=RECORD)
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
    known = args.show or (args.out if args.out.exists() else RECORD)
    measured = read(known) if args.show or args.resume else {}
    if args.measure:
        Measurement(measured, args).run()
    found = [one for one in map(search, measured.values()) if one is not None]
    print("\n".join(show(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
