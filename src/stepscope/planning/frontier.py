"""Plans of a step from the fastest to the smallest, independent of a budget.

Each block goes through its own options, from what costs the least time per byte to what costs the
most. A budget selects the fastest plan that fits, so that a larger one never gives a slower plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from stepscope.planning.block_costs import BlockCost, BlockRun, run_block
from stepscope.planning.fake_run import FakeStep
from stepscope.planning.forms import EAGER, Form, plain_costs
from stepscope.planning.host_copies import LEAST_BYTES
from stepscope.planning.kernel_buffers import LIBRARY_CALLS
from stepscope.planning.operators import Operator
from stepscope.planning.selective import BlockPlan
from stepscope.planning.step_timeline import Blocks, Recorded


class MemoryPlan(NamedTuple):
    """A plan of each block, with what is predicted of the step."""

    blocks: dict[str, BlockCost]
    peak: int
    seconds: float
    again_s: float
    """Of them, for recomputation."""
    exposed_s: float
    """Of them, for copies to and from host memory."""
    micro_batches: int = 1
    host_states: int = 0
    """Bytes of optimizer states that are in host memory between updates."""

    @property
    def to_host(self) -> int:
        return sum(cost.to_host for cost in self.blocks.values())

    @property
    def uses_host_memory(self) -> bool:
        return bool(self.to_host or self.host_states)

    @property
    def groups(self) -> list[tuple[int, BlockCost]]:
        """Blocks with equal plans and times, and how many there are."""
        found: dict[tuple[BlockPlan, float], list[BlockCost]] = defaultdict(list)
        for cost in self.blocks.values():
            found[cost.plan, cost.again_s].append(cost)
        return [(len(costs), costs[0]) for costs in found.values()]


class Kind(NamedTuple):
    """Equal blocks: their costs under each option, and under each with host copies."""

    options: tuple[BlockCost, ...]
    """As it is, then always less memory for more time."""
    offloaded: Mapping[BlockPlan, BlockCost]


def kinds_of(blocks: Blocks, step: FakeStep, form: Form) -> dict[Hashable, Kind]:
    """Run each kind of block under its options."""
    dtype = step.options.dtype
    if form.compile == "model":
        return {kind: Kind((cost,), {}) for kind, cost in plain_costs(blocks, step, form).items()}
    plain_costs(blocks, step, EAGER)
    if form.compile == "blocks":
        return {kind: _compiled_kind(blocks, kind, dtype) for kind in blocks.plain}
    return {kind: _kind(blocks, kind, plain, dtype) for kind, plain in blocks.plain.items()}


def _compiled_kind(blocks: Blocks, kind: Hashable, dtype: Any) -> Kind:
    """Options of a compiled block. Its kernels compute what is elementwise again for little time,
    so that outputs of library calls alone are kept."""
    from stepscope.planning.compiled_blocks import CompiledBlock

    eager = blocks.plain[kind]
    block = CompiledBlock(blocks.examples[kind], dtype, blocks.rates)
    blocks.retained[kind] = block.retained
    kept = (frozenset(one.key for one in those) for those in _kept_sets(eager, LIBRARY_CALLS))
    plans = [BlockPlan(True, keys, is_random=eager.log.is_random) for keys in kept]
    return Kind(tuple(_hull([block.plain, *map(block.cost, plans)])), {})


def _kind(blocks: Blocks, kind: Hashable, plain: BlockRun, dtype: Any) -> Kind:
    example = blocks.examples[kind]
    as_all = BlockPlan(True, is_random=plain.log.is_random)
    again = run_block(example, dtype, blocks.rates, as_all, plain).cost
    inputs = blocks.own_inputs(kind)
    sizes = [example.args[at].nbytes for at in inputs]
    kept = {_cost(plain.cost, again, those): those for those in _kept_sets(plain)}
    options = _hull([plain.cost, *kept])
    offloaded = {}
    for one in options[1:]:
        to_host = sum(n for n in (*sizes, *(x.bytes for x in kept[one])) if n >= LEAST_BYTES)
        # A group of copies leaves, or comes back, while its neighbor is computed.
        offloaded[one.plan] = one._replace(
            plan=one.plan._replace(offload=True, inputs=inputs),
            saved=one.saved - to_host,
            forward=one.forward + to_host,
            backward=one.backward + 2 * to_host,
            to_host=to_host,
        )
    return Kind(tuple(options), offloaded)


def _cost(plain: BlockCost, again: BlockCost, kept: tuple[Operator, ...]) -> BlockCost:
    """Return the cost of a block that keeps these outputs, from that of one that keeps nothing."""
    size = sum(one.bytes for one in kept)
    return again._replace(
        plan=again.plan._replace(kept=frozenset(one.key for one in kept)),
        saved=again.saved + size,
        forward=min(plain.forward, again.forward + size),
        backward=again.backward - size,
        again_s=again.again_s - sum(one.seconds for one in kept),
    )


def _kept_sets(
    plain: BlockRun, names: Container[str] | None = None
) -> Iterator[tuple[Operator, ...]]:
    """Sets of outputs to keep: those that save the most time per byte first."""
    candidates = [
        one
        for index, one in plain.log.keepable()
        if index < plain.last
        and one.bytes >= LEAST_BYTES
        and (names is None or one.key[0] in names)
    ]
    candidates.sort(key=lambda one: -one.seconds / one.bytes)
    for count in range(len(candidates) + 1):
        yield tuple(candidates[:count])


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


def frontier(found: Blocks, kinds: Mapping[Hashable, Kind], recorded: Recorded) -> list[MemoryPlan]:
    """Return the plans than which no other is faster and smaller, the fastest first."""
    calls, names, rates, sharded = recorded.calls, found.kinds, found.rates, found.sharded
    plain = {name: kinds[kind].options[0] for name, kind in names.items()}
    forward = recorded.forward_s + sum(calls[name] * one.forward_s for name, one in plain.items())
    backward = recorded.backward_s + sum(
        calls[name] * one.backward_s for name, one in plain.items()
    )

    def plan(blocks: dict[str, BlockCost]) -> MemoryPlan:
        again = sum(calls[name] * one.again_s for name, one in blocks.items())
        copied = sum(calls[name] * one.to_host for name, one in blocks.items()) / rates.host
        exposed = max(0.0, copied - forward) + max(0.0, copied - backward - again)
        seconds = forward + backward + recorded.optimizer_s + again + exposed
        in_memory = blocks if sharded is None else sharded.gathered(blocks)
        return MemoryPlan(blocks, recorded.timeline.peak(in_memory), seconds, again, exposed)

    def with_host_copies(blocks: dict[str, BlockCost], most: float) -> dict[str, BlockCost]:
        """Copy the first blocks to host memory, whose tensors are saved for the longest time."""
        chosen, bytes_, last = {}, 0.0, ""
        for name, cost in blocks.items():
            other = kinds[names[name]].offloaded.get(cost.plan, cost)
            bytes_ += calls[name] * other.to_host
            chosen[name] = other if bytes_ <= most else cost
            last = name if chosen[name].to_host else last
        if last:
            # It stays on the GPU, because no group follows it.
            cost = chosen[last]
            chosen[last] = cost._replace(
                saved=cost.saved + cost.to_host, backward=cost.backward - cost.to_host
            )
        return chosen

    hidden = min(forward, backward) * rates.host
    plans = []
    for blocks in _path({name: kinds[kind].options for name, kind in names.items()}):
        plans += [plan(blocks), plan(with_host_copies(blocks, hidden))]
        plans.append(plan(with_host_copies(blocks, float("inf"))))
    return best_of(plans)


def best_of(plans: Iterable[MemoryPlan]) -> list[MemoryPlan]:
    """Return the plans than which no other is faster and smaller, the fastest first."""
    best: list[MemoryPlan] = []
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
        for before, after in pairwise(those)
    ]
    for _, _, name, after in sorted(moves, key=lambda move: move[:2]):
        chosen[name] = after
        yield dict(chosen)
