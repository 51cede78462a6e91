"""What the ranks tell each other about a step, beside the gradients.

One small message of each rank: how many steps it has synchronized, the identity of its buckets,
digests of which parameters have a gradient and of the collectives it has issued. It travels on a
gloo group of its own, between hosts, so that it neither queues behind the gradients nor makes a GPU
wait. All messages have one length, whatever the parameters, so that ranks which differ still meet
and can name the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from stepscope.parallel.collective_order import HINT, Order, require_same_pasts
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT

_NAMED = 3
"""Parameters that an error names; the rest is counted."""
_STEP, _USE, _CHANGE = 0, 1, 2
"""When a word is sent: at the end of a step, before a collective that was not expected, where
parameters changed."""


class Word(NamedTuple):
    """What a rank says; numbers, because it travels as a tensor."""

    step: int
    identity: int
    buffers: int
    kind: int
    digest: int
    """Of the sequence of its collectives, or of the changes of its parameters."""
    absent: int
    used: int
    """A digest of which parameters have a gradient."""


class Agreement:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        identity: int,
        names: Sequence[str],
        other: str,
        hint: str,
        order: Order | None = None,
    ) -> None:
        """`other` and `hint` are the words for a rank whose identity differs; `order` is there
        where the ranks must also issue their collectives in the same order."""
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=group is not None
        )
        self._size = len(ranks)
        self._identity = identity
        self._names = names
        self._other, self._hint = other, hint
        self._order = order
        if order is not None:
            order.open(self._group.group_name, self._confirm)
        self.steps = 0
        self._gather(_STEP)

    def replan(self, identity: int, names: Sequence[str]) -> None:
        """Take another plan, after the ranks agreed on the change that it follows from."""
        self._identity, self._names = identity, names

    def agree_on(self, changes: Sequence[str]) -> None:
        """Raise unless every rank changed its parameters in this way, at this point."""
        if self._order is not None:
            for line in changes:
                self._order.use("change", line)
        else:
            self._gather(_CHANGE, changes=changes)

    def exchange(
        self, used: Sequence[bool], *, absent: bool = False, allow_missing: bool = False,
        buffers: int = 0,
    ) -> list[bool]:  # fmt: skip
        """By parameter: does any rank have a gradient? Raises where ranks would mix them.

        `buffers` is the identity of those that are broadcast next.
        """
        if self._order is not None:
            self._order.ended = True
        words = self._gather(_STEP, absent, used, buffers=buffers)
        self._require_same_buffers(words)
        if self._order is not None:
            self._order.next_step()
        usage = [list(used)]
        if any(word.used != words[0].used for word in words):
            usage = self._gather_usage(used)
            if not allow_missing:
                self._require_same_usage(words, usage)
        self.steps += 1
        return [any(bits) for bits in zip(*usage, strict=True)]

    def _confirm(self) -> None:
        """Raise unless every rank is about to issue the same collective."""
        self._gather(_USE)

    def total(self, count: int) -> int:
        held = torch.tensor([count])
        with HEARTBEAT.waiting():
            dist.all_reduce(held, group=self._group)
        return int(held)

    def _gather(
        self, kind: int, absent: bool = False, used: Sequence[bool] = (),
        changes: Sequence[str] = (), buffers: int = 0,
    ) -> list[Word]:  # fmt: skip
        """Every rank's word; raises with a rank where they do not fit together."""
        digest = self._order.digest if self._order is not None else _digest_of(changes)
        flags = _digest_of("01"[flag] for flag in used)
        own = torch.tensor([self.steps, self._identity, buffers, kind, digest, absent, flags])
        rows = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(rows, own, group=self._group, async_op=True)
        assert work is not None
        if self._order is not None:
            self._order.wait(work, on_host=True)
        else:
            with HEARTBEAT.waiting():
                work.wait()
        words = [Word(*row.tolist()) for row in rows]
        self._require_same_step(words)
        if any((word.kind, word.digest) != (words[0].kind, words[0].digest) for word in words):
            self._name_the_difference(changes)
        return words

    def _gather_usage(self, used: Sequence[bool]) -> list[list[bool]]:
        own = torch.tensor(used, dtype=torch.bool)
        rows = [torch.empty_like(own) for _ in range(self._size)]
        with HEARTBEAT.waiting():
            dist.all_gather(rows, own, group=self._group)
        return [row.tolist() for row in rows]

    def _name_the_difference(self, changes: Sequence[str]) -> NoReturn:
        past = self._order.past if self._order is not None else None
        own = (list(changes), past)
        every = [own] * self._size
        dist.all_gather_object(every, own, group=self._group)
        require_same_changes([rank_changes for rank_changes, _ in every])
        require_same_pasts({rank: past for rank, (_, past) in enumerate(every) if past is not None})
        raise ParallelError("the ranks used the parameters in different orders", HINT)

    def _require_same_step(self, words: list[Word]) -> None:
        for rank, word in enumerate(words):
            if word.step != words[0].step:
                raise ParallelError(
                    f"rank {rank} synchronizes its step {word.step}, rank 0 its step"
                    f" {words[0].step}",
                    "every rank must call finish_gradient_synchronization once a step",
                )
            if word.identity != words[0].identity:
                raise ParallelError(f"rank {rank} has {self._other}", self._hint)

    @staticmethod
    def _require_same_buffers(words: list[Word]) -> None:
        for rank, word in enumerate(words):
            if word.buffers != words[0].buffers:
                raise ParallelError(
                    f"rank {rank} has buffers of another number, shape or dtype than rank 0",
                    "register buffers with persistent=False if each rank has its own",
                )

    def _require_same_usage(self, words: list[Word], usage: list[list[bool]]) -> None:
        present = [rank for rank, word in enumerate(words) if not word.absent]
        for rank in present:
            for without, with_ in ((rank, present[0]), (present[0], rank)):
                missing = [
                    name
                    for name, own, other in zip(
                        self._names, usage[without], usage[with_], strict=True
                    )
                    if other and not own
                ]
                if not missing:
                    continue
                more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                raise ParallelError(
                    f"rank {without} has no gradient of {', '.join(missing[:_NAMED])}{more},"
                    f" rank {with_} has",
                    "pass missing_gradients='zero' if ranks may use different parameters",
                )


def require_same_changes(changes: Sequence[Sequence[str]]) -> None:
    """Raise with rank and parameter where two ranks changed their parameters differently."""
    for rank, own in enumerate(changes):
        for mine, other, lines, others in (
            (rank, 0, own, changes[0]), (0, rank, changes[0], own),
        ):  # fmt: skip
            only = next((line for line in lines if line not in others), None)
            if only is not None:
                raise ParallelError(
                    f"on rank {mine} {only}, on rank {other} not",
                    "change the parameters of a wrapped module on all ranks, before the same step",
                )


def _digest_of(lines: Iterable[str]) -> int:
    """A number for a tensor of int64; only those of equal lines are equal."""
    text = "\n".join(lines).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
