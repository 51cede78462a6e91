"""Our wrappers against torch's, on ranks of this machine: steps in turns, ratios with intervals.

    python benchmarks/parallel_against_torch.py [--size mini] [--ranks 2] [--rounds 60]

- `DDP(..., "bucketed")` against DistributedDataParallel: at most 1.02 times its step.
- ShardedOptimizer against ZeroRedundancyOptimizer, both of AdamW with its defaults: at most 1.0
  times. Ours takes the fused kernel by itself; then the same with that kernel on both sides.
- FSDP against fully_shard, without a goal.

A round has one step of each, right after the other, in an order that changes; its ratio is of the
slowest rank's times. The interval holds the median ratio with 95 % confidence. Where it holds the
goal, this machine cannot tell. CPU time is that of all threads of all ranks.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepscope.model import TransformerLM, find_size, with_overrides
from stepscope.parallel import DDP, Limits, ShardedOptimizer, World, launch
from stepscope.records.stats import Summary, summarize
from stepscope.studies.ddp.ranks import Way, one_step
from stepscope.studies.sharding.ranks import (
    BROADCAST,
    FULLY,
    TORCH,
    TORCH_FULLY,
    Trained,
    make,
    timed_step,
)

GOALS = {"ddp": 1.02, "sharding": 1.0, "sharding-fused": None, "fsdp": None}
NAMES = {
    "ddp": ("bucketed", "DistributedDataParallel"),
    "sharding": ("ShardedOptimizer", "ZeroRedundancyOptimizer"),
    "sharding-fused": ("ShardedOptimizer", "ZeroRedundancyOptimizer, both fused"),
    "fsdp": ("FSDP", "fully_shard"),
}
RESOLVED = 0.02
WARMUP = 3


def contestants(world: World, pair: str, origin: torch.nn.Module) -> list[Any]:
    """Ours, then torch's; each a call that makes one step and returns its marks."""
    tokens = torch.randint(100, (2, origin.config.context + 1)).to(world.device)
    if pair == "ddp":
        ours, theirs = copy.deepcopy(origin), copy.deepcopy(origin)
        ways = [
            Way("ours", DDP(ours, "bucketed"), ours),
            Way("theirs", DistributedDataParallel(theirs, gradient_as_bucket_view=True), theirs),
        ]
        return [lambda way=way: one_step(world, way, tokens) for way in ways]
    if pair == "sharding":
        kinds = (ShardedOptimizer, partial(ZeroRedundancyOptimizer, parameters_as_bucket_view=True))
        made = [with_defaults(origin, kind) for kind in kinds]
    else:
        names = (FULLY, TORCH_FULLY) if pair == "fsdp" else (BROADCAST, TORCH)
        made = [make(world, name, origin) for name in names]
    return [lambda way=way: timed_step(world, way, tokens) for way in made]


def with_defaults(origin: torch.nn.Module, kind: Any) -> Trained:
    module = copy.deepcopy(origin)
    model = DDP(module, "bucketed")
    return Trained("", model, module, kind(module.parameters(), torch.optim.AdamW))


def race(world: World, pair: str, size: str, context: int, rounds: int) -> list[list[tuple]]:
    """By contestant: wall and CPU time of every step, in ms."""
    torch.manual_seed(0)
    table = "tiny" if size in ("tiny", "mini", "midi") else "2025"
    both = contestants(
        world, pair, TransformerLM(with_overrides(find_size(size, table), context=context))
    )
    taken: list[list[tuple]] = [[], []]
    for number in range(-WARMUP, rounds):
        world.step(number + WARMUP)
        for who in (0, 1) if number % 2 else (1, 0):
            spent = time.process_time()
            wall = both[who]()["step"]
            if number >= 0:
                taken[who].append((wall, (time.process_time() - spent) * 1e3))
    return taken


def ratios(ranks: list[list[list[tuple]]]) -> tuple[Summary, Summary, float]:
    """Wall (of the slowest rank) and CPU time (of all ranks), ours over torch's; torch's median."""
    steps = [
        [[max(r[who][n][0] for r in ranks), sum(r[who][n][1] for r in ranks)]
         for n in range(len(ranks[0][who]))]
        for who in (0, 1)
    ]  # fmt: skip
    wall, cpu = (
        summarize([ours[k] / theirs[k] for ours, theirs in zip(*steps, strict=True)])
        for k in (0, 1)
    )
    return wall, cpu, summarize([theirs[0] for theirs in steps[1]]).median


def verdict(wall: Summary, goal: float | None) -> str:
    width = (wall.high - wall.low) / 2
    if goal is None:
        return ""
    if wall.high <= goal:
        return f"at most {goal:g}: yes"
    if wall.low > goal:
        return f"at most {goal:g}: NO"
    fine = "" if width <= RESOLVED else f"; it resolves {width:.1%}, not {RESOLVED:.0%}"
    return f"at most {goal:g}: this machine cannot tell{fine}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--size", default="mini")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    asked = parser.parse_args()
    missed = 0
    for pair in asked.pairs:
        ranks = launch(
            race,
            (pair, asked.size, asked.context, asked.rounds),
            ranks=asked.ranks, backend="gloo", device=asked.device,
            limits=Limits(start=180.0, step=180.0, beat=60.0, total=3600.0),
        )  # fmt: skip
        wall, cpu, theirs = ratios(ranks)
        said = verdict(wall, GOALS[pair])
        missed += "NO" in said
        print(
            f"{NAMES[pair][0]} / {NAMES[pair][1]}: step {wall.median:.3f}"
            f" [{wall.low:.3f}, {wall.high:.3f}] of {theirs:.1f} ms,"
            f" CPU time {cpu.median:.3f} [{cpu.low:.3f}, {cpu.high:.3f}]. {said}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
