"""Check the timer against known waits and unmarked steps.

    python benchmarks/timer_truth.py

Two checks: the timed length of a step that consists of waits of known length, and, for a real
training step, whether the phases add up to separate steps without marks between the phases. Prints
the differences; this is not a test.
"""

from __future__ import annotations

import statistics
import time

import torch

from stepscope.measure.device import Device, pick_device
from stepscope.measure.timer import Phase, Timing, time_step
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import Workload

WAITS_MS = {"first": 5.0, "second": 20.0, "third": 10.0}


class Waits:
    """Waits that record their actual length: a busy machine may end them late."""

    def __init__(self) -> None:
        self.taken_ms: list[float] = []

    def wait(self, ms: float) -> None:
        start = time.perf_counter()
        while time.perf_counter() < start + ms / 1e3:
            pass
        self.taken_ms.append((time.perf_counter() - start) * 1e3)

    def step_ms(self) -> float:
        """Median of full steps."""
        each = len(WAITS_MS)
        steps = [self.taken_ms[i : i + each] for i in range(0, len(self.taken_ms), each)]
        return statistics.median(map(sum, steps))


def medians(timing: Timing, clock: str) -> dict[str, float]:
    return {s.name: statistics.median(s.values) for s in timing.series if s.clock == clock}


def sum_of_phases(timing: Timing, clock: str) -> float:
    """Sum the phases of each marked step, then take the median: spreads do not add like times."""
    marked = [
        s.values for s in timing.series if s.clock == clock and s.name not in ("step", "issue")
    ]
    return statistics.median(map(sum, zip(*marked, strict=True)))


def known_waits(device: Device) -> None:
    waits = Waits()
    phases = [Phase(name, lambda ms=ms: waits.wait(ms)) for name, ms in WAITS_MS.items()]
    timing = time_step(phases, device, warmup=1, steps=20)
    measured = medians(timing, "host")
    expected = waits.step_ms()
    parts = sum_of_phases(timing, "host")
    print(f"known waits of {expected:.3f} ms on the host:")
    print(f"  step {measured['step']:.3f} ms ({measured['step'] / expected - 1:+.2%})")
    print(f"  phases {parts:.3f} ms ({parts / expected - 1:+.2%})")
    if device.kind != "cuda":
        return
    cycles = 20_000_000
    shares = {"first": 1, "second": 4, "third": 2}
    kernels = [Phase(n, lambda k=k: torch.cuda._sleep(k * cycles)) for n, k in shares.items()]
    timing = time_step(kernels, device, warmup=2, steps=20)
    measured = medians(timing, "device")
    parts = sum_of_phases(timing, "device")
    difference = parts / measured["step"] - 1
    print(
        f"waiting kernels: step {measured['step']:.3f} ms, phases {parts:.3f} ms"
        f" ({difference:+.2%})"
    )


def real_steps(device: Device) -> None:
    cases = (
        [("small", 512, "bfloat16"), ("xl", 512, "float32"), ("xl", 512, "bfloat16")]
        if device.kind == "cuda"
        else [("tiny", 64, "float32"), ("mini", 128, "float32")]
    )
    for size, context, dtype in cases:
        workload = Workload(size=size, context=context, batch=4, dtype=dtype, mode="train-step")
        device.release()
        step = TransformerStep(workload, device)
        timing = time_step(step.phases(), device, warmup=5, steps=40, before=step.reset)
        # Phases by the host clock are issue times on a GPU; they need not add up to the step.
        for clock in ("device",) if device.kind == "cuda" else ("host",):
            measured = medians(timing, clock)
            parts = sum_of_phases(timing, clock)
            difference = parts / measured["step"] - 1
            text = f"step {measured['step']:.2f} ms, phases {parts:.2f} ms ({difference:+.2%})"
            print(f"{workload.key}, {clock} clock: {text}")


def main() -> None:
    device = pick_device()
    print(device.name)
    known_waits(device)
    real_steps(device)


if __name__ == "__main__":
    main()
