"""Cost of `stepscope.Observer`, and what it finds on four ranks.

    python benchmarks/observer_cost.py [--out results/observer_cpu.jsonl] [--steps 10000]

- Cost: CPU time of a step with the observer minus that without, of the training's thread and of all
  threads, for a small model in DistributedDataParallel with a DataLoader: the difference of the
  least of many short repetitions, which other work on the machine disturbs least. Its share of a
  step of 100 ms follows.
- Planted: steps of 100 ms on four gloo ranks, of which one computes 5 % longer, or waits 5 ms
  longer for its loader. A line says at which step it was named.
- Even: `--steps` steps of 10 ms, and a tenth of them on four gloo ranks, where each step of each
  rank has another length (20 % standard deviation). A line has the number of alarms.

Computation has its length by sleeping until it is over, so that the ranks need few cores; even
steps end on a schedule. With other work on the machine, `chrt -f 10` gives them priority over it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope.measure.device import cpu_name
from stepscope.parallel import Limits, launch

RANKS, SLOW = 4, 2
COST_STEPS, REPEATS, STEP_MS = 100, 60, 100.0
LATE = 0.05
PLANTED_STEPS = 50
NOISE = 0.2


def on_ranks(function: Any, *arguments: Any, ranks: int = RANKS) -> list[Any]:
    limits = Limits(start=600.0, step=3600.0, beat=60.0, total=3600.0)
    return launch(
        function, arguments, ranks=ranks, backend="gloo", device="cpu", limits=limits, threads=1
    )


class Rows(Dataset[torch.Tensor]):
    def __init__(self, wait_s: float = 0.0) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._wait_s:
            time.sleep(self._wait_s)
        return torch.full((8,), float(index % 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    (cost,) = on_ranks(cost_of_a_step, ranks=1)
    lines = [{"what": "cost", **cost}]
    for what in ("straggler", "loader"):
        lines.append({"what": what, **on_ranks(planted, what)[0]})
    lines.append({"what": "even", **on_ranks(unplanted, "even", options.steps, ranks=1)[0]})
    lines.append({"what": "noisy", **on_ranks(unplanted, "noisy", options.steps // 10)[0]})
    about = {
        "processor": cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = "\n".join(json.dumps(line | about) for line in lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def training(wait_s: float = 0.0) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, iter(DataLoader(Rows(wait_s)))


def step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    length_s: float = 0.0,
    end_s: float = 0.0,
) -> None:
    """Compute for `length_s` once the batch is there, or until `end_s`."""
    batch = next(batches)
    end_s = end_s or time.perf_counter() + length_s
    loss = model(batch).pow(2).mean()
    time.sleep(max(0.0, end_s - time.perf_counter()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def cost_of_a_step(_: object) -> dict[str, Any]:
    parts = training()

    def each() -> tuple[float, float]:
        thread, process = time.thread_time(), time.process_time()
        for _ in range(COST_STEPS):
            step(*parts)
        return (time.thread_time() - thread) / COST_STEPS, (
            time.process_time() - process
        ) / COST_STEPS

    bare, observed = [], []
    for _ in range(REPEATS):
        bare.append(each())
        with tempfile.TemporaryDirectory() as folder:
            observer = stepscope.Observer(folder, trace=False)
            for _ in range(20):
                step(*parts)
            observed.append(each())
            observer.close()
    thread, process = (
        min(times[index] for times in observed) - min(times[index] for times in bare)
        for index in (0, 1)
    )
    return {
        "thread_us": thread * 1e6,
        "process_us": process * 1e6,
        "share_of_100_ms": process / (STEP_MS / 1e3),
    }


def planted(_: object, what: str) -> dict[str, Any]:
    """Return the step at which the slow rank was named."""
    slow = dist.get_rank() == SLOW
    length_s = STEP_MS / 1e3 * (1 + LATE * (slow and what == "straggler"))
    wait_s = STEP_MS / 1e3 * LATE * (slow and what == "loader")
    parts = training(wait_s)
    with tempfile.TemporaryDirectory() as own:
        observer = stepscope.Observer(_shared(own), trace=False)
        for _ in range(PLANTED_STEPS):
            step(*parts, length_s)
        # The first rank compares the last lines, which the others write at the same time.
        time.sleep(1.0)
        observer.close()
        dist.barrier()
    alarm = next(iter(observer.alarms), None)
    if alarm is None:
        return {"named_at": None}
    return {"named_at": alarm.step, "rank": alarm.rank, "part": alarm.part, "planted": SLOW}


def unplanted(_: object, what: str, steps: int) -> dict[str, Any]:
    """Return the number of alarms of all ranks."""
    parts = training()
    lengths = random.Random(dist.get_rank())
    with tempfile.TemporaryDirectory() as own:
        observer = stepscope.Observer(_shared(own), trace=False)
        dist.barrier()
        end_s = time.perf_counter()
        for _ in range(steps):
            end_s += 0.01
            noisy = {"length_s": 0.01 * lengths.lognormvariate(0.0, NOISE)}
            step(*parts, **(noisy if what == "noisy" else {"end_s": end_s}))
        observer.close()
        alarms: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(alarms, [one.text for one in observer.alarms])
    found = [text for texts in alarms for text in texts]
    return {"ranks": len(alarms), "steps": steps, "alarms": len(found), "texts": found[:4]}


def _shared(folder: str) -> str:
    """The folder of the first rank."""
    name = [folder]
    dist.broadcast_object_list(name, 0)
    return name[0]


if __name__ == "__main__":
    main()
