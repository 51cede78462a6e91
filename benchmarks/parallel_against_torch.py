"""Our wrappers against torch's on ranks of this machine: interleaved steps, ratios with intervals.

    python benchmarks/parallel_against_torch.py --context 16 128 \\
        --out results/parallel-against-torch_cpu.jsonl

- `DDP(..., "bucketed")` against DistributedDataParallel.
- ShardedOptimizer against ZeroRedundancyOptimizer, both of AdamW with its defaults; then the
  same with the fused kernel on both sides.
- FSDP against fully_shard.

A round has one step of each, one directly after the other, in alternating order; its ratio is that
of the slowest rank's times. Ratios are medians with their 95 % confidence interval. CPU time is
that of all threads of all ranks. With --out, every sample is stored in a record:
`scripts/make_docs.py` generates a table from them, and `benchmarks/goals.py` compares them with the
goals.
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
from paired_ratio import BASELINE, STEPSCOPE, STUDY, Paired, paired
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe
from stepscope.model import TransformerLM, find_size, with_overrides
from stepscope.parallel import DDP, Limits, ShardedOptimizer, World, launch
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Environment, Record, Series
from stepscope.studies.sharding.cases import BROADCAST, FULLY, TORCH, TORCH_FULLY
from stepscope.studies.sharding.measure import make
from stepscope.training.ranks.steps import Trained, one_step
from stepscope.training.ranks.subject import tokens_fed

NAMES = {
    "ddp": ("bucketed", "DistributedDataParallel"),
    "sharding": ("ShardedOptimizer", "ZeroRedundancyOptimizer"),
    "sharding-fused": ("ShardedOptimizer", "ZeroRedundancyOptimizer, both fused"),
    "fsdp": ("FSDP", "fully_shard"),
}
WARMUP = 3
LIMITS = Limits(start=180.0, step=180.0, beat=60.0, total=3600.0)


def candidates(world: World, pair: str, origin: torch.nn.Module) -> list[Any]:
    """Ours, then torch's: each a call that runs one step and returns its marks."""
    fed = tokens_fed(torch.randint(100, (2, origin.config.context + 1)).to(world.device))
    if pair == "ddp":
        wrap = partial(DistributedDataParallel, gradient_as_bucket_view=True)
        trained = [of_ddp(origin, wrapper) for wrapper in (partial(DDP, strategy="bucketed"), wrap)]
    elif pair == "sharding":
        kinds = (ShardedOptimizer, partial(ZeroRedundancyOptimizer, parameters_as_bucket_view=True))
        trained = [with_defaults(origin, kind) for kind in kinds]
    else:
        names = (FULLY, TORCH_FULLY) if pair == "fsdp" else (BROADCAST, TORCH)
        trained = [make(world, name, partial(copy.deepcopy, origin)) for name in names]
    return [partial(one_step, world, candidate, fed) for candidate in trained]


def of_ddp(origin: torch.nn.Module, wrap: Any) -> Trained:
    module = copy.deepcopy(origin)
    return Trained(wrap(module), module, torch.optim.AdamW(module.parameters()))


def with_defaults(origin: torch.nn.Module, kind: Any) -> Trained:
    module = copy.deepcopy(origin)
    model = DDP(module, "bucketed")
    return Trained(model, module, kind(module.parameters(), torch.optim.AdamW))


def race(world: World, pair: str, size: str, context: int, rounds: int) -> list[list[tuple]]:
    """Wall and CPU time in ms of every step, per candidate."""
    torch.manual_seed(0)
    table = "tiny" if size in ("tiny", "mini", "midi") else "2025"
    both = candidates(
        world,
        pair,
        TransformerLM(with_overrides(find_size(size, table), context=context)).to(world.device),
    )
    taken: list[list[tuple]] = [[], []]
    for number in range(-WARMUP, rounds):
        world.step(number + WARMUP)
        for side in (0, 1) if number % 2 else (1, 0):
            spent = time.process_time()
            wall = both[side]()["step"]
            if number >= 0:
                taken[side].append((wall, (time.process_time() - spent) * 1e3))
    return taken


def record_of(
    pair: str, context: int, args: argparse.Namespace, here: Environment, run: str
) -> Record:
    began, clock = datetime.now(UTC), time.monotonic()
    ranks = launch(
        race,
        (pair, args.size, context, args.rounds),
        ranks=args.ranks,
        backend="gloo",
        device=args.device,
        limits=LIMITS,
    )
    series = [
        Series(
            name=kind,
            variant=side,
            unit="ms",
            rank=rank,
            values=tuple(step[index] for step in times[number]),
        )
        for rank, times in enumerate(ranks)
        for number, side in enumerate((STEPSCOPE, BASELINE))
        for index, kind in enumerate(("step", "cpu"))
    ]
    stepscope, baseline = NAMES[pair]
    return Record(
        id=secrets.token_hex(6),
        run=run,
        study=STUDY,
        case=f"{pair}_{args.size}_c{context}_r{args.ranks}",
        config={
            "stepscope": stepscope,
            "baseline": baseline,
            "size": args.size,
            "context": context,
            "ranks": args.ranks,
            "rounds": args.rounds,
            "backend": "gloo",
        },
        status="ok",
        environment=here,
        started=began.isoformat(timespec="milliseconds"),
        elapsed_s=time.monotonic() - clock,
        series=tuple(series),
    )


def print_ratio(record: Record, ratio: Paired) -> None:
    config, wall, cpu = record.config, ratio.wall, ratio.cpu
    print(
        f"context {config['context']}, {config['stepscope']} / {config['baseline']}: step"
        f" {wall.median:.3f} [{wall.low:.3f}, {wall.high:.3f}] of {ratio.baseline_ms:.1f} ms,"
        f" CPU time {cpu.median:.3f} [{cpu.low:.3f}, {cpu.high:.3f}]",
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
    args = parser.parse_args()
    here = describe(pick_device(args.device))
    run = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    records = []
    for context in args.context:
        for pair in args.pairs:
            records.append(record_of(pair, context, args, here, run))
            print_ratio(records[-1], paired(records[-1]))
    if args.out is not None:
        write_records(records, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
