"""Captures that fail: each use of a memory pool by a graph is released once."""

from __future__ import annotations

import pytest
import torch

from stepscope.acceleration.graphs import cuda

POOL = (0, 1)


class Device:
    """What a device counts: uses of the pool, as torch's graphs and allocator do."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        """Steps of a capture that raise."""
        self.uses = 0
        self.allocates = self.broken = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Graph:
        completed = False

        def capture_begin(self, **_: object) -> None:
            if "before the pool" in device.fails:
                raise RuntimeError("before the pool")
            device.uses += 1
            device.allocates = True
            if "begin" in device.fails:
                raise RuntimeError("begin")

        def capture_end(self) -> None:
            if "end" in device.fails:
                raise RuntimeError("end")
            self.completed, device.allocates = True, False
            if "instantiate" in device.fails:
                raise RuntimeError("instantiate")

        def pool(self) -> tuple[int, int]:
            if not self.completed:
                raise RuntimeError("no capture")
            return POOL

        def __del__(self) -> None:
            # torch would terminate the process.
            device.broken |= self.completed and not device.uses
            device.uses -= self.completed

    def leave(index: int, pool: object) -> None:
        assert (index, pool) == (0, POOL)
        device.allocates = False

    def release(index: int, pool: object) -> None:
        assert (index, pool) == (0, POOL)
        if not device.uses:
            raise RuntimeError("not in use")
        device.uses -= 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    return device


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with other graphs"])
@pytest.mark.parametrize("cuts", [0, 1])
@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("between", 0),
        ("within", 0),
        ("end", 0),
        ("instantiate", 0),
        # It is not known whether torch has counted the use: other graphs keep their memory.
        ("begin", 1),
        ("before the pool", 0),
    ],
)
def test_every_use_of_the_pool_is_released_once(
    where: str, left: int, cuts: int, shared: bool, device: Device
) -> None:
    device.uses = others = int(shared)

    def work() -> None:
        if where == "between":
            raise ValueError(where)
        device.fails.add(where)

    recording = cuda._Recording(POOL)
    if not cuts and where != "between":
        device.fails.add(where)
    try:
        recording.begin()
        if cuts or where == "between":
            recording.cut(work)
        if where == "within":
            raise ValueError(where)
        recording.end()
    except (ValueError, RuntimeError):
        recording.abort(torch.device("cuda", 0), shared=shared)
    else:
        pytest.fail("nothing was raised")
    assert not device.allocates
    assert not device.broken
    assert device.uses == (others + left if shared else 0)
