"""Find where a step waits for collectives, whoever starts them.

- `Work.wait` is where Python code waits: collectives of `torch.distributed`, FSDP2 on a CPU.
- On a GPU a collective that is not asynchronous runs in the step's own queue, and FSDP2 makes the
  queue wait for an event: both are marked there.
- DistributedDataParallel waits in C++ at the end of the backward, in a callback of the autograd
  engine. A callback that was queued before it marks where that begins.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from stepscope.advisor.observer.clock import StepClock

GRADIENTS = "gradient reduction"
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("broadcast", "reduce", "gather", "scatter", "barrier"),
)
"""Methods of a process group, by their names in torch 2.11 and 2.13."""
_OPERATIONS = dict(
    enumerate(
        (
            *("broadcast", "all_reduce", "all_reduce", "reduce", "all_gather", "all_gather"),
            *("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all"),
            *("send", "recv", "recv", "barrier", "reduce_scatter", "coalesced", "all_reduce"),
        )
    )
)
"""Names by the numbers of `c10d::OpType`."""
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_FSDP_WAITS = {
    "wait_for_unshard": "all-gather of FSDP",
    "_wait_for_post_backward": "reduce-scatter of FSDP",
    "finalize_backward": "reduce-scatter of FSDP",
}


class CollectiveWaits:
    """Reports waits to a clock, while attached."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._plain: list[tuple[Any, str, Any]] = []
        self._ddp = self._finishing = False

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Watch the collectives of a program that trains these models."""
        if not dist.is_available():
            return
        parts = (part for model in models for part in model.modules())
        self._ddp = any(isinstance(part, DistributedDataParallel) for part in parts)
        library: Any = torch._C._distributed_c10d
        self._replace(library.Work, "wait", _name_of_work)
        if self._clock.on_gpu:
            for name in _COLLECTIVES:
                self._replace(library.ProcessGroup, name, lambda *_, name=name: name.strip("_"))
            group = getattr(sys.modules.get(_FSDP), "FSDPParamGroup", None)
            for name, title in _FSDP_WAITS.items():
                self._replace(group, name, lambda *_, title=title: title)

    def remove(self) -> None:
        for owner, name, plain in reversed(self._plain):
            setattr(owner, name, plain)
        self._plain.clear()

    def backward_begins(self, roots: Any) -> None:
        """Mark the end of this backward, before anything that is queued within it."""
        if not self._ddp or _compiled_autograd():
            return
        root = roots[0] if isinstance(roots, tuple | list) and roots else roots
        if isinstance(root, torch.Tensor) and root.requires_grad:
            root.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def backward_ended(self) -> None:
        if self._finishing:
            self._finishing = False
            self._clock.wait_ends()

    def _queue(self, _: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self._gradients_computed)

    def _gradients_computed(self) -> None:
        if not self._finishing:
            self._finishing = True
            self._clock.wait_begins(GRADIENTS)

    def _replace(self, owner: Any, name: str, title: Callable[..., str]) -> None:
        plain = getattr(owner, name, None)
        if plain is None:
            return
        clock = self._clock

        @functools.wraps(plain)
        def waiting(*arguments: Any, **keywords: Any) -> Any:
            clock.wait_begins(title(*arguments))
            try:
                return plain(*arguments, **keywords)
            finally:
                clock.wait_ends()

        self._plain.append((owner, name, plain))
        setattr(owner, name, waiting)


def _name_of_work(work: Any, *_: Any) -> str:
    return _OPERATIONS.get(getattr(work, "_get_op_type", _unknown)(), "collective")


def _unknown() -> int:
    return -1


def _compiled_autograd() -> bool:
    """Compiled autograd would make the hook of a loss part of its graph."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))
