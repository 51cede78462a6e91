"""Check that all ranks issue the same sequence of collectives, and report the first difference.

If the forward pass issues collectives, those of the ranks pair up in the order in which they are
issued. A rank that takes another path through the model would mix its messages with those of
others; gloo aborts a process whose message sizes differ. A rank therefore issues a collective
without confirmation only if the same one was at this position in the last step, which all ranks
agreed on. Anything else is first confirmed between the ranks with one small message: every use in
the first step, and later the steps that differ.

A rank that waits while another one requests confirmation, or has ended its step, would wait
forever. It writes its past to the rendezvous store and reads those of the others. If two differ,
the error names the ranks and the parameter. A rank that is only slow writes nothing, and the
others wait for it.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT
from stepscope.parallel.peers import BoundedCalls, NoAnswer, connect_peers, waits_on_device

PATIENCE = timedelta(seconds=1)
"""A wait longer than this checks for its cause, and again after each such interval."""
MAX_USES = 4096
"""Maximum number of uses remembered; in a longer step each further use is confirmed."""
Verb = Literal["gather", "regather", "reduce", "change"]
"""Gather for the forward pass; gather again for the backward pass; reduce a gradient; change
parameters."""
HINT = "the forward of every rank must take the same path through the model"


class Past(NamedTuple):
    """The uses of one rank since its last step."""

    first: int
    """Number of the first remembered use."""
    uses: Sequence[str]
    """One verb and parameter name per use."""
    ended: bool
    """True once the backward pass is over: no more uses follow in this step."""

    @property
    def end(self) -> int:
        return self.first + len(self.uses)

    def at(self, index: int) -> str | None:
        return self.uses[index - self.first] if index < self.end else None

    def names(self) -> set[str]:
        return {use.partition(" ")[2] for use in self.uses}


class Order:
    """The sequence of collectives of this rank, compared with those of the other ranks."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        # NCCL waits on the device: the CPU continues to the end of the step, where ranks compare.
        self._on_host = not waits_on_device(group)
        self._peers = connect_peers(group)
        self._store: Store | None = None
        self._calls = BoundedCalls()
        self._prefix = ""
        self._confirm: Callable[[], None] | None = None
        self._step = 0
        self._written: list[str] = []
        self._last: list[str] = []
        self._clear()

    def _clear(self) -> None:
        self.digest = 0
        self._uses: list[str] = []
        self._forgotten = 0
        self.ended = False

    def open(self, name: str, confirm: Callable[[], None]) -> None:
        """Start checking. `name` is common to the ranks; `confirm` raises unless all digests are
        equal."""
        self._store, self._prefix = _get_default_store(), f"stepscope/order/{name}"
        self._confirm = confirm

    def use(self, verb: Verb, name: str) -> None:
        """Record a use; call before issuing a collective for that parameter."""
        index, what = self._forgotten + len(self._uses), f"{verb} {name}"
        self.digest = zlib.crc32(what.encode(), self.digest)
        self._uses.append(what)
        if len(self._uses) > MAX_USES:
            del self._uses[0]
            self._forgotten += 1
        expected = index < len(self._last) and self._last[index] == what
        if not expected and self._confirm is not None:
            self._confirm()

    def next_step(self) -> None:
        """Start the next step. All ranks agreed on this one, so keys of earlier steps are unused
        and deleted."""
        for key in [key for key in self._written if key != self._key(self._rank)]:
            assert self._store is not None
            with suppress(NoAnswer):
                self._calls.call(partial(self._store.delete_key, key), PATIENCE.total_seconds())
            self._written.remove(key)
        self._last = [] if self._forgotten else self._uses
        self._step += 1
        self._clear()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{self._step}/{rank}"

    @property
    def past(self) -> Past:
        return Past(self._forgotten, self._uses, self.ended)

    def wait(self, work: dist.Work, *, on_host: bool = False) -> None:
        """Wait for the work. Raise if it cannot complete because ranks took different paths, or
        PeerLost if ranks do not answer.

        `on_host`: the work is a message between CPUs and does not belong to the group.
        """
        patience = self._peers.patience
        # Leaves time for the last comparison.
        until = time.monotonic() + max(patience / 2, patience - 2 * PATIENCE).total_seconds()
        with HEARTBEAT.waiting():
            if self._store is None or not (on_host or self._on_host):
                work.wait()
                return
            while True:
                left = timedelta(seconds=max(0.001, until - time.monotonic()))
                try:
                    work.wait(min(PATIENCE, left))
                    return
                except RuntimeError as error:
                    failed = work.is_completed() or left < PATIENCE
                    self._compare_in_time(2 * PATIENCE if failed else None)
                    if failed:
                        raise self._peers.failure(error) from error

    def _compare_in_time(self, until: timedelta | None) -> None:
        """Compare the pasts if the store answers; a rank that the network does not connect to it
        waits for its collective alone."""
        assert self._store is not None
        compare = partial(self._compare, self._store, until)
        with suppress(NoAnswer, dist.DistError):
            self._calls.call(compare, (PATIENCE + (until or timedelta(0))).total_seconds())

    def _compare(self, store: Store, until: timedelta | None) -> None:
        """Raise if the pasts of other ranks differ from this one; `until` is the time to wait for
        them."""
        keys = [self._key(rank) for rank in range(self._size)]
        store.set(keys[self._rank], json.dumps(self.past))
        if keys[self._rank] not in self._written:
            self._written.append(keys[self._rank])
        if until is not None:
            with suppress(dist.DistStoreError):
                store.wait(keys, until)
        pasts = {
            rank: Past(*json.loads(store.get(key)))
            for rank, key in enumerate(keys)
            if store.check([key])
        }
        require_same_pasts(pasts)


def require_same_pasts(pasts: Mapping[int, Past]) -> None:
    """Raise with rank and parameter unless, for each pair, one past is a prefix of the other."""
    first, *others = sorted(pasts)
    for rank in others:
        mine, theirs = pasts[first], pasts[rank]
        begin, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
        index = next((n for n in range(begin, end) if mine.at(n) != theirs.at(n)), end)
        my_use, their_use = mine.at(index), theirs.at(index)
        over = (mine.ended and their_use is not None) or (theirs.ended and my_use is not None)
        if index < end or over:
            raise ParallelError(_difference(first, my_use, mine, rank, their_use, theirs), HINT)


def _difference(
    first: int, my_use: str | None, mine: Past, rank: int, their_use: str | None, theirs: Past
) -> str:
    verb, name = _parts(my_use)
    their_verb, their_name = _parts(their_use)
    # A rank in its backward pass, or at the end of its step, will not use a weight of the forward
    # pass.
    mine_over = mine.ended or verb != "gather"
    theirs_over = theirs.ended or their_verb != "gather"
    if "change" in (verb, their_verb):
        pass
    elif verb == "gather" and theirs_over and name not in theirs.names():
        return f"rank {rank} does not use {name}, which rank {first} uses"
    elif their_verb == "gather" and mine_over and their_name not in mine.names():
        return f"rank {first} does not use {their_name}, which rank {rank} uses"
    return (
        f"rank {rank} {_PHRASES[their_verb].format(their_name)} where rank {first}"
        f" {_PHRASES[verb].format(name)}"
    )


_PHRASES = {
    "change": "changed its parameters ({})",
    "gather": "uses {}",
    "regather": "uses {} again",
    "reduce": "has a gradient for {}",
    "": "is finished",
}


def _parts(use: str | None) -> tuple[str, str]:
    verb, _, name = (use or "").partition(" ")
    return verb, name
