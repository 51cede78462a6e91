"""What FSDP2 costs on one rank, and what `accelerate(compile=True)` gains within it.

    python benchmarks/fsdp2.py --out fsdp2.jsonl --minutes 3         as often as blocks are missing
    python benchmarks/fsdp2.py --out fsdp2.jsonl --minutes 3 --fp8   weights gathered in FP8, too
    python benchmarks/fsdp2.py --tiny --device cpu                   sizes for a CPU, over gloo

One rank over NCCL gathers and reduces through the same code as many, without a link: the hooks,
copies and streams of FSDP2 cost what they cost elsewhere. A turn has one setting of
`reshard_after_forward`, and each form twice in ABBA order, in blocks of consecutive steps. Each
block is written when it is measured; a run begins with the first block that the file lacks, and
begins none after `--minutes`. Forms in FSDP2 gather in bfloat16 (`--policy bfloat16`), or in
float32 under autocast as the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
"""Accelerated, with weights gathered in FP8: needs a GPU with FP8."""
SHARDED = {
    f"fsdp2-{setting}{ending}": (setting, ending.removeprefix("-"))
    for setting in (FREED, KEPT)
    for ending in ("", "-compile-blocks", "-accelerate", FP8)
}
FORMS = (BARE, OURS, *SHARDED)
MOST_ADDED = 0.02
"""Of the step: what FSDP2 may add to the accelerated model beyond what it adds to the bare one."""
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


def forms_of(setting: str, args: argparse.Namespace) -> list[str]:
    """Return the forms of a turn."""
    sharded = [form for form, (one, _) in SHARDED.items() if one == setting]
    return [x for x in (BARE, OURS, *sharded) if x in args.forms]


def measured(
    bench: ShardedBench, args: argparse.Namespace, known: Sequence[Line]
) -> Iterator[Line]:
    """Measure the blocks that are missing until the time is up."""
    deadline = time.monotonic() + 60 * args.minutes
    for number, setting in itertools.product(range(args.rounds), args.settings):
        forms, turn = forms_of(setting, args), f"{number} {setting}"
        blocks = known_blocks(forms, [x for x in known if x["turn"] == turn])
        for line in Turns(bench, forms).lines(blocks, deadline):
            yield line | {"turn": turn, "policy": args.policy, "forms": args.forms}


def known_blocks(forms: Sequence[str], lines: Sequence[Line]) -> set[int]:
    """Return the blocks of a turn that are not measured again; a form that failed has no other."""
    failed = {x["form"] for x in lines if "skipped" in x}
    order = [*forms, *reversed(forms)]
    return {x["block"] for x in lines} | {at for at, form in enumerate(order) if form in failed}


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
    """Say for each setting what FSDP2 adds to either form, and the ratio to compiled blocks."""
    for setting in (FREED, KEPT):
        # A clock that falls changes all forms of a turn alike.
        of_setting = [x for x in lines if x["turn"].endswith(f" {setting}")]
        found = summary(of_setting)
        for form, (ms, gib) in found.items():
            blocks = sum(x["form"] == form for x in of_setting)
            yield f"{setting:8} {form:30} {ms:10.3f} ms {gib:8.2f} GiB {blocks} blocks"
        for one in of_setting:
            if "skipped" in one:
                yield f"{setting:8} {one['form']:30} failed: {one['skipped']}"
        plain, blocks, ours, in_fp8 = (
            found.get(f"fsdp2-{setting}{ending}", (None, 0.0))[0]
            for ending in ("", "-compile-blocks", "-accelerate", FP8)
        )
        if ours is None:
            continue
        if plain is not None and {BARE, OURS} <= found.keys():
            added = ours - found[OURS][0], plain - found[BARE][0]
            share = (added[0] - added[1]) / found[OURS][0]
            yield (
                f"{setting}: FSDP2 adds {added[0]:.3f} ms to the accelerated model,"
                f" {added[1]:.3f} ms to the bare one: {share:+.2%} of the step,"
                f" {'within' if share <= MOST_ADDED else 'above'} {MOST_ADDED:.0%}"
            )
        if blocks is not None:
            yield f"{setting}: {blocks / ours:.3f}x the speed of compiled blocks in FSDP2"
        if in_fp8 is not None:
            yield f"{setting}: {ours / in_fp8:.3f}x with weights gathered in FP8"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--row", choices=list(ROWS), default=ROW)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=[one for one in FORMS if not one.endswith(FP8)]
    )
    parser.add_argument("--fp8", action="store_true", help="the forms that gather in FP8, too")
    parser.add_argument("--settings", nargs="+", choices=(FREED, KEPT), default=[FREED, KEPT])
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block")
    parser.add_argument("--minutes", type=float, default=25.0, help="no block begins after that")
    parser.add_argument("--rounds", type=int, default=1, help="turns of a setting at the end")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="file for one JSON line per block")
    args = parser.parse_args(words)
    if args.fp8:
        args.forms = list(dict.fromkeys([*args.forms, *(x for x in FORMS if x.endswith(FP8))]))
    return args


def recorded(args: argparse.Namespace) -> list[Line]:
    """Return the lines of earlier runs of this row, policy and set of forms."""
    if args.out is None or not args.out.exists():
        return []
    lines = map(json.loads, args.out.read_text().splitlines())
    asked = {"row": args.row, "policy": args.policy, "forms": args.forms}
    return [x for x in lines if asked.items() <= x.items()]


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    backend = "nccl" if args.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        lines = recorded(args)
        bench = ShardedBench(ROWS[args.row], args)
        lines += written(args, measured(bench, args, tuple(lines)))
    finally:
        dist.destroy_process_group()
    print("\n".join(judged(lines)))


if __name__ == "__main__":
    sys.exit(main())
