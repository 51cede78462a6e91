"""A training script of four ranks on two nodes, which loses the network between them.

torchrun starts it. Each rank forks once per wrapper, so that torch is imported once for all of
them, and trains until an error. It writes what was raised, and when, by the clock of the machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepscope.parallel import DDP, FSDP, ShardedOptimizer, World

WRAPPERS = ("DDP", "FSDP", "scatter", "FSDP slow")
READY_STEPS = 3


def train(world: World, wrapper: str, ready: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model: Any = module
    if wrapper != "scatter":
        model = DDP(module) if wrapper == "DDP" else FSDP(module)
    if wrapper == "scatter":
        optimizer: Any = ShardedOptimizer(
            module.parameters(), torch.optim.SGD, form="scatter", lr=0.01
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        world.step(step)
        model(torch.ones(2, 8)).square().sum().backward()
        if wrapper != "scatter":
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        if step == READY_STEPS:
            ready.touch()
        if step > READY_STEPS and wrapper == "FSDP slow":
            # Some ranks reach the next step before the others, and look into the store.
            time.sleep(0.2 * world.rank)


def run(wrapper: str, folder: Path, timeout_s: float) -> None:
    world = World.from_environment(device="cpu")
    report: dict[str, Any] = {}
    try:
        with world.connected(timeout_s):
            train(world, wrapper, folder / f"ready-{wrapper}-{world.rank}")
    except Exception as error:
        report = {
            "at_s": time.monotonic(),
            "type": type(error).__name__,
            "text": str(error),
            "ranks": getattr(error, "ranks", None),
            "nodes": getattr(error, "nodes", None),
        }
    unfinished = folder / f"part-{wrapper}-{world.rank}"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / f"raised-{wrapper}-{world.rank}")


def main(folder: Path, timeout_s: float) -> None:
    children = []
    for number, wrapper in enumerate(WRAPPERS):
        child = os.fork()
        if child == 0:
            # A store of its own, on rank 0.
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 100 + number)
            try:
                run(wrapper, folder, timeout_s)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
