"""What it costs a training step to be recorded: the same step with and without, in turns.

    python benchmarks/recording_cost.py --out results/recording-cost_h200.jsonl
    python benchmarks/recording_cost.py --device cpu

`history` is the allocator's own record of every allocation, with its Python stack, and every free,
which a snapshot is made of (CUDA only). `account` puts every storage on a line, at the
dispatcher: it runs once for each case of the memory study and never while a step is timed, so it
has few rounds. A round has one step of each, in an order
that changes; the interval holds the median of the rounds' ratios with 95 % confidence. It takes
about a minute on a GPU. `benchmarks/goals.py` compares the file with what is wanted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from stepscope.measure.allocator import CudaAllocator, history
from stepscope.measure.device import Device, pick_device
from stepscope.measure.ledger import StorageLedger
from stepscope.records.stats import Summary, summarize
from stepscope.studies.training.peaks import interleaved_steps, one_step
from stepscope.studies.training.transformer import TransformerStep
from stepscope.studies.training.workload import Workload

ON_CUDA = (
    ("small", 128, "bfloat16"),
    ("small", 512, "float32"),
    ("large", 512, "bfloat16"),
    ("2.7b", 512, "bfloat16"),
)
ON_CPU = (("tiny", 64, "float32"), ("mini", 64, "float32"))
WARMUP = 3
ACCOUNT_ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a file of JSON Lines, one for each case")
    options = parser.parse_args()
    device = pick_device(options.device)
    here = {"device": device.name, "torch": torch.__version__}
    for number, (size, context, dtype) in enumerate(ON_CUDA if device.kind == "cuda" else ON_CPU):
        work = Workload(
            size=size, table="2025", context=context, batch=4, dtype=dtype, attention="reference",
            compile="no", optimizer="torch", mode="train-step",
        )  # fmt: skip
        device.release()
        took = measured(work, device, options.rounds)
        for name, ratio in ratios(took).items():
            print(
                f"{work.key}: {summarize(took['plain']).median:.2f} ms; with {name}"
                f" {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                flush=True,
            )
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a" if number else "w") as file:
                file.write(json.dumps({"case": work.key, "ms": took} | here) + "\n")
    return 0


def measured(work: Workload, device: Device, rounds: int) -> dict[str, list[float]]:
    step = TransformerStep(work, device)
    for _ in range(WARMUP):
        one_step(step, device)
    allocator = CudaAllocator(device.torch_device) if device.kind == "cuda" else None

    @contextmanager
    def account() -> Iterator[None]:
        ledger = StorageLedger(device.torch_device, allocator)
        with ledger.watching(step.model, step.optimizer):
            ledger.begin("step")
            yield

    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
    if allocator is not None:
        ways["history"] = history
    took = interleaved_steps(step, device, ways | {"account": account}, ACCOUNT_ROUNDS)
    for name, more in interleaved_steps(step, device, ways, rounds - ACCOUNT_ROUNDS).items():
        took[name] += more
    return took


def ratios(took: dict[str, list[float]]) -> dict[str, Summary]:
    """Of each way over the plain step of its round; not every round has an account."""
    return {
        name: summarize([ms / plain for ms, plain in zip(held, took["plain"], strict=False)])
        for name, held in took.items()
        if name != "plain"
    }


if __name__ == "__main__":
    sys.exit(main())
