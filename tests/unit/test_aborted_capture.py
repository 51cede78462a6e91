"""Captures that fail: each use of a memory pool by a graph is released once."""

from __future__ import annotations

import pytest
import torch

from stepscope.acceleration.graphs import cuda

POOL = (0, 1)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Steps of a capture that raise; `released` is added when the allocator leaves the pool."""
    failing: set[str] = set()

    class Graph:
        def capture_begin(self, **_: object) -> None:
            if "begin" in failing:
                raise RuntimeError("begin")

        def capture_end(self) -> None:
            if "end" in failing:
                raise RuntimeError("end")

    def leave(index: int, pool: object) -> None:
        assert (index, pool) == (0, POOL)
        failing.add("released")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave, raising=False)
    return failing


@pytest.mark.parametrize(
    ("where", "incomplete"),
    [("between", False), ("within", False), ("begin", True), ("next", True), ("end", True)],
)
def test_a_graph_is_incomplete_unless_torch_has_ended_its_capture(
    where: str, incomplete: bool, failing: set[str]
) -> None:
    def work() -> None:
        if where == "between":
            raise ValueError(where)
        failing.add({"next": "begin"}.get(where, where))

    if where == "begin":
        failing.add(where)
    recording = cuda._Recording(POOL)
    try:
        recording.begin()
        recording.cut(work)
        if where == "within":
            raise ValueError(where)
        recording.end()
    except (ValueError, RuntimeError):
        assert recording.abort(torch.device("cuda", 0)) is incomplete
    else:
        pytest.fail("nothing was raised")
    assert ("released" in failing) is incomplete
