"""Data parallelism: every rank has a replica of the model, and gradients are averaged.

Parameters may be frozen, unfrozen, added, removed, replaced or converted between steps if all ranks
do the same. The next forward pass detects the change, the ranks agree on it, new parameters take
their values from rank 0, and the reductions are planned again. If a rank differs, the error names
the rank and the parameter. The caller must update the optimizer (`add_param_group`).

Persistent buffers (running statistics) are synchronized from rank 0 in every step.
Embeddings with sparse gradients are rejected.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.errors import unknown_name
from stepscope.parallel.agreement import Agreement
from stepscope.parallel.broadcast import broadcast, buffers_identity, running_buffers
from stepscope.parallel.digests import digests
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.guard import (
    NotCopied,
    forgotten,
    refuse_early_steps,
    refuse_sparse_gradients,
)
from stepscope.parallel.model_layout import require_same_layout
from stepscope.parallel.parameter_watch import ParameterWatch, unplanned_gradient
from stepscope.parallel.peers import connect_peers
from stepscope.parallel.reducer import STRATEGIES, Reducer, Strategy
from stepscope.torch_tools.gradient_hooks import hook_of


class SyncTiming(NamedTuple):
    """Timing of the last synchronization by the CPU clock, in seconds."""

    slowest: float
    """Time until the last rank arrived."""
    transfer: float
    """Time from then until all gradients arrived (with a GPU the CPU does not wait for that)."""


class DDP(NotCopied, nn.Module):
    """Data-parallel wrapper of a module.

        model = DDP(module, strategy="bucketed", bucket_mb=25.0)
        loss = loss_of(model(inputs)); loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step(); optimizer.zero_grad()

    `strategy` says how gradients are averaged: `naive` reduces each one after the backward pass,
    `flat` all of them as one, `overlap` each as soon as the backward pass produces it, `bucketed`
    buckets of `bucket_mb` MiB as they fill. The result is the same for all: training as one process
    on the concatenated batch. A parameter without a gradient on some ranks only raises, unless
    `missing_gradients="zero"`.

    Gradients are averaged with equal weight, which is correct if every rank has the same number of
    samples. In a step where they differ, call `batch_of(samples)`: each rank is then weighted by
    its share of all samples, and a rank without samples contributes zero.

    `verify_every=N` compares a digest of all parameters between the ranks before the first step
    and then in every Nth one. It guarantees that ranks whose parameters differ in any bit do not
    train on: within N steps every rank raises an error with the step, a rank and the parameters.
    `verify_parameters()` compares them at once, for example after the last step.

    A rank that ends, hangs or is cut off by the network makes the others raise `PeerLost`, which
    names the ranks, within the timeout of the process group.
    """

    label = "DDP"
    instead = "copy its .module, and wrap the copy if it is to be trained on several ranks"

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy = "overlap",
        bucket_mb: float = 25.0,
        *,
        missing_gradients: Literal["raise", "zero"] = "raise",
        verify_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if strategy not in STRATEGIES:
            raise unknown_name("strategy", strategy, STRATEGIES)
        if not bucket_mb > 0:
            raise ParallelError(f"bucket_mb is {bucket_mb}", "it must be greater than 0")
        if not dist.is_initialized():
            raise ParallelError("there is no process group", "use World.connected or torchrun")
        connect_peers(group)
        self.module = module
        self.timing = SyncTiming(0.0, 0.0)
        self._group = group
        self._world = dist.get_world_size(group)
        self._missing = missing_gradients
        self._strategy, self._bucket_mb = strategy, bucket_mb
        refuse_sparse_gradients(module)
        require_same_layout(module, group)
        self._hooks: list[Any] = []
        self._watch = ParameterWatch(self)
        self._reducer = self._planned()
        self._agreement = Agreement(
            group,
            self._reducer.identity,
            self._reducer.names,
            "different buckets than rank 0",
            "strategy and bucket_mb must be the same on all ranks",
            verify_every=verify_every,
        )
        broadcast([*module.parameters(), *module.buffers()], group)
        self._synchronize = True
        self._samples: int | None = None
        self._factor = 1.0 / self._world
        self._hook()
        weakref.finalize(self, _remove, self._hooks)
        refuse_early_steps(self)

    def _planned(self) -> Reducer:
        named = {
            name.removeprefix("module."): p
            for name, p in self._watch.named.items()
            if p.requires_grad
        }
        return Reducer(
            list(named.values()), list(named), self._strategy, self._bucket_mb, self._group
        )

    def _hook(self) -> None:
        _remove(self._hooks)
        for index, parameter in enumerate(self._reducer.parameters):
            self._hooks.append(hook_of(self, parameter, _ready_at(index)))

    def _follow_changes(self) -> None:
        """Plan again if parameters changed since the last plan; collective in that case."""
        if not self._watch.changed():
            return
        if self.pending:
            raise forgotten(self)
        refuse_sparse_gradients(self.module)
        now = ParameterWatch(self)
        changes = now.changes_since(self._watch)
        if changes:
            self._agreement.agree_on([line.removeprefix("module.") for line in changes])
            broadcast(now.new_since(self._watch), self._group)
        observer, self._watch = self._reducer.observer, now
        if changes:
            self._reducer = self._planned()
            self._reducer.observer = observer
            self._agreement.replan(self._reducer.identity, self._reducer.names)
            self._hook()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.pending and torch.is_grad_enabled() and self.training:
            raise forgotten(self)
        # A forward pass without gradients may run on one rank only.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._follow_changes()
        return self.module(*inputs, **named)

    @property
    def pending(self) -> bool:
        """True if gradients wait for finish_gradient_synchronization to average them."""
        return bool(self._reducer.ready)

    @property
    def steps(self) -> int:
        return self._agreement.steps

    @property
    def message_bytes(self) -> list[int]:
        """Bytes of each reduction of a step, in order."""
        return self._reducer.message_bytes()

    @contextmanager
    def observed(self, observer: Callable[[int, dist.Work], None]) -> Iterator[None]:
        """Call `observer` with the bytes and the work of each reduction as it is issued."""
        self._reducer.observer = observer
        try:
            yield
        finally:
            self._reducer.observer = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside; the first backward pass outside synchronizes the
        sum."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def batch_of(self, samples: int) -> None:
        """Weight this step's gradients by samples; call on every rank before its backward pass."""
        if samples < 0:
            raise ParallelError(f"samples is {samples}", "it must be at least 0")
        # A rank without samples runs no forward pass that would detect the change.
        self._follow_changes()
        total = self._agreement.total(samples)
        if total == 0:
            raise ParallelError("no rank has a sample in this step")
        self._samples, self._factor = samples, samples / total

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over all ranks."""
        reducer, absent = self._reducer, self._samples == 0
        self._require_planned_gradients()
        if not reducer.ready and not absent:
            raise ParallelError(
                "there is no gradient to synchronize",
                "call finish_gradient_synchronization after one backward outside of no_sync()",
            )
        used = [
            index in reducer.ready or parameter.grad is not None
            for index, parameter in enumerate(reducer.parameters)
        ]
        began = time.perf_counter()
        used = self._agreement.exchange(
            used,
            absent=absent,
            allow_missing=self._missing == "zero",
            buffers=buffers_identity(self.module),
            values=self._values() if self._agreement.verifies else None,
        )
        arrived = time.perf_counter()
        reducer.send_rest(used, self._factor)
        reducer.wait(used)
        self.timing = SyncTiming(arrived - began, time.perf_counter() - arrived)
        reducer.reset()
        self._samples, self._factor = None, 1.0 / self._world
        broadcast(list(running_buffers(self.module)), self._group)

    def verify_parameters(self) -> None:
        """Raise on every rank, naming a rank and its parameters, unless the parameters of all ranks
        are equal bit by bit; collective."""
        self._agreement.verify(self._values())

    def _values(self) -> dict[str, int]:
        """Digests of all parameters, frozen ones included."""
        named = dict(self.module.named_parameters())
        return dict(zip(named, digests(named.values()), strict=True))

    def _require_planned_gradients(self) -> None:
        """Raise if the backward pass reached a parameter that is not in this step's plan."""
        if not self._watch.changed():
            return
        name = unplanned_gradient(ParameterWatch(self), set(map(id, self._reducer.parameters)))
        if name is not None:
            raise ParallelError(
                f"the gradient of {name.removeprefix('module.')} is not averaged: it was added or"
                " unfrozen after the wrapper's last forward",
                "change parameters before the forward, and call the wrapper instead of its .module",
            )


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()


def _ready_at(index: int) -> Callable[[DDP, Tensor], None]:
    def ready(wrapper: DDP, _: Tensor) -> None:
        if wrapper._synchronize:
            wrapper._reducer.gradient_is_ready(index, wrapper._factor)

    return ready
