"""Which ranks answer, when a collective fails or does not complete in time.

A collective that loses a peer fails with the text of its backend, which names no rank, and on a
rank that was only closed by another one it names the wrong address. Ranks therefore keep a separate
gloo group that is used once, after a failure: every rank sends a message to every other rank and
waits for theirs. Ranks on the same side of a network partition hear each other, also if none of
them reaches rank 0, so each side names the ranks of the other one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from stepscope.errors import one_line
from stepscope.parallel.errors import ParallelError, PeerLost
from stepscope.parallel.heartbeat import HEARTBEAT

_MAX_ANSWER_S = 10.0
_ANSWER_SHARE, _SPARE_SHARE = 0.2, 0.05
"""Shares of a group's timeout, the first up to the maximum: in which ranks answer after a failure,
and which is left when the error is raised. A rank that computes during all of it counts as
silent."""
T = TypeVar("T")


class Peers:
    """The ranks of a process group, and their nodes."""

    def __init__(self, group: dist.ProcessGroup, *, is_world: bool) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self.timeout = timeout_of(group)
        answer_s = min(_MAX_ANSWER_S, _ANSWER_SHARE * self.timeout.total_seconds())
        self._answer = timedelta(seconds=answer_s)
        self.patience = self.timeout * (1 - _SPARE_SHARE) - self._answer
        """Longest wait for a collective, such that a failure is reported within the timeout."""
        self._group = _new_group(self._ranks, self.timeout, is_world=is_world)
        self._nodes: list[str] = [""] * len(self._ranks)
        dist.all_gather_object(self._nodes, _node(), group=self._group)
        self._failure: ParallelError | None = None

    def failure(self, error: Exception) -> ParallelError:
        """The error to raise instead of one of a collective; waits for the answers of the ranks."""
        if self._failure is None:
            with HEARTBEAT.waiting():
                silent = self._silent()
            self._failure = (
                self._lost(silent)
                if silent
                else ParallelError(
                    f"a collective failed, although every rank answers: {one_line(error)}",
                    "a connection was interrupted or a rank was late; restart from a checkpoint",
                )
            )
        return self._failure

    def _silent(self) -> list[int]:
        """Ranks of the job from which no message arrives in time."""
        until = time.monotonic() + self._answer.total_seconds()
        silent = {index for index, rank in enumerate(self._ranks) if rank != self._own}
        sent = []
        for index in sorted(silent):
            # Fails if the connection is closed; a rank that is not reachable does not answer.
            with suppress(RuntimeError):
                sent.append(self._group.send([torch.ones(1)], index, 0))
        while silent and (left := until - time.monotonic()) > 0:
            try:
                work = self._group.recv_anysource([torch.empty(1)], 0)
                work.wait(timedelta(seconds=left))
            except RuntimeError:
                break
            silent.discard(work._source_rank())
        return [self._ranks[index] for index in sorted(silent)]

    def _lost(self, silent: Sequence[int]) -> PeerLost:
        node_of = dict(zip(self._ranks, self._nodes, strict=True))
        several = len(set(self._nodes)) > 1
        parts, lost_nodes = [], []
        for node in dict.fromkeys(node_of[rank] for rank in silent):
            here = [rank for rank in silent if node_of[rank] == node]
            named = f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))}"
            if several and all(rank in here for rank, of in node_of.items() if of == node):
                lost_nodes.append(node)
                parts.append(f"{node} ({named})")
            else:
                parts.append(f"{named} on {node}" if several else named)
        what = f"rank {self._own} lost contact with {' and '.join(parts)}"
        return PeerLost(what, silent, lost_nodes)


_PEERS: WeakKeyDictionary[dist.ProcessGroup, Peers] = WeakKeyDictionary()


def connect_peers(group: dist.ProcessGroup | None) -> Peers:
    """The peers of a group, which all its ranks connect together the first time; collective."""
    resolved = _resolved(group)
    if resolved not in _PEERS:
        _PEERS[resolved] = Peers(resolved, is_world=group is None)
    return _PEERS[resolved]


def new_message_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the same ranks for messages between CPUs, with the timeout of the group;
    collective."""
    peers = connect_peers(group)
    ranks = dist.get_process_group_ranks(_resolved(group))
    made = _new_group(ranks, peers.timeout, is_world=group is None)
    _PEERS[made] = peers
    return made


def _new_group(ranks: list[int], timeout: timedelta, *, is_world: bool) -> dist.ProcessGroup:
    make = partial(
        dist.new_group,
        ranks,
        timeout=timeout,
        backend="gloo",
        use_local_synchronization=not is_world,
    )
    made: dist.ProcessGroup = BoundedCalls().call(make, timeout.total_seconds())
    return made


def finish(work: Any, group: dist.ProcessGroup | None) -> None:
    """Wait for a collective. Raise PeerLost, naming the ranks, if it fails or does not complete
    within the timeout of its group."""
    peers = _PEERS.get(_resolved(group))
    with HEARTBEAT.waiting():
        if peers is None or waits_on_device(group):
            work.wait()
            return
        with answered(group):
            work.wait(peers.patience)


@contextmanager
def answered(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Replace the error of a collective inside by one that names the ranks that do not answer."""
    try:
        yield
    except RuntimeError as error:
        peers = _PEERS.get(_resolved(group))
        if peers is None:
            raise
        raise peers.failure(error) from error


def waits_on_device(group: dist.ProcessGroup | None) -> bool:
    """True for NCCL, with which the CPU does not wait for a collective."""
    return bool(dist.get_backend(group) == "nccl")


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a group's collectives."""
    resolved: Any = _resolved(group)
    options = getattr(resolved._get_backend(resolved._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


def _resolved(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    resolved = group or dist.group.WORLD
    assert resolved is not None
    return resolved


def _node() -> str:
    """The node of this rank: its number under torchrun, and the name of the host."""
    number, host = os.environ.get("GROUP_RANK"), socket.gethostname()
    return host if number is None else f"node {number} ({host})"


class NoAnswer(ParallelError):  # noqa: N818
    """The rendezvous store, which is on the node of rank 0, did not answer in time."""

    def __init__(self) -> None:
        host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        where = f" at {host}:{port}" if host and port else ""
        super().__init__(
            f"the rendezvous store of rank 0{where} does not answer",
            "check the process of rank 0, and the network between the nodes",
        )


class BoundedCalls:
    """Calls of a store that return in bounded time. A client of TCPStore waits without a limit for
    an answer that the network has lost."""

    def __init__(self) -> None:
        self._running: threading.Thread | None = None

    def call(self, function: Callable[[], T], limit_s: float) -> T:
        """Return the result; raise NoAnswer after the limit, or while an earlier call waits."""
        if self._running is not None and self._running.is_alive():
            raise NoAnswer
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(function())
            except Exception as error:
                errors.append(error)

        self._running = threading.Thread(target=run, daemon=True)
        self._running.start()
        self._running.join(limit_s)
        if errors:
            raise errors[0]
        if not results:
            raise NoAnswer
        return results[0]
