"""Training on several ranks: supervised process groups, data parallelism and sharding.

The wrappers accept any module. Importing this package does not import torch; accessing a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.parallel.checkpoint import (
        load_optimizer,
        load_training,
        save_optimizer,
        save_training,
    )
    from stepscope.parallel.crew import Crew
    from stepscope.parallel.ddp import DDP
    from stepscope.parallel.errors import ParallelError, PeerLost, RankFailed
    from stepscope.parallel.fsdp import FSDP
    from stepscope.parallel.sharded_optimizer import ShardedOptimizer
    from stepscope.parallel.supervisor import Limits, launch
    from stepscope.parallel.world import World

_MODULES = {
    "Crew": "crew",
    "DDP": "ddp",
    "FSDP": "fsdp",
    "Limits": "supervisor",
    "ParallelError": "errors",
    "PeerLost": "errors",
    "RankFailed": "errors",
    "ShardedOptimizer": "sharded_optimizer",
    "World": "world",
    "launch": "supervisor",
    "load_optimizer": "checkpoint",
    "load_training": "checkpoint",
    "save_optimizer": "checkpoint",
    "save_training": "checkpoint",
}

__all__ = [
    "DDP",
    "FSDP",
    "Crew",
    "Limits",
    "ParallelError",
    "PeerLost",
    "RankFailed",
    "ShardedOptimizer",
    "World",
    "launch",
    "load_optimizer",
    "load_training",
    "save_optimizer",
    "save_training",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
