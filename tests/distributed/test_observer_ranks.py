"""`stepscope.Observer` on gloo ranks: a rank that computes or loads longer is named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import stepscope
from ranked import LIMITS
from stepscope.analysis.observed.lines import Alarm, read_folder
from stepscope.parallel import World, launch

SLOW, STEP_S, MOST_STEPS = 2, 0.04, 400


class Rows(Dataset[torch.Tensor]):
    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._wait_s)
        return torch.full((8,), float(index % 7))


def wrapped(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if kind == "ddp":
        return DistributedDataParallel(model)
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def train(world: World, folder: str, kind: str, slow_s: dict[str, float]) -> tuple[Any, ...]:
    """Train until a rank is named; return its alarm and the last line of the rank."""
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    late = {part: seconds * (world.rank == SLOW) for part, seconds in slow_s.items()}
    batches = iter(DataLoader(Rows(late["loader"])))
    observer = stepscope.Observer(folder, every=5, trace=False)
    for number in range(1, MOST_STEPS):
        world.step(number)
        batch = next(batches)
        end_s = time.perf_counter() + STEP_S + late["compute"]
        loss = model(batch).pow(2).mean()
        time.sleep(max(0.0, end_s - time.perf_counter()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 0:
            found = torch.tensor(float(any(map(is_straggler, observer.alarms))))
            dist.broadcast(found, 0)
            if found:
                break
    observer.close()
    return next(filter(is_straggler, observer.alarms), None), observer.latest


def is_straggler(alarm: Alarm) -> bool:
    return alarm.code == "straggler"


@pytest.mark.parametrize(("kind", "part"), [("ddp", "loader"), ("fsdp", "compute")])
def test_the_slow_rank_is_named_with_its_part_and_the_collective(
    kind: str, part: str, tmp_path: Path
) -> None:
    # On an idle machine 5 % are enough (`benchmarks/observer_cost.py`). This one may be busy, and
    # the limit follows from the scatter.
    slow_s = {"compute": 0.0, "loader": 0.0} | {part: 2.5 * STEP_S}
    results = launch(
        train, (str(tmp_path), kind, slow_s), ranks=4, backend="gloo", device="cpu", limits=LIMITS
    )
    alarm = results[0][0]
    assert alarm is not None
    assert (alarm.code, alarm.rank, alarm.part) == ("straggler", SLOW, part)
    expected = "gradient reduction" if kind == "ddp" else "all_gather"
    assert alarm.collective.startswith(expected)
    lines = [line for _, line in results]
    others = [line.communication_ms for rank, line in enumerate(lines) if rank != SLOW]
    assert min(others) > lines[SLOW].communication_ms
    ranks = read_folder(tmp_path)
    assert [one.start.rank for one in ranks] == [0, 1, 2, 3]
    assert {one.start.ranks for one in ranks} == {4}
    assert alarm.text in {one.text for one in ranks[0].alarms}
