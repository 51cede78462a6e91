"""Model of the barriers of `specialized_forward.py`, run under random schedules: finds deadlocks
and races before a GPU does.

    python benchmarks/gluon_protocol.py --schedules 2000

The producer, the warpgroups and the copy engine are processes; between two steps of one, any number
of steps of the others may happen. An mbarrier has a phase, pending arrivals and pending bytes; a
wait for a parity returns while the current phase has the other one. A tile must not change between
the issue of a matmul that reads it and the wait for that matmul, a warpgroup must read the tile it
expects, and every process must end. The model follows the kernel line by line: change both.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Generator, Iterator
from typing import NamedTuple

Process = Generator["Wait | None", None, None]
Tile = tuple[str, int, int]
"""What a buffer holds: tensor, query tile of the program, block in the order of visits."""


class Barrier:
    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.phase = name, count, 0
        self.arrivals, self.copies = count, 0

    def arrive(self, copies: int = 0) -> None:
        assert self.arrivals > 0, f"{self.name}: one arrival too many in phase {self.phase}"
        self.arrivals -= 1
        self.copies += copies
        self._complete()

    def copied(self) -> None:
        self.copies -= 1
        self._complete()

    def _complete(self) -> None:
        if not self.arrivals and not self.copies:
            self.phase += 1
            self.arrivals = self.count


class Wait(NamedTuple):
    barrier: Barrier
    parity: int

    def over(self) -> bool:
        return self.barrier.phase % 2 != self.parity


class Ring:
    def __init__(self, name: str, size: int, readers: int) -> None:
        self.name, self.size = name, size
        self.full = [Barrier(f"{name}_full[{i}]", 1) for i in range(size)]
        self.empty = [Barrier(f"{name}_empty[{i}]", readers) for i in range(size)]
        self.holds: list[Tile | None] = [None] * size

    def load(self, n: int, tile: Tile, engine: list[tuple[Ring, int, Tile]]) -> Process:
        buffer, parity = n % self.size, n // self.size & 1
        yield Wait(self.empty[buffer], parity ^ 1)
        self.full[buffer].arrive(copies=1)
        self.holds[buffer] = None  # being overwritten
        engine.append((self, buffer, tile))
        yield None

    def wait(self, n: int) -> Wait:
        return Wait(self.full[n % self.size], n // self.size & 1)

    def check(self, n: int, tile: Tile) -> None:
        held = self.holds[n % self.size]
        assert held == tile, f"{self.name}[{n % self.size}] holds {held}, expected {tile}"

    def release(self, n: int) -> None:
        self.empty[n % self.size].arrive()


class Program:
    """One program with its query tiles, each with a number of key blocks. `skips` are those of a
    tile that a warpgroup does not see, the first ones; none unless given."""

    def __init__(
        self,
        blocks: list[int],
        stages: int,
        groups: int,
        turns: bool,
        queries: int = 1,
        skips: dict[tuple[int, int], int] | None = None,
    ) -> None:
        self.blocks, self.groups, self.turns = blocks, groups, turns
        self.skips = skips or {}
        self.early = queries > 1
        self.q = Ring("q", groups * queries, 1)
        self.k = Ring("k", stages, groups)
        self.v = Ring("v", stages, groups)
        self.turn = [Barrier(f"turn[{w}]", 1) for w in range(groups)]
        self.engine: list[tuple[Ring, int, Tile]] = []

    def producer(self) -> Process:
        queries = keys = 0
        for tile, n_blocks in enumerate(self.blocks):
            yield from self.k.load(keys, ("k", tile, 0), self.engine)
            if n_blocks > 1:
                yield from self.k.load(keys + 1, ("k", tile, 1), self.engine)
                yield from self.v.load(keys, ("v", tile, 0), self.engine)
            for w in range(self.groups):
                yield from self.q.load(queries + w, ("q", tile, w), self.engine)
            queries += self.groups
            for j in range(2, n_blocks):
                yield from self.k.load(keys + j, ("k", tile, j), self.engine)
                yield from self.v.load(keys + j - 1, ("v", tile, j - 1), self.engine)
            keys += n_blocks
            yield from self.v.load(keys - 1, ("v", tile, n_blocks - 1), self.engine)

    def await_turn(self, w: int, n: int) -> Process:
        if self.turns:
            yield Wait(self.turn[w], (n & 1) ^ (w == 0))

    def issue_scores(self, w: int, query: int, n: int, tile: int, j: int) -> Process:
        yield self.k.wait(n)
        yield from self.await_turn(w, n)
        self.q.check(query, ("q", tile, w))
        self.k.check(n, ("k", tile, j))

    def pass_turn(self, w: int) -> None:
        if self.turns:
            self.turn[(w + 1) % self.groups].arrive()

    def skip_blocks(self, w: int, base: int, count: int) -> Process:
        for n in range(base, base + count):
            yield self.k.wait(n)
            yield from self.await_turn(w, n)
            self.pass_turn(w)
            yield None
            self.k.release(n)
            yield self.v.wait(n)
            self.v.release(n)

    def consumer(self, w: int) -> Process:
        base, query = 0, w
        for tile, n_blocks in enumerate(self.blocks):
            skipped = self.skips.get((tile, w), 0)
            yield from self.skip_blocks(w, base, skipped)
            base += skipped
            yield self.q.wait(query)
            yield from self.issue_scores(w, query, base, tile, skipped)
            self.pass_turn(w)
            if self.early and tile:
                self.q.release(query - self.groups)
            yield None  # the matmul runs
            self.k.check(base, ("k", tile, skipped))
            self.k.release(base)
            yield None
            yield self.v.wait(base)
            for j in range(skipped + 1, n_blocks):
                n = base + j - skipped
                yield from self.issue_scores(w, query, n, tile, j)
                self.v.check(n - 1, ("v", tile, j - 1))
                self.pass_turn(w)
                yield None
                self.k.check(n, ("k", tile, j))
                self.k.release(n)
                yield None
                yield self.v.wait(n)
                self.v.check(n - 1, ("v", tile, j - 1))
                self.v.release(n - 1)
                yield None
            base += n_blocks - skipped
            self.v.check(base - 1, ("v", tile, n_blocks - 1))
            yield None
            self.v.check(base - 1, ("v", tile, n_blocks - 1))
            self.v.release(base - 1)
            yield None  # the output leaves through the buffer of the queries
            self.q.check(query, ("q", tile, w))
            if not self.early:
                self.q.release(query)
            query += self.groups

    def processes(self) -> dict[str, Process]:
        consumers = {f"warpgroup {w}": self.consumer(w) for w in range(self.groups)}
        return {"producer": self.producer(), **consumers}

    def copy_engine(self, generator: random.Random) -> None:
        """Complete one copy; copies complete in any order."""
        ring, buffer, tile = self.engine.pop(generator.randrange(len(self.engine)))
        ring.holds[buffer] = tile
        ring.full[buffer].copied()


def run(program: Program, generator: random.Random) -> int:
    """Run to the end under a random schedule; return the number of steps."""
    processes: dict[str, Iterator[Wait | None]] = {**program.processes()}
    waits: dict[str, Wait | None] = dict.fromkeys(processes)
    # Processes of very different speed reach states that equally fast ones do not.
    speed = {name: generator.choice([1, 1, 10, 100]) for name in (*processes, "copies")}
    steps = 0
    while processes or program.engine:
        ready = [n for n in processes if (w := waits[n]) is None or w.over()]
        ready += ["copies"] if program.engine else []
        if not ready:
            stuck = {n: (w.barrier.name, w.parity) for n in processes if (w := waits[n])}
            raise AssertionError(f"deadlock after {steps} steps: {stuck}")
        name = generator.choices(ready, [speed[n] for n in ready])[0]
        steps += 1
        if name == "copies":
            program.copy_engine(generator)
            continue
        try:
            waits[name] = next(processes[name])
        except StopIteration:
            del processes[name]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--schedules", type=int, default=2000)
    args = parser.parse_args()
    generator = random.Random(0)
    steps = 0
    for _ in range(args.schedules):
        blocks = [generator.choice([1, 1, 2, 3, 4, 7]) for _ in range(generator.randint(1, 5))]
        stages, groups = generator.choice([2, 3, 4]), generator.choice([2, 3])
        skips = {
            (tile, w): generator.randrange(n_blocks)
            for tile, n_blocks in enumerate(blocks)
            for w in range(groups - 1)  # the last warpgroup sees all
            if generator.random() < 0.5
        }
        turns, queries = generator.random() < 0.7, generator.choice([1, 2])
        program = Program(blocks, stages, groups, turns, queries, skips)
        steps += run(program, generator)
    print(f"{args.schedules} schedules, {steps} steps: no deadlock, no race")


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
