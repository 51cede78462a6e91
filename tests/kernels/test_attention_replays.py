"""Attention that is bound to the shapes of its inputs: launches by strides, descriptors by address,
and what cuDNN's backward operator gets. The kernels are replaced by ones that record."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from launch_recorder import D, Recorder, S, dense, recording
from stepscope.attention import attention, hopper, ops
from stepscope.attention.tiles import Tile
from stepscope.attention.triton import launch as triton_launch
from stepscope.attention.triton import replay
from stepscope.torch_tools.saved_tensors import is_saved_output


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return recording(monkeypatch)


LAYOUTS = list(itertools.product(("", "transposed", "unaligned"), repeat=3))


@pytest.mark.parametrize("first", LAYOUTS[::5])
def test_a_bound_forward_replays_launches_of_the_same_layout(
    first: tuple[str, ...], recorder: Recorder
) -> None:
    recorder.dtype = torch.bfloat16

    def inputs(layouts: Sequence[str]) -> list[Tensor]:
        return [dense(layout, torch.bfloat16) for layout in layouts]

    forward = ops.bound_forward(inputs(first)[0], False, 0.125, 0)
    for layouts in (first, *LAYOUTS, *LAYOUTS[::-1]):
        q, k, v = inputs(layouts)
        out, lse = forward(q, k, v)
        assert out.stride() == torch.empty_like(q).stride()
        assert lse.shape == q.shape[:-1]
        assert lse.dtype == torch.float32
    assert recorder.compiled == len(LAYOUTS)
    assert recorder.replayed == len(LAYOUTS) + 1
    columns = [x.mT.contiguous().mT for x in inputs(("", "", ""))]
    for _ in range(2):
        assert forward(*columns)[0].shape == q.shape
    assert recorder.compiled == len(LAYOUTS)


def test_a_bound_forward_respects_tiles_that_are_forced_and_records(recorder: Recorder) -> None:
    recorder.dtype = torch.bfloat16
    q, k, v = (dense(dtype=torch.bfloat16) for _ in range(3))
    forward = ops.bound_forward(q, False, 0.125, 0)
    for _ in range(2):
        forward(q, k, v)
    tile = Tile(16, 16, 4, 1)
    with triton_launch.recorded_launches() as launches:
        forward(q, k, v)
        with triton_launch.forced_tiles({"forward": tile}):
            forward(q, k, v)
        forward(q, k, v)
    assert [launch.tile == tile for launch in launches] == [False, True, False]


def test_descriptors_follow_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tensors that are passed again are not created again."""
    created, launched = [], []

    def create(descriptor: TensorDescriptor, layout: str) -> list[Any]:
        created.append(layout)
        return [layout, descriptor.base.data_ptr()]

    def launcher(*arguments: Any) -> None:
        launched.append(arguments[4:-2])

    class Run:
        def __init__(self) -> None:
            self.launch = lambda *arguments: launcher(*arguments)

        def __call__(self, *arguments: Any) -> None:
            self.launch(*arguments[:4], *arguments[9:])

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", create)
    monkeypatch.setattr(replay, "_MAX_DESCRIPTORS", 4)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    kernel = SimpleNamespace(
        run=Run(), function=None, packed_metadata=None,
        metadata=SimpleNamespace(tensordesc_meta=["first", "second"]),
    )  # fmt: skip
    launch = replay.Launch("forward", Tile(16, 16, 4, 1), kernel)
    prepared = replay.Prepared(launch, 7, ("fixed",), tma=True, absent=1)
    tensors = [torch.empty(16) for _ in range(4)]
    for a, b in [*itertools.product(tensors, repeat=2)] * 2:
        for _ in range(2):
            prepared.run((a, b), (), 0.5)
        assert launched[-1] == launched[-2]
        assert launched[-1] == ("first", a.data_ptr(), "second", b.data_ptr(), None)
    before = len(created)
    prepared.run((a, b), (), 0.5)
    assert len(created) == before


class TestCudnnBackward:
    """Attention with cuDNN's backward operator replaced by one that records its arguments."""

    @pytest.mark.parametrize("columns", [0, 1, 2])
    def test_it_gets_contiguous_rows_and_what_the_forward_wrote(
        self, columns: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorder.dtype = torch.bfloat16
        calls: list[tuple[Any, ...]] = []

        def backward(*arguments: Any, scale: float) -> tuple[Tensor, ...]:
            calls.append((*arguments, scale))
            return tuple(torch.ones_like(x) for x in arguments[1:4])

        monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})
        monkeypatch.setattr(hopper.HOPPER, "refuses", lambda _: None)
        monkeypatch.setattr(hopper, "_no_dropout", lambda _: torch.zeros(()))
        monkeypatch.setattr(hopper, "_cudnn_backward", lambda: backward)
        leaves = [dense(dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        for turn in range(3):
            qkv = [x.mT.contiguous().mT if n < columns and turn else x
                   for n, x in enumerate(leaves)]  # fmt: skip
            out = attention(*qkv, is_causal=True, impl="hopper")
            assert is_saved_output(out)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            assert all((grad == 1).all() for grad in grads)
            _, q, k, v, saved, lse, *_, rows, keys, _, causal, scale = calls[-1]
            assert [x.stride() for x in (q, k, v)] == [x.stride() for x in leaves]
            assert saved.data_ptr() == out.data_ptr()
            assert lse.shape == (*q.shape[:-1], 1)
            assert (rows, keys, causal, scale) == (S, S, True, D**-0.5)
        assert len(calls) == 3
