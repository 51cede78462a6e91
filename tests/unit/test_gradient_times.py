"""Gradient-ready times on a scripted clock, and the simulated step that replays them."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from rehearsal_check.simulated_step import Due, Pace, WaitingStep
from torch import nn

from fake_device import FakeClock, FakeDevice
from stepscope.measure.gradients import record_gradients


class Step:
    """Two layers; their backward takes 3 s on the device for the second and 5 s for the first."""

    def __init__(self, device: FakeDevice) -> None:
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.unused = nn.Parameter(torch.ones(1))
        self.device = device

    def forward(self) -> None:
        hidden = self.first(torch.ones(1, 2))
        hidden.register_hook(lambda _: self.device.work("second", 0.5, 3.0).run())
        out = self.second(hidden)
        self.device.work("forward", 1.0, 2.0).run()
        self.loss = out.sum()

    def backward(self) -> None:
        # The gradient of the second layer's weight is computed before that of its input.
        self.loss.backward()  # type: ignore[no-untyped-call]
        self.device.work("rest", 0.1, 5.0).run()

    def optimize(self) -> None:
        self.first.weight.grad = self.second.weight.grad = None
        self.device.work("optimizer", 0.1, 1.0).run()


@pytest.mark.parametrize("queue", [True, False])
def test_marks_use_the_queue_if_there_is_one(queue: bool) -> None:
    clock = FakeClock()
    device = FakeDevice(clock, queue=queue)
    step = Step(device)
    recorded = record_gradients(
        [step.first.weight, step.second.weight, step.unused],
        step.forward,
        step.backward,
        step.optimize,
        device,
        warmup=1,
        steps=3,
    )
    assert recorded.ready[2] == []
    assert [len(samples) for samples in recorded.ready[:2]] == [3, 3]
    assert len(recorded.forward) == len(recorded.backward) == len(recorded.optimizer) == 3
    if queue:
        # Issued after 1 s on the host; two seconds of forward, then three of the hook's work.
        assert recorded.forward == pytest.approx([3000.0] * 3)
        assert recorded.backward == pytest.approx([8000.0] * 3)
        assert recorded.optimizer == pytest.approx([1000.0] * 3)
    first, second = recorded.ready[:2]
    assert all(0 <= early <= late for early, late in zip(second, first, strict=True))


def test_hooks_are_removed_after_recording() -> None:
    device = FakeDevice(FakeClock())
    step = Step(device)
    record_gradients(
        [step.first.weight], step.forward, step.backward, step.optimize, device, steps=1
    )
    device.log.clear()
    step.forward()
    step.backward()
    assert "mark" not in device.log


def test_gradients_are_produced_in_order_and_one_at_a_time() -> None:
    step = WaitingStep(
        0.1, [Due(4, "float32", 3.0), Due(2, "bfloat16", 1.0), Due(8, "float32", 2.0)], 4.0, 0.1
    )
    seen: list[tuple[int, int]] = []
    for index, parameter in enumerate(step.weights):
        parameter.register_post_accumulate_grad_hook(  # type: ignore[attr-defined]
            lambda _, index=index: seen.append(
                (index, sum(p.grad is not None for p in step.weights))
            )
        )
    step().backward()  # type: ignore[no-untyped-call]
    # Each hook ran before the next gradient was computed.
    assert seen == [(1, 1), (2, 2), (0, 3)]
    assert [p.grad.dtype for p in step.weights] == [torch.float32, torch.bfloat16, torch.float32]  # type: ignore[union-attr]
    step.optimize()
    assert all(p.grad is None for p in step.weights)


def test_a_step_is_never_shorter_than_recorded() -> None:
    step = WaitingStep(3.0, [Due(4, "float32", 2.0)], 5.0, 2.0)
    began = time.monotonic()
    for _ in range(3):
        step().backward()  # type: ignore[no-untyped-call]
        step.optimize()
    # A wait that is too long shortens the next one: only the last can be late.
    assert time.monotonic() - began >= 3 * 10e-3 - 1e-3


def test_a_late_wait_shortens_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds + 0.25

    monkeypatch.setattr("rehearsal_check.simulated_step.time.monotonic", clock.monotonic)
    monkeypatch.setattr("rehearsal_check.simulated_step.time.sleep", sleep)
    pace = Pace()
    pace.start(clock.now)
    for _ in range(3):
        pace.wait(1000.0)
    assert slept == pytest.approx([1.0, 0.75, 0.75])
    assert clock.now == pytest.approx(103.25)
    pace.pause()
    clock.now += 2.0
    pace.resume()
    pace.wait(1000.0)
    assert slept[-1] == pytest.approx(0.75)


def test_an_unreferenced_step_is_collected() -> None:
    step = WaitingStep(0.0, [Due(4, "float32", 0.0)], 0.0, 0.0)
    step.count_hooks()
    step().backward()  # type: ignore[no-untyped-call]
    gradient = weakref.ref(next(step.parameters()))
    del step
    gc.collect()
    assert gradient() is None


@pytest.mark.parametrize(("counted", "took"), [(False, 0.12), (True, 0.18)])
def test_hooks_delay_the_following_gradients(
    monkeypatch: pytest.MonkeyPatch, counted: bool, took: float
) -> None:
    """Two hooks of 30 ms fit into the remaining wait of the backward; counted, they add to it."""
    clock = FakeClock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr("rehearsal_check.simulated_step.time.monotonic", clock.monotonic)
    monkeypatch.setattr("rehearsal_check.simulated_step.time.sleep", sleep)
    step = WaitingStep(10.0, [Due(4, "float32", 10.0), Due(4, "float32", 20.0)], 100.0, 10.0)
    for parameter in step.weights:
        parameter.register_post_accumulate_grad_hook(lambda _: sleep(0.03))  # type: ignore[attr-defined]
    if counted:
        step.count_hooks()
    began = clock.now
    step().backward()  # type: ignore[no-untyped-call]
    step.optimize()
    assert clock.now - began == pytest.approx(took)
