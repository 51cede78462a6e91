"""`stepscope check` for wrappers and optimizers of several ranks: correct ones pass, planted
mistakes are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graded import SIMPLE, codes, grade, planted

WAIT = ("            handle.wait()\n", "            pass\n")
DIVIDE = ("        p.grad /= dist.get_world_size()\n        self.handles", "        self.handles")
BROADCAST = "            dist.broadcast(p.data, 0)\n"
OWNER = "            dist.broadcast(p.data, rank)"
AVERAGE = "            flat /= dist.get_world_size()\n"
PRESENT = " if p.grad is not None]\n            if grads"
TORCH = """
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as ShardedOptimizer
from torch.distributed.fsdp import fully_shard


class DDP(nn.parallel.DistributedDataParallel):
    def __init__(self, module):
        super().__init__(module, find_unused_parameters=True)


class FSDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        for child in module.children():
            fully_shard(child)
        self.module = fully_shard(module)

    def forward(self, *inputs):
        return self.module(*inputs)

    def gather_full_params(self):
        return {name: p.full_tensor() for name, p in self.module.named_parameters()}
"""
OURS = """
from stepscope.parallel import DDP as _DDP
from stepscope.parallel import FSDP, ShardedOptimizer


def DDP(module):
    return _DDP(module, missing_gradients="zero")


class DDPBucketed(_DDP):
    def __init__(self, module, bucket_size_mb):
        super().__init__(module, "bucketed", bucket_size_mb)
"""


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Forget the graded file: each test writes its own of that name."""
    before, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mine") or name == SIMPLE.stem:
            del sys.modules[name]
    sys.path[:] = path


@pytest.mark.parametrize(
    ("kind", "criteria"),
    [
        ("DDP", ("start", "tied", "frozen", "buffers")),
        ("DDPBucketed", ("small-buckets", "one-bucket", "dtypes")),
        ("FSDP", ("weights", "tied", "frozen", "unused", "sharded", "compute-dtype")),
        ("ShardedOptimizer", ("weights", "tied", "sharded", "groups", "schedule", "few")),
    ],
)
def test_a_correct_implementation_has_no_faults(kind: str, criteria: tuple[str, ...]) -> None:
    for criterion in criteria:
        outcome = grade(SIMPLE, kind, criterion)
        assert (outcome.faults, outcome.notes) == ((), ()), criterion


@pytest.mark.parametrize("library", ["torch", "ours"])
def test_correct_libraries_have_no_faults(library: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TORCH if library == "torch" else OURS)
    for kind, criterion in (
        ("DDP", "unused"),
        ("DDP", "uneven"),
        ("DDP", "buffers"),
        ("FSDP", "weights"),
        ("FSDP", "sharded"),
        ("ShardedOptimizer", "weights"),
    ):
        outcome = grade(file, kind, criterion)
        assert (outcome.faults, outcome.notes) == ((), ()), f"{kind} {criterion}"


PLANTED = {
    "no wait": ("DDP", "weights", "missing-wait", [WAIT]),
    "wait after the step": (
        "DDP",
        "weights",
        "missing-wait",
        [WAIT, ("        self.handles.clear()\n", "")],
    ),
    "sum": ("DDP", "weights", "summed", [DIVIDE]),
    "wrong world size": (
        "DDP",
        "weights",
        "wrong-average",
        [("p.grad /= dist.get_world_size()\n        self", "p.grad /= 3\n        self")],
    ),
    "divided twice": (
        "DDP",
        "weights",
        "divided-twice",
        [("p.grad /= dist.get_world_size()\n        self", "p.grad /= 4\n        self")],
    ),
    "not reduced": (
        "DDP",
        "weights",
        "not-synchronized",
        [("self.handles.append(dist.all_reduce(p.grad, async_op=True))", "p.grad *= 2")],
    ),
    "parameters not broadcast": ("DDP", "start", "missing-broadcast", [(BROADCAST, "")]),
    "frozen parameters not broadcast": (
        "DDP",
        "start",
        "missing-broadcast",
        [
            (
                BROADCAST,
                "            if p.requires_grad:\n                dist.broadcast(p.data, 0)\n",
            )
        ],
    ),
    "buffers not broadcast": (
        "DDP",
        "buffers",
        "missing-broadcast",
        [("            dist.broadcast(b, 0)", "            pass")],
    ),
    "tied counted twice": (
        "DDP",
        "tied",
        "tied-doubled",
        [
            (
                "        self.handles.clear()\n",
                "        self.handles.clear()\n"
                "        seen = set()\n"
                "        for _, p in self.module.named_parameters(remove_duplicate=False):\n"
                "            if p in seen:\n"
                "                p.grad *= 2\n"
                "            seen.add(p)\n",
            )
        ],
    ),
    "unused gradient assumed": (
        "DDPBucketed",
        "unused",
        "raises",
        [(PRESENT, "]\n            if grads")],
    ),
    "buckets not averaged": ("DDPBucketed", "weights", "summed", [(AVERAGE, "")]),
    "bucket read before the wait": (
        "DDPBucketed",
        "weights",
        "missing-wait",
        [("            work.wait()\n", "")],
    ),
    "no update from the owner": (
        "ShardedOptimizer",
        "weights",
        "stale-shard",
        [(OWNER, "            pass")],
    ),
    "broadcast not awaited": (
        "ShardedOptimizer",
        "weights",
        "missing-wait",
        [(OWNER, "            dist.broadcast(p.data, rank, async_op=True)")],
    ),
    "options not passed on": (
        "ShardedOptimizer",
        "weights",
        "options-ignored",
        [("own = {**group, ", "own = {")],
    ),
    "state of all parameters": (
        "ShardedOptimizer",
        "sharded",
        "not-sharded",
        [("if self.owner[p] == dist.get_rank()]", "]")],
    ),
    "shards not reduced": (
        "FSDP",
        "weights",
        "not-synchronized",
        [
            (
                "dist.reduce_scatter_tensor(own, grad.contiguous())",
                "own.copy_(size * grad.chunk(size)[dist.get_rank()])",
            )
        ],
    ),
    "full weight kept over the step": (
        "FSDP",
        "weights",
        "stale-shard",
        [
            (
                "        m.weight = Gather",
                "        if hasattr(m, 'full'):\n"
                "            m.weight = m.full + (m.weight - m.weight.detach())\n"
                "            return\n"
                "        m.full = Gather.apply(m.shard, self.dtype).detach()\n"
                "        m.weight = Gather",
            )
        ],
    ),
    "shards of other ranks kept over the step": (
        "FSDP",
        "weights",
        "stale-shard",
        [
            (
                "        m.weight = Gather",
                "        if hasattr(m, 'full'):\n"
                "            rank, size = dist.get_rank(), dist.get_world_size()\n"
                "            m.full.chunk(size)[rank].copy_(m.shard.detach())\n"
                "            m.weight = m.full.clone() + (m.weight - m.weight.detach())\n"
                "            return\n"
                "        m.full = Gather.apply(m.shard, self.dtype).detach()\n"
                "        m.weight = Gather",
            )
        ],
    ),
    "another copy is gathered": (
        "FSDP",
        "weights",
        "stale-shard",
        [
            (
                "for name, p in self.shards.items()}",
                "for name, p in self.first.items()}",
            ),
            (
                "                m.shard = known[full]\n",
                "                m.shard = known[full]\n                self.first = {\n"
                "                    n: p.detach().clone() for n, p in self.shards.items()\n"
                "                }\n",
            ),
        ],
    ),
    "shards summed": ("FSDP", "weights", "summed", [("own.float() / size", "own.float()")]),
    "tied weights sharded apart": (
        "FSDP",
        "tied",
        "tied-apart",
        [("if full not in known:", "if True:")],
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    kind, criterion, code, edits = PLANTED[mistake]
    outcome = grade(planted(tmp_path, *edits), kind, criterion)
    assert codes(outcome) == {code}, outcome.faults


def test_a_missing_wait_is_named_with_its_line(tmp_path: Path) -> None:
    file = planted(tmp_path, WAIT)
    (fault,) = grade(file, "DDP", "weights").faults
    lines = file.read_text().splitlines()
    issued = next(n for n, line in enumerate(lines, 1) if "self.handles.append" in line)
    assert f"mine.py:{issued}" in fault.text


def test_a_hang_is_named_by_the_collective(tmp_path: Path) -> None:
    edit = (
        "        for handle in self.handles:\n",
        "        if dist.get_rank():\n            dist.barrier()\n        for handle in"
        " self.handles:\n",
    )
    file = planted(tmp_path, edit)
    (fault,) = grade(file, "DDP", "weights", seconds=3.0).faults
    assert fault.code == "hang"
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "barrier" in text)
    assert f"barrier (mine.py:{line}) on rank 1" in fault.text


def test_a_bucket_that_waits_for_an_unused_parameter_hangs(tmp_path: Path) -> None:
    """The bucket is never full: nobody reduces it, and its event never comes."""
    edit = (
        "            if grads:\n",
        "            while len(grads) < len(bucket) and dist.get_rank():\n"
        "                __import__('time').sleep(0.01)\n            if grads:\n",
    )
    (fault,) = grade(planted(tmp_path, edit), "DDPBucketed", "one-bucket", seconds=3.0).faults
    assert fault.code == "hang"
    assert "mine.py" in fault.text
