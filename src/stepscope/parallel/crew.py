"""Run a sequence of tasks on ranks started by torchrun, on one node or several.

Rank 0 leads: it announces the next task in the store of torchrun's agent, where the others wait
for it. Every task has its own process group, so a failed task does not affect later ones.
torchrun detects a rank that dies, ends the job and reports the rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stepscope.errors import one_line
from stepscope.parallel.errors import ParallelError, RankFailed
from stepscope.parallel.heartbeat import HEARTBEAT
from stepscope.parallel.peers import BoundedCalls, NoAnswer
from stepscope.parallel.supervisor import Limits
from stepscope.parallel.world import World

_STORE_TIMEOUT = timedelta(seconds=60)
_POLL_TIMEOUT = timedelta(seconds=30)
"""Time after which a rank that waits for a task asks the store again."""
_TASK_TIMEOUT = timedelta(days=30)
_FIRST_REPORT_TIMEOUT = timedelta(seconds=2)
"""Time a failed rank waits for the report of a rank that failed earlier."""
_REPORT_LIMIT_S = 10.0
T = TypeVar("T")


class Crew:
    """The ranks of a torchrun job, which run one task after the other."""

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self.rank = int(variables["RANK"])
        self.size = int(variables["WORLD_SIZE"])
        self._local_size = int(variables["LOCAL_WORLD_SIZE"])
        agent_hosts_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                variables["MASTER_ADDR"],
                int(variables["MASTER_PORT"]),
                is_master=self.rank == 0 and not agent_hosts_store,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
            )
        except dist.DistError as error:
            raise ParallelError(
                f"rank {self.rank} of {self.size} cannot reach torchrun's store: {error}",
                "is --master-addr reachable from this node?",
            ) from error
        self._store = PrefixStore("stepscope", store)
        self._calls = BoundedCalls()
        self._task = 0

    def announce(self, task: dict[str, Any] | None) -> None:
        """Announce the next task from rank 0; None ends the job."""
        self._task = self._store.add("tasks", 1)
        self._store.set(f"task/{self._task}", json.dumps(task))

    def next_task(self) -> dict[str, Any] | None:
        """Wait for and return the next task announced by rank 0."""
        self._task += 1
        key = f"task/{self._task}"
        until = time.monotonic() + _TASK_TIMEOUT.total_seconds()
        while not self._written(key, _POLL_TIMEOUT) and time.monotonic() < until:
            pass
        task: dict[str, Any] | None = json.loads(self._call(lambda: self._store.get(key)))
        return task

    def _written(self, key: str, within: timedelta) -> bool:
        """Wait for a key of the store; False if it does not appear in time."""
        try:
            self._call(lambda: self._store.wait([key], within), within)
        except dist.DistStoreError:
            return False
        return True

    def _call(self, function: Callable[[], T], wait: timedelta = timedelta()) -> T:
        """Call the store; raise if the network has lost it."""
        return self._calls.call(function, (_STORE_TIMEOUT + wait).total_seconds())

    def run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        backend: str = "auto",
        device: str = "auto",
        limits: Limits = Limits(),  # noqa: B008
    ) -> list[Any]:
        """Like `launch`, on the existing ranks; every rank must call it."""
        HEARTBEAT.step(-1)
        world = World.from_environment(backend, device)
        group = PrefixStore(f"group/{self._task}", self._store)
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self._local_size))
        try:
            with world.connected(max(limits.start, limits.step), group):
                return self._run_and_gather(function, world, arguments)
        finally:
            torch.set_num_threads(threads)

    def _run_and_gather(
        self, function: Callable[..., Any], world: World, arguments: tuple[Any, ...]
    ) -> list[Any]:
        try:
            result = function(world, *arguments)
            results: list[Any] = [None] * self.size
            dist.all_gather_object(results, result)
        except Exception as error:
            # Reported before leaving the group: leaving it makes the others fail.
            raise self._first_failure(error) from error
        return results

    def _first_failure(self, error: Exception) -> RankFailed:
        """Return the first failure in this task; the others are consequences of it."""
        failure = {
            "rank": self.rank,
            "step": HEARTBEAT.step_number,
            "what": f"raised {one_line(error)}",
        }

        def exchange() -> dict[str, Any]:
            index = self._store.add(f"failures/{self._task}", 1)
            self._store.set(f"failure/{self._task}/{index}", json.dumps(failure))
            first = f"failure/{self._task}/1"
            self._store.wait([first], _FIRST_REPORT_TIMEOUT)
            known: dict[str, Any] = json.loads(self._store.get(first))
            return known

        try:
            reported = self._calls.call(exchange, _REPORT_LIMIT_S)
        except NoAnswer:
            # Cut off from the store: only the failure of this rank is known.
            reported = failure
        return RankFailed(reported["rank"], reported["step"], reported["what"], {})
