"""Errors name the rank that failed, with its step and stack, in time."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepscope.errors import UsageError
from stepscope.parallel import Limits, RankFailed, World, launch
from stepscope.parallel.heartbeat import HEARTBEAT
from stepscope.parallel.model_layout import require_same_layout

LIMITS = Limits(start=60.0, step=4.0, beat=3.0, total=120.0)
"""Long enough for a busy machine. `benchmarks/rank_faults.py` checks the time limits."""
BY_HEARTBEAT = Limits(start=60.0, step=60.0, beat=3.0, total=120.0)
"""A silent rank makes no progress either: which of two near limits is noticed first is up to the
scheduler."""
FAR_TOO_LONG_S = 30.0
FAULTY_STEP = 3


def train(world: World, fault: str, mark: str) -> int:
    """Six small steps; rank 1 fails in the fourth and writes the time to a file."""
    tensor = torch.ones(8)
    for number in range(6):
        world.step(number)
        if world.rank == 1 and number == FAULTY_STEP:
            Path(mark).write_text(f"{time.monotonic()} {os.getpid()}")
            fail(fault)
        dist.all_reduce(tensor)
    return world.rank


def fail(fault: str) -> None:
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exits":
        os._exit(7)
    elif fault == "raises":
        raise ValueError("no such token")
    elif fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        # Continued so that it dumps its stacks: it must still be here while they are written.
        time.sleep(60)
    elif fault == "is stuck":
        time.sleep(60)
    elif fault == "holds the GIL":
        while True:
            ctypes.PyDLL(None).sleep(60)


def test_every_rank_returns_its_result(tmp_path: Path) -> None:
    assert launch(train, ("none", str(tmp_path / "mark")), ranks=2, limits=LIMITS) == [0, 1]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", "rank 1 died of SIGKILL at step 3"),
        ("exits", "rank 1 ended with exit code 7 at step 3"),
        ("raises", "rank 1 raised ValueError: no such token at step 3"),
        ("is stopped", "rank 1 stopped: no heartbeat for 3 s at step 3"),
        ("is stuck", "rank 1 is stuck: no progress for 4 s at step 3"),
        ("holds the GIL", "rank 1 stopped: no heartbeat for 3 s at step 3"),
    ],
)
def test_a_fault_is_reported(tmp_path: Path, fault: str, message: str) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(RankFailed) as caught:
        launch(
            train, (fault, str(mark)), ranks=2,
            limits=BY_HEARTBEAT if "no heartbeat" in message else LIMITS,
        )  # fmt: skip
    noticed = time.monotonic()
    happened, pid = mark.read_text().split()
    assert str(caught.value) == message
    assert noticed - float(happened) < FAR_TOO_LONG_S
    assert not psutil.pid_exists(int(pid))
    if fault not in ("dies", "exits"):
        assert "in fail" in caught.value.stacks[1]
    if fault in ("is stopped", "is stuck", "holds the GIL"):
        assert "all_reduce" in caught.value.stacks[0]


def leave_early(world: World) -> None:
    world.step(0)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))


def leave_early_unnoticed(world: World) -> None:
    world.step(0)
    if world.rank == 0:
        # Nothing tells this rank that the other one left.
        with HEARTBEAT.waiting():
            time.sleep(FAR_TOO_LONG_S)


@pytest.mark.parametrize("function", [leave_early, leave_early_unnoticed])
def test_a_rank_that_returns_early_is_named(function: Callable[[World], None]) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 returned, but rank 0 wait") as caught:
        launch(function, ranks=2, limits=LIMITS)
    assert caught.value.rank == 1


def hold_the_gil(world: World) -> int:
    """Rank 1 works for 0.2 s of CPU time without a heartbeat, on a core that it hardly gets."""
    world.step(0)
    if world.rank == 1:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        os.nice(8)
        spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        with subprocess.Popen([sys.executable, "-c", spin]) as other:
            started = time.process_time()
            while time.process_time() < started + 0.2:
                sum(range(3_000_000))
            other.kill()
    return world.rank


def test_a_starved_rank_is_not_ended() -> None:
    limits = Limits(start=60.0, step=0.6, beat=0.3, total=120.0)
    assert launch(hold_the_gil, ranks=2, limits=limits) == [0, 1]


def test_a_job_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """As by Ctrl-Z and fg: the ranks and the process that supervises them."""
    mark = tmp_path / "mark"
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_supervisor import *
if __name__ == "__main__":
    print(launch(slow_steps, ({str(mark)!r},), ranks=1, limits=Limits(60.0, 1.5, 1.5, 120.0)))
"""
    script = tmp_path / "job.py"
    script.write_text(code)
    job = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.05)
    stopped = [job.pid, int(mark.read_text())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    output, _ = job.communicate(timeout=100)
    assert (job.returncode, output) == (0, "[0]\n")


def slow_steps(world: World, mark: str) -> int:
    for number in range(10):
        world.step(number)
        Path(mark).write_text(str(os.getpid()))
        time.sleep(0.1)
    return world.rank


def sleep_between_steps(world: World) -> None:
    for number in range(1000):
        world.step(number)
        time.sleep(0.05)


def test_a_job_that_exceeds_its_total_limit_is_ended() -> None:
    with pytest.raises(RankFailed, match="was not finished after 2 s"):
        launch(sleep_between_steps, ranks=2, limits=Limits(total=2.0))


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before: list[Callable[..., object] | int | None] = [signal.getsignal(signal.SIGINT)]
    launch(train, ("none", str(tmp_path / "mark")), ranks=1, limits=LIMITS)
    assert signal.getsignal(signal.SIGINT) == before[0]


def listening_addresses(world: World) -> set[str]:
    world.step(0)
    dist.all_reduce(torch.ones(1))
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_ranks_listen_on_loopback_only() -> None:
    addresses = set().union(*launch(listening_addresses, ranks=2, limits=LIMITS))
    assert addresses <= {"127.0.0.1", "::1"}, addresses


def compare_models(world: World, kind: str) -> str:
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if world.rank == 1 and kind == "shape":
        module[1] = nn.Linear(4, 3)
    if world.rank == 1 and kind == "dtype":
        module[0].to(torch.bfloat16)
    if world.rank == 1 and kind == "frozen":
        module[0].bias.requires_grad_(False)
    if world.rank == 1 and kind == "longer":
        module.append(nn.Linear(2, 2))
    try:
        require_same_layout(module)
    except Exception as error:
        return str(error)
    return "same"


DIFFERENT = {
    "none": "same",
    "shape": "rank 1 has a different model than rank 0: entry 2 is 1.weight (3×4, float32)",
    "dtype": "entry 0 is 0.weight (4×3, bfloat16), on rank 0 0.weight (4×3, float32)",
    "frozen": "0.bias (4, float32, frozen)",
    "longer": "6 entries against 4; 2.weight (2×2, float32) has no counterpart",
}


def compare_all(world: World) -> dict[str, str]:
    return {kind: compare_models(world, kind) for kind in DIFFERENT}


def test_different_models_are_reported_on_every_rank() -> None:
    first, second = launch(compare_all, ranks=2, limits=LIMITS)
    assert first == second
    for kind, message in DIFFERENT.items():
        assert message in first[kind], kind


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


class TestWorld:
    def test_reads_the_variables_of_torchrun(self) -> None:
        world = World.from_environment(device="cpu", variables=TORCHRUN)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
        assert (world.backend, world.device.type, world.rendezvous) == ("gloo", "cpu", "env://")

    @pytest.mark.parametrize(
        ("changes", "options", "message"),
        [
            ({"RANK": "2"}, {}, "RANK is 2 of WORLD_SIZE 2"),
            ({"RANK": "one"}, {}, "RANK is 'one'"),
            ({}, {"backend": "nccl"}, "nccl needs GPUs"),
            ({}, {"backend": "mpi"}, "backend 'mpi' does not exist"),
        ],
    )
    def test_rejects(self, changes: dict[str, str], options: dict[str, str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            World.from_environment(**({"device": "cpu"} | options), variables=TORCHRUN | changes)

    def test_rejects_a_start_without_a_launcher(self) -> None:
        with pytest.raises(UsageError, match="RANK is not set"):
            World.from_environment(variables={})

    def test_rejects_two_ranks_on_one_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(UsageError, match="2 ranks, 1 GPUs here"):
            World.from_environment("nccl", "cuda", TORCHRUN)

    def test_a_port_in_use_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
            alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
            world = World.from_environment("gloo", "cpu", alone)
            with pytest.raises(Exception, match="rank 0 of 1 cannot join"), world.connected(2.0):
                pass


def test_zero_ranks_are_rejected() -> None:
    with pytest.raises(UsageError, match="ranks is 0"):
        launch(train, ranks=0)


def unsendable(_: World) -> Any:
    return {"losses": [1.0], "batches": (n for n in range(3))}


def test_a_result_that_cannot_be_sent_is_reported() -> None:
    pattern = (
        r"rank 0 finished, but its return value cannot be sent: 'batches': a generator \(cannot"
        r" pickle 'generator' object\) before its first step"
    )
    with pytest.raises(RankFailed, match=pattern):
        launch(unsendable, ranks=1, limits=LIMITS)
