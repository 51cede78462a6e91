"""Our wrappers against torch's, on ranks of this machine: steps in turns, ratios with intervals.

    python benchmarks/parallel_against_torch.py --context 16 128 \\
        --out results/parallel-against-torch_cpu.jsonl

- `DDP(..., "bucketed")` against DistributedDataParallel.
- ShardedOptimizer against ZeroRedundancyOptimizer, both of AdamW with its defaults; then the
  same with the fused kernel on both sides.
- FSDP against fully_shard.

A round has one step of each, right after the other, in an order that changes; its ratio is of the
slowest rank's times. The interval holds the median ratio with 95 % confidence. CPU time is that of
all threads of all ranks. With --out, every sample is kept as a record: `scripts/make_docs.py` makes
a table of them, and `benchmarks/goals.py` compares them with what is wanted.
"""

from __future__ import annotations

import argparse
import copy
import secrets
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepscope.analysis.paired_ratio import OURS, STUDY, THEIRS, Paired, paired
from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe
from stepscope.model import TransformerLM, find_size, with_overrides
from stepscope.parallel import DDP, Limits, ShardedOptimizer, World, launch
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Environment, Record, Series
from stepscope.studies.ddp.measure import GradientStrategy, one_step
from stepscope.studies.ranks.subject import tokens_fed
from stepscope.studies.sharding.cases import BROADCAST, FULLY, TORCH, TORCH_FULLY
from stepscope.studies.sharding.measure import Trained, make, timed_step

NAMES = {
    "ddp": ("bucketed", "DistributedDataParallel"),
    "sharding": ("ShardedOptimizer", "ZeroRedundancyOptimizer"),
    "sharding-fused": ("ShardedOptimizer", "ZeroRedundancyOptimizer, both fused"),
    "fsdp": ("FSDP", "fully_shard"),
}
WARMUP = 3
LIMITS = Limits(start=180.0, step=180.0, beat=60.0, total=3600.0)


def contestants(world: World, pair: str, origin: torch.nn.Module) -> list[Any]:
    """Ours, then torch's; each a call that makes one step and returns its marks."""
    fed = tokens_fed(torch.randint(100, (2, origin.config.context + 1)).to(world.device))
    if pair == "ddp":
        ours, theirs = copy.deepcopy(origin), copy.deepcopy(origin)
        ways = [
            GradientStrategy("ours", DDP(ours, "bucketed"), ours),
            GradientStrategy(
                "theirs", DistributedDataParallel(theirs, gradient_as_bucket_view=True), theirs
            ),
        ]
        return [lambda way=way: one_step(world, way, fed) for way in ways]
    if pair == "sharding":
        kinds = (ShardedOptimizer, partial(ZeroRedundancyOptimizer, parameters_as_bucket_view=True))
        made = [with_defaults(origin, kind) for kind in kinds]
    else:
        names = (FULLY, TORCH_FULLY) if pair == "fsdp" else (BROADCAST, TORCH)
        made = [make(world, name, origin) for name in names]
    return [lambda way=way: timed_step(world, way, fed) for way in made]


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


def record_of(
    pair: str, context: int, asked: argparse.Namespace, here: Environment, run: str
) -> Record:
    began, clock = datetime.now(UTC), time.monotonic()
    ranks = launch(
        race, (pair, asked.size, context, asked.rounds), ranks=asked.ranks, backend="gloo",
        device=asked.device, limits=LIMITS,
    )  # fmt: skip
    series = [
        Series(name=kind, variant=who, unit="ms", rank=rank,
               values=tuple(step[place] for step in held[number]))
        for rank, held in enumerate(ranks)
        for number, who in enumerate((OURS, THEIRS))
        for place, kind in enumerate(("step", "cpu"))
    ]  # fmt: skip
    ours, theirs = NAMES[pair]
    return Record(
        id=secrets.token_hex(6),
        run=run,
        study=STUDY,
        case=f"{pair}_{asked.size}_c{context}_r{asked.ranks}",
        config={
            "ours": ours, "theirs": theirs, "size": asked.size,
            "context": context, "ranks": asked.ranks, "rounds": asked.rounds, "backend": "gloo",
        },
        status="ok",
        environment=here,
        started=began.isoformat(timespec="milliseconds"),
        elapsed_s=time.monotonic() - clock,
        series=tuple(series),
    )  # fmt: skip


def say(record: Record, held: Paired) -> None:
    config, wall, cpu = record.config, held.wall, held.cpu
    print(
        f"context {config['context']}, {config['ours']} / {config['theirs']}: step"
        f" {wall.median:.3f} [{wall.low:.3f}, {wall.high:.3f}] of {held.theirs_ms:.1f} ms, CPU time"
        f" {cpu.median:.3f} [{cpu.low:.3f}, {cpu.high:.3f}]",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--size", default="mini")
    parser.add_argument("--context", type=int, nargs="+", default=[128])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="a .jsonl file for the records")
    asked = parser.parse_args()
    here = describe(pick_device(asked.device))
    run = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    records = []
    for context in asked.context:
        for pair in asked.pairs:
            records.append(record_of(pair, context, asked, here, run))
            say(records[-1], paired(records[-1]))
    if asked.out is not None:
        write_records(records, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
