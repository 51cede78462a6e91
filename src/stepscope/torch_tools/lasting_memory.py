"""GPU memory of its own for tensors that last, such as the states of an optimizer.

The first training step allocates them between activations. Once those are freed, each lasting
tensor keeps the rest of its segment reserved, in gaps that a CUDA graph, which has a pool of its
own, cannot use.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from stepscope.torch_tools.capturing import is_capturing


class LastingMemory:
    """A memory pool per device, made when it is first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, torch.cuda.MemPool] = {}

    def allocations(self, device: torch.device) -> AbstractContextManager[Any]:
        """Allocate from the pool within this, on a GPU and outside of CUDA graphs."""
        if device.type != "cuda" or not torch.cuda.is_initialized() or is_capturing():  # type: ignore[no-untyped-call]
            return nullcontext()
        index = torch.cuda.current_device() if device.index is None else device.index
        pool = self._pools.get(index)
        if pool is None:
            pool = self._pools[index] = torch.cuda.MemPool(use_on_oom=True)
        return torch.cuda.use_mem_pool(pool, device)
