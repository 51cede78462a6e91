"""Cost of recording a training step: the same step with and without, interleaved.

    python benchmarks/recording_cost.py --out results/recording-cost_h200.jsonl
    python benchmarks/recording_cost.py --device cpu

`history` is the allocator's history of every allocation, with its Python stack, and every free,
from which a snapshot is made (CUDA only). `account` assigns every storage to a line of the ledger,
at the dispatcher: it runs once per case of the memory study and never while a step is timed, so it
has few rounds. A round has one step of each, in alternating order; ratios are medians of the rounds
with their 95 % confidence interval. It takes about a minute on a GPU. `benchmarks/goals.py`
compares the file with the goals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from stepscope.measure.allocator import CudaAllocator, history
from stepscope.measure.device import Device, pick_device
from stepscope.measure.ledger import StorageLedger
from stepscope.records.stats import Summary, summarize
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

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
    parser.add_argument("--out", type=Path, help="a JSON Lines file, one line per case")
    options = parser.parse_args()
    device = pick_device(options.device)
    here = {"device": device.name, "torch": torch.__version__}
    for number, (size, context, dtype) in enumerate(ON_CUDA if device.kind == "cuda" else ON_CPU):
        work = Workload(size=size, context=context, batch=4, dtype=dtype, mode="train-step")
        device.release()
        times = measured(work, device, options.rounds)
        for name, ratio in ratios(times).items():
            print(
                f"{work.key}: {summarize(times['plain']).median:.2f} ms; with {name}"
                f" {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                flush=True,
            )
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a" if number else "w") as file:
                file.write(json.dumps({"case": work.key, "ms": times} | here) + "\n")
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

    variants: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
    if allocator is not None:
        variants["history"] = history
    times = interleaved_steps(step, device, variants | {"account": account}, ACCOUNT_ROUNDS)
    for name, more in interleaved_steps(step, device, variants, rounds - ACCOUNT_ROUNDS).items():
        times[name] += more
    return times


def one_step(step: TransformerStep, device: Device) -> float:
    """Milliseconds of a step as a caller sees it, from idle device to idle device."""
    step.reset()
    device.synchronize()
    start = time.perf_counter()
    step.run_phases()
    device.synchronize()
    return (time.perf_counter() - start) * 1e3


def interleaved_steps(
    step: TransformerStep,
    device: Device,
    contexts: Mapping[str, Callable[[], AbstractContextManager[object]]],
    rounds: int,
) -> dict[str, list[float]]:
    """Time the step inside each context, interleaved: every round has one sample of each, in an
    order that changes. Entering and leaving a context is not timed."""
    took: dict[str, list[float]] = {name: [] for name in contexts}
    order = list(contexts)
    for _ in range(rounds):
        for name in order:
            with contexts[name]():
                took[name].append(one_step(step, device))
        order = [*order[1:], order[0]]
    return took


def ratios(times: dict[str, list[float]]) -> dict[str, Summary]:
    """Ratios of each variant to the plain step of its round; only some rounds have an account."""
    return {
        name: summarize([ms / plain for ms, plain in zip(own, times["plain"], strict=False)])
        for name, own in times.items()
        if name != "plain"
    }


if __name__ == "__main__":
    sys.exit(main())
