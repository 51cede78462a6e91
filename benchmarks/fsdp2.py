"""What FSDP2 costs on one rank, and what `accelerate(compile=True)` gains within it.

    python benchmarks/fsdp2.py --out fsdp2.jsonl --minutes 20
    python benchmarks/fsdp2.py --tiny --rounds 1           sizes for a CPU, over gloo

One rank over NCCL gathers and reduces through the same code as many, without a link: the hooks,
copies and streams of FSDP2 cost what they cost elsewhere. Each round measures every form twice in
ABBA order, in blocks of consecutive steps in one process. A run continues the rounds in its file.
Forms in FSDP2 gather in bfloat16 (`--policy bfloat16`), or in float32 under autocast as the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from acceleration import Bench, EagerStep, Turns, compute_loss, written
from acceleration_rows import ROWS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import stepscope
from stepscope.acceleration.changes import blocks_of

ROW = "hf_llama_1b"
BARE, OURS = "bare", "accelerate"
FREED, KEPT = "reshard", "keep"
"""After the forward of a block its weights are freed, or kept for the backward pass."""
FP8 = "-fp8"
"""Accelerated, with weights gathered in FP8; of no default, since it needs a GPU with FP8."""
SHARDED = {
    f"fsdp2-{setting}{ending}": (setting, ending.removeprefix("-"))
    for setting in (FREED, KEPT)
    for ending in ("", "-compile-blocks", "-accelerate", FP8)
}
FORMS = (BARE, OURS, *SHARDED)
POLICIES = ("bfloat16", "autocast")
Line = dict[str, Any]


class ShardedBench(Bench):
    """The row as it is, accelerated, and in FSDP2."""

    def step(self, form: str) -> Callable[[Any], Tensor]:
        model = self.model()
        setting, how = SHARDED.get(form, (None, form))
        if setting is not None:
            self._shard(model, reshard=setting == FREED)
        if how == "compile-blocks":
            for block in blocks_of(model):
                block.compile()
        # The parameters are others after sharding.
        optimizer = self._adamw(model)
        casts = setting is not None and self.args.policy == "bfloat16"
        if how in (OURS, "fp8"):
            fixed = {"form": "compiled with passes"}
            compiler = {"compiler": "aot_eager"} if self.args.tiny else {}
            in_fp8 = {"dtype": how} if how == "fp8" else {}
            stepscope.accelerate(model, optimizer, compile=fixed | compiler, **in_fp8)
            dtype = None if casts or in_fp8 else torch.bfloat16
            return stepscope.TrainStep(model, optimizer, dtype=dtype)
        step = EagerStep(model, optimizer, None, self.device)
        return _without_autocast(model, optimizer) if casts else step

    def _shard(self, model: nn.Module, *, reshard: bool) -> None:
        policy = MixedPrecisionPolicy()
        if self.args.policy == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)


def _without_autocast(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Any], Tensor]:
    """Return the step of a model whose policy casts."""

    def run(batch: Any) -> Tensor:
        loss = compute_loss(model, batch, None)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def rounds(bench: ShardedBench, args: argparse.Namespace, known: int) -> Iterator[Line]:
    """Measure rounds until the time is up; the first is always measured."""
    deadline = time.monotonic() + 60 * args.minutes
    for number in range(known, args.rounds):
        if number > known and time.monotonic() > deadline:
            return
        for line in Turns(bench, args.forms).lines():
            yield line | {"round": number, "policy": args.policy}


def summary(lines: Sequence[Line]) -> dict[str, tuple[float, float]]:
    """Return the median step in ms and the peak in GiB by form."""
    times = {
        form: [one for one in lines if one["form"] == form and "median_ms" in one] for form in FORMS
    }
    return {
        form: (
            statistics.median(one["median_ms"] for one in found),
            max(one.get("steps_gib", 0.0) for one in found),
        )
        for form, found in times.items()
        if found
    }


def judged(lines: Sequence[Line]) -> Iterator[str]:
    """Say what FSDP2 adds to either form, and the ratio to compiled blocks in FSDP2."""
    found = summary(lines)
    for form, (ms, gib) in found.items():
        yield f"{form:30} {ms:10.3f} ms {gib:8.2f} GiB"
    for setting in (FREED, KEPT):
        plain, blocks, ours = (
            found.get(f"fsdp2-{setting}{ending}", (None, 0.0))[0]
            for ending in ("", "-compile-blocks", "-accelerate")
        )
        if ours is None:
            continue
        if plain is not None and {BARE, OURS} <= found.keys():
            added = ours - found[OURS][0], plain - found[BARE][0]
            share = (added[0] - added[1]) / found[OURS][0]
            yield (
                f"{setting}: FSDP2 adds {added[0]:.3f} ms to the accelerated model,"
                f" {added[1]:.3f} ms to the bare one: {share:+.2%} of the step"
            )
        if blocks is not None:
            yield f"{setting}: {blocks / ours:.3f}x the speed of compiled blocks in FSDP2"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--row", choices=list(ROWS), default=ROW)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=[one for one in FORMS if not one.endswith(FP8)]
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block")
    parser.add_argument("--minutes", type=float, default=25.0, help="no round begins after that")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in the file at the end")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file for one JSON line per block")
    return parser.parse_args(words)


def recorded(args: argparse.Namespace) -> list[Line]:
    """Return the lines of an earlier run with the same settings, without an unfinished round."""
    if args.out is None or not args.out.exists():
        return []
    lines: Iterable[Line] = map(json.loads, args.out.read_text().splitlines())
    same = [x for x in lines if (x["row"], x["policy"]) == (args.row, args.policy)]
    blocks = 2 * len(args.forms) - 1
    last = {x["round"] for x in same if x["block"] == blocks}
    return [x for x in same if x["round"] in last]


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    backend = "nccl" if args.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        lines = recorded(args)
        known = 1 + max((line["round"] for line in lines), default=-1)
        bench = ShardedBench(ROWS[args.row], args)
        lines += written(args, rounds(bench, args, known))
    finally:
        dist.destroy_process_group()
    print("\n".join(judged(lines)))


if __name__ == "__main__":
    sys.exit(main())
