"""Per-step agreement between ranks, separate from the gradients.

Each rank sends one small message: how many steps it has synchronized, the identity of its buckets,
and digests of which parameters have a gradient, which collectives it has issued and, in steps that
verify them, the values of its parameters. The messages
use a separate gloo group between CPUs, so they neither queue behind the gradients nor make a GPU
wait. All messages have the same length regardless of the parameters, so ranks that disagree can
still exchange them and report the difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from stepscope.errors import some
from stepscope.parallel.collective_order import HINT, Order, require_same_pasts
from stepscope.parallel.collectives import all_reduce, gather_objects
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.peers import finish, new_message_group

_NAMED = 3
"""Number of parameters listed in an error message; the others are counted."""
_STEP, _USE, _CHANGE, _VERIFY = 0, 1, 2, 3
"""Message kinds: at the end of a step, before an unexpected collective, after parameters
changed, to compare parameters."""


class Message(NamedTuple):
    """One rank's message. All fields are integers because it is sent as a tensor."""

    step: int
    identity: int
    buffers: int
    kind: int
    digest: int
    """Digest of the rank's sequence of collectives, or of its parameter changes."""
    absent: int
    used: int
    """Digest of which parameters have a gradient."""
    values: int
    """Digest of the values of the parameters; 0 in steps that do not verify them."""
    verify_every: int
    """Steps between two comparisons of the values; 0 for none."""


class Agreement:
    """Exchanges one small message per step between the ranks and raises if they disagree."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        identity: int,
        names: Sequence[str],
        other: str,
        hint: str,
        order: Order | None = None,
        verify_every: int | None = None,
    ) -> None:
        """`other` and `hint` are the error text for a rank whose identity differs. `order` is
        given if the ranks must also issue their collectives in the same order. `verify_every` is
        the number of steps between two comparisons of the parameters, None for no comparison."""
        if verify_every is not None and verify_every < 1:
            raise ParallelError(f"verify_every is {verify_every}", "it must be at least 1, or None")
        self._group = new_message_group(group)
        self._size = dist.get_world_size(self._group)
        self._identity = identity
        self._names = names
        self._other, self._hint = other, hint
        self._order = order
        self._verify_every = verify_every or 0
        if order is not None:
            order.open(self._group.group_name, self._confirm)
        self.steps = 0
        self._gather(_STEP)

    def replan(self, identity: int, names: Sequence[str]) -> None:
        """Set a new plan after the ranks agreed on the parameter change behind it."""
        self._identity, self._names = identity, names

    @property
    def verifies(self) -> bool:
        """True in a step in which the ranks compare the values of their parameters."""
        return bool(self._verify_every) and self.steps % self._verify_every == 0

    def agree_on(self, changes: Sequence[str]) -> None:
        """Raise unless every rank made the same parameter changes at this point."""
        if self._order is not None:
            for line in changes:
                self._order.use("change", line)
        else:
            self._gather(_CHANGE, changes=changes)

    def exchange(
        self,
        used: Sequence[bool],
        *,
        absent: bool = False,
        allow_missing: bool = False,
        buffers: int = 0,
        values: Mapping[str, int] | None = None,
    ) -> list[bool]:
        """Return, per parameter, whether any rank has a gradient. Raise if the ranks disagree.

        `buffers` is the identity of the buffers that are broadcast next. `values` has digests of
        parameters by name that must be equal on all ranks.
        """
        if self._order is not None:
            self._order.ended = True
        messages = self._gather(_STEP, absent, used, buffers=buffers, values=values)
        self._require_same_values(messages, values)
        self._require_same_buffers(messages)
        if self._order is not None:
            self._order.next_step()
        usage = [list(used)]
        if any(message.used != messages[0].used for message in messages):
            usage = self._gather_usage(used)
            if not allow_missing:
                self._require_same_usage(messages, usage)
        self.steps += 1
        return [any(bits) for bits in zip(*usage, strict=True)]

    def verify(self, values: Mapping[str, int]) -> None:
        """Raise unless the digests of the parameters are equal on all ranks."""
        self._require_same_values(self._gather(_VERIFY, values=values), values)

    def _confirm(self) -> None:
        """Raise unless every rank is about to issue the same collective."""
        self._gather(_USE)

    def total(self, count: int) -> int:
        total = torch.tensor([count])
        all_reduce(total, self._group)
        return int(total)

    def _gather(
        self,
        kind: int,
        absent: bool = False,
        used: Sequence[bool] = (),
        changes: Sequence[str] = (),
        buffers: int = 0,
        values: Mapping[str, int] | None = None,
    ) -> list[Message]:
        """Gather the message of every rank. Raise, naming a rank, if they are inconsistent."""
        digest = self._order.digest if self._order is not None else _digest_of(changes)
        flags = _digest_of("01"[flag] for flag in used)
        total = _digest_of(f"{name} {value}" for name, value in values.items()) if values else 0
        own = torch.tensor(
            Message(
                self.steps,
                self._identity,
                buffers,
                kind,
                digest,
                absent,
                flags,
                total,
                self._verify_every,
            )
        )
        rows = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(rows, own, group=self._group, async_op=True)
        assert work is not None
        if self._order is not None:
            self._order.wait(work, on_host=True)
        else:
            finish(work, self._group)
        messages = [Message(*row.tolist()) for row in rows]
        self._require_same_step(messages)
        if any((m.kind, m.digest) != (messages[0].kind, messages[0].digest) for m in messages):
            self._raise_difference(changes)
        return messages

    def _gather_usage(self, used: Sequence[bool]) -> list[list[bool]]:
        own = torch.tensor(used, dtype=torch.bool)
        rows = [torch.empty_like(own) for _ in range(self._size)]
        finish(dist.all_gather(rows, own, group=self._group, async_op=True), self._group)
        return [row.tolist() for row in rows]

    def _raise_difference(self, changes: Sequence[str]) -> NoReturn:
        past = self._order.past if self._order is not None else None
        every = gather_objects((list(changes), past), self._group)
        require_same_changes([rank_changes for rank_changes, _ in every])
        require_same_pasts({rank: past for rank, (_, past) in enumerate(every) if past is not None})
        raise ParallelError("the ranks used the parameters in different orders", HINT)

    def _require_same_step(self, messages: list[Message]) -> None:
        for rank, message in enumerate(messages):
            if message.step != messages[0].step:
                raise ParallelError(
                    f"rank {rank} is synchronizing step {message.step}, rank 0 step"
                    f" {messages[0].step}",
                    "every rank must call finish_gradient_synchronization once per step",
                )
            if message.identity != messages[0].identity:
                raise ParallelError(f"rank {rank} has {self._other}", self._hint)
            if message.verify_every != messages[0].verify_every:
                raise ParallelError(
                    f"rank {rank} verifies parameters every {message.verify_every} steps, rank 0"
                    f" every {messages[0].verify_every} (0: never)",
                    "verify_every must be the same on all ranks",
                )

    def _require_same_values(
        self, messages: list[Message], values: Mapping[str, int] | None
    ) -> None:
        if all(message.values == messages[0].values for message in messages):
            return
        every: list[dict[str, int]] = gather_objects(dict(values or {}), self._group)
        rank = next(r for r, message in enumerate(messages) if message.values != messages[0].values)
        names = [name for name, value in every[rank].items() if every[0].get(name) != value]
        raise ParallelError(
            f"the ranks have diverged before step {self.steps}: rank {rank} and rank 0 have"
            f" different values of {some(names, _NAMED)}",
            "change parameters on all ranks alike; restart from a checkpoint",
        )

    @staticmethod
    def _require_same_buffers(messages: list[Message]) -> None:
        for rank, message in enumerate(messages):
            if message.buffers != messages[0].buffers:
                raise ParallelError(
                    f"the buffers of rank {rank} differ in number, shape or dtype from rank 0",
                    "register buffers with persistent=False if each rank has its own",
                )

    def _require_same_usage(self, messages: list[Message], usage: list[list[bool]]) -> None:
        present = [rank for rank, message in enumerate(messages) if not message.absent]
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
                raise ParallelError(
                    f"rank {without} has no gradient for {some(missing, _NAMED)},"
                    f" but rank {with_} does",
                    "pass missing_gradients='zero' if ranks may use different parameters",
                )


def require_same_changes(changes: Sequence[Sequence[str]]) -> None:
    """Raise an error with rank and parameter if two ranks changed their parameters differently."""
    for rank, own in enumerate(changes):
        for mine, other, lines, others in (
            (rank, 0, own, changes[0]),
            (0, rank, changes[0], own),
        ):
            only = next((line for line in lines if line not in others), None)
            if only is not None:
                raise ParallelError(
                    f"{only} on rank {mine} but not on rank {other}",
                    "change the parameters of a wrapped module on all ranks, before the same step",
                )


def _digest_of(lines: Iterable[str]) -> int:
    """Hash the lines into an integer that fits an int64 tensor."""
    text = "\n".join(lines).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
