"""The sequence of a rank's collectives, and what to say where two ranks would take different ones.

Where the forward itself issues collectives, those of the ranks pair up in the order in which they
come, and a rank that takes another way through the model would mix what it sends with what others
expect; gloo aborts a process whose messages differ in size. So a rank issues without asking only
what came at that place in the last step, which all ranks took alike. Anything else is confirmed
among the ranks first, in one small message: every use of the first step, and later the steps that
differ.

A rank that waits while another asks, or has ended its step, would wait for ever. It writes its past
into the store where the ranks met and reads those of the others: where two differ, the error has
the ranks and the parameter. A rank that is only slow writes nothing, and is waited for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from stepscope.parallel.errors import ParallelError
from stepscope.parallel.heartbeat import HEARTBEAT

PATIENCE = timedelta(seconds=1)
"""A wait that is longer looks for its cause, and again after each of these."""
LONGEST = 4096
"""Uses that are remembered; a step with more of them is confirmed from there on."""
Verb = Literal["gather", "regather", "reduce", "change"]
"""For the forward; again, for the backward; a gradient; parameters that changed."""
HINT = "the forward of every rank must take the same way through the model"


class Past(NamedTuple):
    """What a rank has used since its last step."""

    first: int
    """The number of the first that is remembered."""
    uses: Sequence[str]
    """A verb and a parameter each."""
    ended: bool
    """The backward is over: nothing more comes in this step."""

    @property
    def end(self) -> int:
        return self.first + len(self.uses)

    def at(self, number: int) -> str | None:
        return self.uses[number - self.first] if number < self.end else None

    def names(self) -> set[str]:
        return {use.partition(" ")[2] for use in self.uses}


class Order:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        # NCCL's waits are the device's: the host goes on to the end of the step, where all compare.
        self._on_host = dist.get_backend(group) != "nccl"
        self._store: Store | None = None
        self._place = ""
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
        """`name` is shared by the ranks; `confirm` raises unless all of them have one digest."""
        self._store, self._place = _get_default_store(), f"stepscope/order/{name}"
        self._confirm = confirm

    def use(self, verb: Verb, name: str) -> None:
        """Before a collective is issued for that parameter."""
        place, what = self._forgotten + len(self._uses), f"{verb} {name}"
        self.digest = zlib.crc32(what.encode(), self.digest)
        self._uses.append(what)
        if len(self._uses) > LONGEST:
            del self._uses[0]
            self._forgotten += 1
        expected = place < len(self._last) and self._last[place] == what
        if not expected and self._confirm is not None:
            self._confirm()

    def next_step(self) -> None:
        """All ranks ended this one alike, so nobody reads what was written in the one before."""
        for key in [key for key in self._written if key != self._key(self._rank)]:
            assert self._store is not None
            self._store.delete_key(key)
            self._written.remove(key)
        self._last = [] if self._forgotten else self._uses
        self._step += 1
        self._clear()

    def _key(self, rank: int) -> str:
        return f"{self._place}/{self._step}/{rank}"

    @property
    def past(self) -> Past:
        return Past(self._forgotten, self._uses, self.ended)

    def wait(self, work: dist.Work, *, on_host: bool = False) -> None:
        """Until it is done; raises where it never will be, because ranks went different ways.

        `on_host`: it is no work of the group but a message between hosts.
        """
        with HEARTBEAT.waiting():
            if self._store is None or not (on_host or self._on_host):
                work.wait()
                return
            while True:
                try:
                    work.wait(PATIENCE)
                    return
                except RuntimeError:
                    failed = work.is_completed()
                    self._compare(self._store, 2 * PATIENCE if failed else None)
                    if failed:
                        raise

    def _compare(self, store: Store, until: timedelta | None) -> None:
        """Raise if the others' pasts differ from this one; `until`: how long to wait for them."""
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
    """Raise with rank and parameter where one is not the beginning of the other."""
    first, *others = sorted(pasts)
    for rank in others:
        mine, theirs = pasts[first], pasts[rank]
        begin, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
        number = next((n for n in range(begin, end) if mine.at(n) != theirs.at(n)), end)
        one, other = mine.at(number), theirs.at(number)
        over = (mine.ended and other is not None) or (theirs.ended and one is not None)
        if number < end or over:
            raise ParallelError(_words(first, one, mine, rank, other, theirs), HINT)


def _words(
    first: int, one: str | None, mine: Past, rank: int, other: str | None, theirs: Past
) -> str:
    verb, name = _parts(one)
    their_verb, their_name = _parts(other)
    # A rank that is in its backward, or at the end, will not come to a weight of the forward.
    mine_over = mine.ended or verb != "gather"
    theirs_over = theirs.ended or their_verb != "gather"
    if "change" in (verb, their_verb):
        pass
    elif verb == "gather" and theirs_over and name not in theirs.names():
        return f"rank {rank} does not use {name}, which rank {first} uses"
    elif their_verb == "gather" and mine_over and their_name not in mine.names():
        return f"rank {first} does not use {their_name}, which rank {rank} uses"
    return (
        f"rank {rank} {_SAID[their_verb].format(their_name)} where rank {first}"
        f" {_SAID[verb].format(name)}"
    )


_SAID = {
    "change": "changed its parameters ({})",
    "gather": "uses {}",
    "regather": "uses {} again",
    "reduce": "has a gradient of {}",
    "": "is done",
}


def _parts(use: str | None) -> tuple[str, str]:
    verb, _, name = (use or "").partition(" ")
    return verb, name
