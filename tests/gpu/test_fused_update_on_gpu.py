"""The fused update of a live torch optimizer on a GPU: captured replays, scalers, schedulers."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from stepscope.acceleration.optimizer import FusedUpdate, fuse_optimizer
from stepscope.kernels.weight_copies import WeightCopies

SIZES = ((300, 70), (5000,), (7,))
FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    tensors = (torch.randn(size, generator=generator) for size in SIZES)
    return [nn.Parameter(one.to("cuda", dtype)) for one in tensors]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Write new gradients to the memory of the old ones, as a replay does."""
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        drawn = torch.randn(parameter.shape, generator=generator).to("cuda", parameter.dtype)
        if parameter.grad is None:
            parameter.grad = drawn
        else:
            parameter.grad.copy_(drawn)


def fused(optimizer: Any, copies: WeightCopies | None = None) -> FusedUpdate:
    update = fuse_optimizer(optimizer, copies)
    assert isinstance(update, FusedUpdate), update
    return update


def counts(optimizer: Any) -> set[float]:
    return {state["step"].item() for state in optimizer.state.values()}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_steps_match_torch(flags: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = AdamW(ours, lr=1e-2, **flags), AdamW(theirs, lr=1e-2, **flags)
    for step in range(5):
        if step == 1:
            fused(optimizer)
        for params, one in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, step)
            one.step()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)
    for state, expected in zip(optimizer.state.values(), reference.state.values(), strict=True):
        for name, value in expected.items():
            assert (state[name].dtype, state[name].device) == (value.dtype, value.device)
    assert counts(optimizer) == {5.0}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_captured_step_between_eager_steps(flags: dict[str, Any]) -> None:
    """Replays with changed learning rates; then an eager step, a checkpoint and undo."""
    ours, theirs = parameters(), parameters()
    optimizer: Any = AdamW(ours, lr=1e-2, **flags)
    reference = AdamW(theirs, lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [LambdaLR(one, lambda step: 0.8**step) for one in (optimizer, reference)]
        update = fused(optimizer)
        graph = torch.cuda.CUDAGraph()
        for step in range(7):
            for params in (ours, theirs):
                set_gradients(params, step)
            if step == 2:
                optimizer.prepare()
                assert counts(optimizer) == {2.0}
                with torch.cuda.graph(graph):
                    optimizer.step()
            if step in (0, 1, 5):
                optimizer.step()
            else:
                optimizer.refresh()
                graph.replay()
            reference.step()
            for scheduler in schedulers:
                scheduler.step()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert counts(optimizer) == {step + 1.0}
    saved, expected = optimizer.state_dict(), AdamW(parameters(), **flags)
    assert {state["step"].is_cuda for state in saved["state"].values()} == {
        "fused" in flags or "capturable" in flags
    }
    expected.load_state_dict(copy.deepcopy(saved))
    assert counts(expected) == {7.0}
    update.undo()
    for params, one in ((ours, optimizer), (theirs, reference)):
        set_gradients(params, 7)
        one.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    on_device = "fused" in flags or "capturable" in flags
    assert all(state["step"].is_cuda == on_device for state in optimizer.state.values())


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_a_scaler_skips_steps(flags: dict[str, Any], unscale: bool) -> None:
    finals = []
    for fuse, prepared in ((False, False), (True, False), (True, True)):
        params = parameters()
        optimizer: Any = AdamW(params, lr=1e-2, **flags)
        if fuse:
            fused(optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
        for step in range(5):
            set_gradients(params, step)
            scaler.scale(torch.ones((), device="cuda"))
            for parameter in params:
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.get_scale())
            if step == 2:
                assert params[1].grad is not None
                params[1].grad[3] = float("inf")
            if prepared:
                optimizer.prepare()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert counts(optimizer) == {4.0}
        finals.append(params)
    torch.testing.assert_close(finals[1], finals[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(finals[2], finals[0], rtol=1e-5, atol=1e-6)


def test_a_captured_step_skips_on_the_device() -> None:
    ours, theirs = parameters(), parameters()
    optimizer: Any = AdamW(ours, lr=1e-2)
    reference = AdamW(theirs, lr=1e-2)
    fused(optimizer)
    found = torch.zeros((), device="cuda")
    set_gradients(ours, 0)
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    optimizer.grad_scale, optimizer.found_inf = None, found
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(4):
        found.fill_(float(step == 2))
        for params in (ours, theirs):
            set_gradients(params, step)
        graph.replay()
        if step != 2:
            reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert counts(optimizer) == {3.0}


def test_copies_are_written_by_replays() -> None:
    weight, copies = nn.Parameter(torch.randn(64, 32, device="cuda")), WeightCopies()
    optimizer: Any = AdamW([weight], lr=0.1)
    fused(optimizer, copies)
    (narrow,) = copies.narrow((weight,), torch.bfloat16)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
        (again,) = copies.narrow((weight,), torch.bfloat16)
        assert again.data_ptr() == narrow.data_ptr()
        assert torch.equal(again, weight.detach().bfloat16())


@pytest.mark.parametrize("copied", [False, True])
def test_without_prepare_a_capturable_step_is_captured_by_torch(copied: bool) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, lr=1e-2, capturable=True)
    reference = AdamW(theirs, lr=1e-2)
    copies = WeightCopies()
    fused(optimizer, copies if copied else None)
    for step in range(2):
        for params, one in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, step)
            one.step()
    narrow = copies.narrow((ours[0],), torch.bfloat16)[0] if copied else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step, replayed in zip(itertools.count(2), (True, False, True, True), strict=False):
        for params in (ours, theirs):
            set_gradients(params, step)
        if replayed:
            graph.replay()
        else:
            optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert counts(optimizer) == {step + 1.0}
        if narrow is not None:
            assert torch.equal(narrow, ours[0].detach().bfloat16())


def test_a_capture_without_prepare_raises_as_in_torch() -> None:
    params = parameters()
    optimizer = AdamW(params)
    fused(optimizer)
    set_gradients(params, 0)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="capturable is False"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    torch.cuda.synchronize()
