"""Collectives matched across ranks, and clocks aligned by them.

Every rank of a process group issues the same collectives in the same order: the n-th of a kind,
of a group and of a step is the same one on all its ranks. A collective that needs the data of every
rank cannot end anywhere before the last rank has arrived, and then ends everywhere at nearly the
same time. The median difference of the ends is therefore the difference of the clocks. It is
applied only if it exceeds the scatter of the ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stepscope.analysis.job.rank import RankTrace
from stepscope.analysis.trace.model import Ints

_ONE_SIDED = ("send_recv", "broadcast", "reduce", "gather", "scatter")
"""Collectives that end on some ranks before all have arrived."""
_MIN_SCATTERS = 3.0
"""Median absolute deviations by which clocks have to differ to be corrected."""


class Kind(NamedTuple):
    """Collectives that are matched with each other."""

    collective: str
    group: str

    @property
    def waits_for_all(self) -> bool:
        return self.collective not in _ONE_SIDED


@dataclass(frozen=True)
class Matched:
    """Collectives of one kind and step on all ranks of their group."""

    kind: Kind
    step: int
    """Index among the common steps."""
    ranks: Ints
    """Indices of the ranks in the job."""
    index: Ints
    """A row per rank, a column per collective: index in the collectives of the rank."""


@dataclass(frozen=True)
class Matching:
    """Collectives of all ranks."""

    steps: tuple[str, ...]
    """Names of the common steps."""
    matched: tuple[Matched, ...]
    unmatched: int
    """Collectives that could not be compared: their number differs between the ranks."""


def match(ranks: Sequence[RankTrace]) -> Matching:
    """Match the collectives of all ranks."""
    names, of_rank = _common_steps(ranks)
    groups: dict[tuple[Kind, int], dict[int, Ints]] = {}
    total = 0
    for rank, trace in enumerate(ranks):
        total += len(trace.collectives)
        for key, index in _by_kind(trace, of_rank[rank]):
            groups.setdefault(key, {})[rank] = index
    matched, compared = [], 0
    for (kind, step), members in groups.items():
        lengths = {len(index) for index in members.values()}
        # Without a description the group is unknown: all ranks are assumed to be in it.
        enough = len(members) > 1 if kind.group else len(members) == len(ranks) > 1
        if enough and len(lengths) == 1 and kind.waits_for_all:
            index = np.stack(list(members.values()))
            matched.append(Matched(kind, step, np.array(list(members), np.int64), index))
        if (enough and len(lengths) == 1) or kind.collective in _ONE_SIDED:
            compared += sum(map(len, members.values()))
    return Matching(names, tuple(matched), total - compared)


def _common_steps(ranks: Sequence[RankTrace]) -> tuple[tuple[str, ...], list[dict[int, int]]]:
    """Return the steps that all ranks have, and for each rank their number by its own index."""
    names = [[step.name for step in trace.steps] for trace in ranks]
    common = [name for name in names[0] if all(name in others for others in names)]
    if not common and len({len(of_rank) for of_rank in names}) == 1:
        return tuple(names[0]), [{i: i for i in range(len(of_rank))} for of_rank in names]
    number = {name: index for index, name in enumerate(common)}
    return tuple(common), [
        {index: number[name] for index, name in enumerate(of_rank) if name in number}
        for of_rank in names
    ]


def _by_kind(trace: RankTrace, steps: Mapping[int, int]) -> Iterator[tuple[tuple[Kind, int], Ints]]:
    found = trace.collectives
    kinds = [Kind(message.collective, message.group) for message in found.messages]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    of_message = np.array([numbers[kind] for kind in kinds], np.int64)
    of = of_message[found.message] if len(found) else found.message
    for kind, number in numbers.items():
        for own, step in steps.items():
            index = np.flatnonzero((of == number) & (found.step == own))
            if len(index):
                yield (kind, step), index


@dataclass(frozen=True)
class Clocks:
    """Clocks of the ranks relative to the first one, in nanoseconds."""

    shift: Ints
    """To be added to the times of each rank."""
    scatter: Ints
    """Median absolute deviation of the ends of the collectives; -1 where nothing was compared."""

    @property
    def aligned(self) -> bool:
        return bool((self.scatter >= 0).all())


def align(ranks: Sequence[RankTrace], matching: Matching) -> Clocks:
    """Align the clocks, rank by rank, with ranks of the same groups that are aligned already."""
    shift = np.zeros(len(ranks), np.int64)
    scatter = np.full(len(ranks), -1, np.int64)
    scatter[:1] = 0
    while True:
        differences = _differences(ranks, matching, shift, scatter)
        if not differences:
            return Clocks(shift, scatter)
        rank = max(differences, key=lambda rank: len(differences[rank]))
        ends = differences[rank]
        offset = int(np.median(ends))
        scatter[rank] = int(np.median(np.abs(ends - offset)))
        if abs(offset) > _MIN_SCATTERS * scatter[rank]:
            shift[rank] = -offset


def _differences(
    ranks: Sequence[RankTrace], matching: Matching, shift: Ints, scatter: Ints
) -> dict[int, Ints]:
    """Return by how much collectives end later on each rank that is not aligned yet."""
    parts: dict[int, list[Ints]] = {}
    for one in matching.matched:
        known = np.flatnonzero(scatter[one.ranks] >= 0)
        if not len(known):
            continue
        reference = int(one.ranks[known[0]])
        ends = ranks[reference].collectives.end[one.index[known[0]]] + shift[reference]
        for row in np.flatnonzero(scatter[one.ranks] < 0).tolist():
            rank = int(one.ranks[row])
            own = ranks[rank].collectives.end[one.index[row]]
            parts.setdefault(rank, []).append(own - ends)
    return {rank: np.concatenate(pieces) for rank, pieces in parts.items()}
