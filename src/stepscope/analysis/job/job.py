"""Summary of a job: breakdown of every rank, waits at collectives, stragglers, imbalance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from stepscope.analysis.job.matching import Clocks, Kind, Matched, align, match
from stepscope.analysis.job.rank import RankTrace
from stepscope.analysis.trace.intervals import overlap, union
from stepscope.analysis.trace.model import Ints
from stepscope.analysis.trace.summary import LedgerLine, Piece, Summary
from stepscope.records.decoding import Int64

_LATE_FROM = 0.01
"""Share of the step from which a rank is a straggler."""
_OFTEN = 0.5
"""Share of the steps in which a straggler has to be last."""


class RankRow(Piece, frozen=True):
    """Breakdown of a rank, in milliseconds per step: computation, exposed communication and idle
    time add up to the step."""

    rank: Int64
    file: str
    steps: Int64
    step_ms: float
    compute_ms: float
    exposed_ms: float
    waiting_ms: float | None
    """Part of the exposed communication spent waiting for ranks that arrive later; None if the
    collectives could not be compared."""
    idle_ms: float
    communication_ms: float
    """Overlapped or not."""
    lateness_ms: float | None
    """Mean delay behind the median of the other ranks at a collective."""
    last: Int64
    """Collectives at which it arrived last."""
    clock_us: float
    """Correction of its clock."""
    doubt: str


class CollectiveRow(Piece, frozen=True):
    """One collective of a step, mean over steps."""

    collective: str
    group: str
    number: Int64
    """Position among the collectives of its kind and group in a step, from 1."""
    of: Int64
    ranks: Int64
    bytes: Int64
    transfer_ms: float
    """From the arrival of the last rank to the end."""
    waiting_ms: float
    """Mean over the ranks of the time until the last one arrives."""
    last_rank: Int64
    """Rank that most often arrives last."""
    last_share: float
    """Share of the steps in which it does."""


class Straggler(Piece, frozen=True):
    """A rank for which the others wait, and the collective at which it falls behind."""

    rank: Int64
    collective: CollectiveRow
    late_ms: float
    """By how much it falls behind the median of the others since the collective before."""
    work_ms: float
    """By how much more its device worked in that time."""
    last_share: float


class Job(Piece, frozen=True):
    """Summary of all ranks of a job."""

    ranks: tuple[RankRow, ...]
    collectives: tuple[CollectiveRow, ...]
    """In descending order of the time that ranks wait at them."""
    stragglers: tuple[Straggler, ...]
    compared: Int64
    """Collectives per rank that were compared."""
    unmatched: Int64
    aligned: bool
    """All clocks were compared."""
    scatter_us: float
    """Largest scatter of the ends of a collective: what a comparison of times is accurate to."""
    world_size: Int64 | None
    unread: dict[str, str]
    """Files that could not be read, with the reason."""
    lines: tuple[LedgerLine, ...]
    """Ledger of a step, mean over the ranks."""

    def mean(self, field: str) -> float:
        return fmean(getattr(row, field) for row in self.ranks)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that a rank all-reduces in a step, as far as they are known."""
        return sum(row.bytes for row in self.collectives if row.collective == "all_reduce")

    @property
    def imbalance(self) -> float:
        """Longest computation of a rank over the mean, minus one."""
        mean = self.mean("compute_ms")
        return max(row.compute_ms for row in self.ranks) / mean - 1 if mean else 0.0

    @property
    def typical(self) -> int:
        """Index of the rank with the median exposed communication."""
        order = sorted(range(len(self.ranks)), key=lambda i: self.ranks[i].exposed_ms)
        return order[(len(order) - 1) // 2]


def summarize_job(ranks: Sequence[RankTrace], unread: dict[str, str] | None = None) -> Job:
    """Summarize the ranks of a job, sorted by rank."""
    matching = match(ranks)
    clocks = align(ranks, matching)
    arrivals = [_arrivals(ranks, clocks, one) for one in matching.matched]
    collectives = _collectives(ranks, arrivals)
    scatter = int(clocks.scatter.max())
    rows = tuple(_row(ranks, clocks, arrivals, index) for index in range(len(ranks)))
    return Job(
        ranks=rows,
        collectives=tuple(sorted(collectives, key=lambda row: -row.waiting_ms)),
        stragglers=_stragglers(ranks, arrivals, max(0, scatter)),
        compared=sum(one.matched.index.shape[1] for one in arrivals if 0 in one.matched.ranks),
        unmatched=matching.unmatched,
        aligned=clocks.aligned and len(ranks) > 1,
        scatter_us=max(0, scatter) / 1e3,
        world_size=next((t.world_size for t in ranks if t.world_size), None),
        unread=unread or {},
        lines=mean_lines([trace.summary for trace in ranks]),
    )


def mean_lines(summaries: Sequence[Summary]) -> tuple[LedgerLine, ...]:
    """Return the ledger of a step, mean over the ranks."""
    total: dict[tuple[str, str], float] = {}
    for summary in summaries:
        for line in summary.lines:
            key = (line.phase, line.kind)
            total[key] = total.get(key, 0.0) + line.ms / len(summaries)
    return tuple(LedgerLine(phase=phase, kind=kind, ms=ms) for (phase, kind), ms in total.items())


@dataclass(frozen=True)
class _Arrivals:
    """Times of matched collectives on the common clock, a row per rank."""

    matched: Matched
    start: Ints
    end: Ints
    late: NDArray[np.float64]
    """Delay behind the median of the other ranks; negative if ahead."""

    @property
    def latest(self) -> Ints:
        latest: Ints = self.start.max(axis=0)
        return latest


def _arrivals(ranks: Sequence[RankTrace], clocks: Clocks, one: Matched) -> _Arrivals:
    members = [(ranks[rank].collectives, clocks.shift[rank]) for rank in one.ranks.tolist()]
    pairs = list(zip(members, one.index, strict=True))
    start = np.stack([found.start[index] + shift for (found, shift), index in pairs])
    end = np.stack([found.end[index] + shift for (found, shift), index in pairs])
    others = [np.median(np.delete(start, row, axis=0), axis=0) for row in range(len(start))]
    return _Arrivals(one, start, end, start - np.stack(others))


def _row(
    ranks: Sequence[RankTrace], clocks: Clocks, arrivals: Sequence[_Arrivals], index: int
) -> RankRow:
    trace = ranks[index]
    summary, shift = trace.summary, int(clocks.shift[index])
    begin, finish, late, last = [], [], [], 0
    for one in arrivals:
        for row in np.flatnonzero(one.matched.ranks == index).tolist():
            begin.append(one.start[row])
            finish.append(np.minimum(one.latest, one.end[row]))
            late.append(one.late[row])
            last += int((one.start.argmax(axis=0) == row).sum())
    waiting = None
    if begin:
        waits = union(np.concatenate(begin) - shift, np.concatenate(finish) - shift)
        waiting = int(overlap(*trace.exposed, *waits).sum()) / 1e6 / len(trace.steps)
    return RankRow(
        rank=index if trace.rank is None else trace.rank,
        file=trace.file,
        steps=len(trace.steps),
        step_ms=summary.wall_ms,
        compute_ms=trace.compute_ms,
        exposed_ms=trace.exposed_ms,
        waiting_ms=waiting,
        idle_ms=summary.wall_ms - trace.compute_ms - trace.exposed_ms,
        communication_ms=trace.communication_ms,
        lateness_ms=float(np.concatenate(late).mean()) / 1e6 if late else None,
        last=last,
        clock_us=shift / 1e3,
        doubt=summary.doubt,
    )


def _of_kind(arrivals: Sequence[_Arrivals]) -> dict[tuple[Kind, int], list[_Arrivals]]:
    """Group steps that have the same collectives."""
    groups: dict[tuple[Kind, int], list[_Arrivals]] = {}
    for one in arrivals:
        groups.setdefault((one.matched.kind, one.matched.index.shape[1]), []).append(one)
    return groups


def _collectives(ranks: Sequence[RankTrace], arrivals: Sequence[_Arrivals]) -> list[CollectiveRow]:
    rows = []
    for (kind, count), steps in _of_kind(arrivals).items():
        members = steps[0].matched.ranks
        first = ranks[int(members[0])].collectives
        latest = np.stack([one.latest for one in steps])
        transfer = np.stack([one.end.max(axis=0) for one in steps]) - latest
        waiting = np.stack([(one.latest - one.start).mean(axis=0) for one in steps])
        lasts = np.stack([one.matched.ranks[one.start.argmax(axis=0)] for one in steps])
        for number in range(count):
            who, times = np.unique(lasts[:, number], return_counts=True)
            most = int(times.argmax())
            message = first.messages[first.message[steps[0].matched.index[0, number]]]
            rows.append(
                CollectiveRow(
                    collective=kind.collective,
                    group=kind.group,
                    number=number + 1,
                    of=count,
                    ranks=len(members),
                    bytes=message.bytes,
                    transfer_ms=max(0.0, float(transfer[:, number].mean())) / 1e6,
                    waiting_ms=float(waiting[:, number].mean()) / 1e6,
                    last_rank=_name(ranks, int(who[most])),
                    last_share=float(times[most]) / len(steps),
                )
            )
    return rows


def _name(ranks: Sequence[RankTrace], index: int) -> int:
    rank = ranks[index].rank
    return index if rank is None else rank


def _stragglers(
    ranks: Sequence[RankTrace], arrivals: Sequence[_Arrivals], scatter: int
) -> tuple[Straggler, ...]:
    """Return the ranks that fall behind by a visible share of the step, each with the collective
    at which it falls behind most."""
    rows = {
        (row.collective, row.group, row.number, row.of): row
        for row in _collectives(ranks, arrivals)
    }
    least = max(_LATE_FROM * fmean(t.summary.wall_ms for t in ranks) * 1e6, 3.0 * scatter)
    worst: dict[int, Straggler] = {}
    for (kind, count), steps in _of_kind(arrivals).items():
        members = steps[0].matched.ranks
        late = np.stack([one.late for one in steps])
        # A rank may stay behind: what counts is where it falls behind.
        gained = np.maximum(late, 0.0)
        gained[:, :, 1:] -= np.maximum(late[:, :, :-1], 0.0)
        last = np.stack([one.start.argmax(axis=0) for one in steps])
        work = np.stack([_work_since(ranks, one.matched) for one in steps])
        for row, rank in enumerate(members.tolist()):
            mean = gained[:, row].mean(axis=0)
            number = int(mean.argmax())
            share = float((last[:, number] == row).mean())
            if mean[number] < least or share < _OFTEN:
                continue
            more = work[:, row, number] - np.median(np.delete(work, row, axis=1), axis=1)[:, number]
            found = Straggler(
                rank=_name(ranks, rank),
                collective=rows[kind.collective, kind.group, number + 1, count],
                late_ms=float(mean[number]) / 1e6,
                work_ms=float(more.mean()) / 1e6,
                last_share=share,
            )
            if rank not in worst or worst[rank].late_ms < found.late_ms:
                worst[rank] = found
    return tuple(sorted(worst.values(), key=lambda one: -one.late_ms))


def _work_since(ranks: Sequence[RankTrace], one: Matched) -> Ints:
    """Return the work of each rank between two collectives, or since the start of the step."""
    before = np.stack(
        [
            ranks[rank].work_before[index]
            for rank, index in zip(one.ranks.tolist(), one.index, strict=True)
        ]
    )
    return np.diff(before, axis=1, prepend=0)
