"""Plans of a step from the fastest to the smallest, independent of a budget.

Each block goes through its own options, from what costs the least time per byte to what costs the
most. A budget selects the fastest plan that fits, so that a larger one never gives a slower plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stepscope.planning.block_costs import BlockCost, BlockRun, run_block
from stepscope.planning.operators import Rates
from stepscope.planning.predict import StepOptions
from stepscope.planning.selective import BlockPlan
from stepscope.planning.step_timeline import Blocks, Recorded

_OPTIONS = 6
"""Sets of kept outputs that are tried for a kind of block."""


class StepPlan(NamedTuple):
    """A plan of each block, with what is predicted of the step."""

    blocks: dict[str, BlockCost]
    peak: int
    seconds: float
    again_s: float
    """Of them, for recomputation."""
    exposed_s: float
    """Of them, for copies to and from host memory."""

    @property
    def to_host(self) -> int:
        return sum(cost.to_host for cost in self.blocks.values())


class Kind(NamedTuple):
    """Equal blocks: their costs under each option, and under each with host copies."""

    options: tuple[BlockCost, ...]
    """As it is, then always less memory for more time."""
    offloaded: Mapping[BlockPlan, BlockCost]


def kinds_of(blocks: Blocks, options: StepOptions) -> dict[Hashable, Kind]:
    """Run each kind of block under its options."""
    return {
        kind: _kind(blocks, kind, plain, options.dtype, blocks.rates)
        for kind, plain in blocks.plain.items()
    }


def _kind(blocks: Blocks, kind: Hashable, plain: BlockRun, dtype: object, rates: Rates) -> Kind:
    example = blocks.examples[kind]

    def cost(plan: BlockPlan) -> BlockCost:
        return run_block(example, dtype, rates, plan, plain).cost

    options = _hull([plain.cost, *(cost(BlockPlan(True, kept)) for kept in _kept_sets(plain))])
    inputs = blocks.own_inputs(kind)
    offloaded = {
        one.plan: cost(one.plan._replace(offload=True, inputs=inputs)) for one in options[1:]
    }
    return Kind(tuple(options), offloaded)


def _kept_sets(plain: BlockRun) -> Iterator[frozenset[tuple[str, int]]]:
    """Sets of outputs to keep: those that save the most time per byte first, in equal steps of
    time."""
    candidates = [one for index, one in plain.log.keepable() if index < plain.last]
    candidates.sort(key=lambda one: -one.seconds / one.bytes)
    total = sum(one.seconds for one in candidates)
    kept: list[tuple[str, int]] = []
    saved, step = 0.0, 0
    yield frozenset()
    for one in candidates:
        kept.append(one.key)
        saved += one.seconds
        if saved * _OPTIONS >= (step + 1) * total * (1 - 1e-9):
            step = int(saved * _OPTIONS / total)
            yield frozenset(kept)


def _hull(costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Return the options on the lower convex hull of time against memory, the fastest first."""
    hull: list[BlockCost] = []
    for cost in sorted(costs, key=lambda one: (one.again_s, one.saved)):
        if hull and cost.saved >= hull[-1].saved:
            continue
        while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-2], cost):
            hull.pop()
        hull.append(cost)
    return hull


def _price(before: BlockCost, after: BlockCost) -> float:
    """Seconds per byte."""
    return (after.again_s - before.again_s) / (before.saved - after.saved)


def frontier(
    names: Mapping[str, Hashable], kinds: Mapping[Hashable, Kind], recorded: Recorded, rates: Rates
) -> list[StepPlan]:
    """Return the plans than which no other is faster and smaller, the fastest first."""
    calls = recorded.calls
    plain = {name: kinds[kind].options[0] for name, kind in names.items()}
    forward = recorded.forward_s + sum(calls[name] * one.forward_s for name, one in plain.items())
    backward = recorded.backward_s + sum(calls[name] * one.backward_s for name, one in plain.items())

    def plan(blocks: dict[str, BlockCost]) -> StepPlan:
        again = sum(calls[name] * one.again_s for name, one in blocks.items())
        copied = sum(calls[name] * one.to_host for name, one in blocks.items()) / rates.host
        exposed = max(0.0, copied - forward) + max(0.0, copied - backward - again)
        seconds = forward + backward + recorded.optimizer_s + again + exposed
        return StepPlan(blocks, recorded.timeline.peak(blocks), seconds, again, exposed)

    def with_host_copies(blocks: dict[str, BlockCost], most: float) -> dict[str, BlockCost]:
        """Copy the first blocks to host memory, whose tensors are saved for the longest time."""
        chosen, bytes_ = {}, 0.0
        for name, cost in blocks.items():
            other = kinds[names[name]].offloaded.get(cost.plan, cost)
            bytes_ += calls[name] * other.to_host
            chosen[name] = other if bytes_ <= most else cost
        return chosen

    hidden = min(forward, backward) * rates.host
    plans = []
    for blocks in _path({name: kinds[kind].options for name, kind in names.items()}):
        plans += [plan(blocks), plan(with_host_copies(blocks, hidden))]
        plans.append(plan(with_host_copies(blocks, float("inf"))))
    best: list[StepPlan] = []
    for one in sorted(plans, key=lambda one: (one.seconds, one.peak)):
        if not best or one.peak < best[-1].peak:
            best.append(one)
    return best


def _path(options: Mapping[str, Sequence[BlockCost]]) -> Iterator[dict[str, BlockCost]]:
    """Move one block at a time to its next option, the lowest price first; of equal ones the first
    block of the model."""
    chosen = {name: those[0] for name, those in options.items()}
    yield dict(chosen)
    moves = [
        (_price(before, after), index, name, after)
        for index, (name, those) in enumerate(options.items())
        for before, after in zip(those, those[1:], strict=False)
    ]
    for _, _, name, after in sorted(moves, key=lambda move: move[:2]):
        chosen[name] = after
        yield dict(chosen)
