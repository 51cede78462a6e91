"""Cost of watching a training step that is not recorded: in `with scope.step()`, and by hooks.

    python benchmarks/scope_cost.py

The same step runs bare, inside a finished scope, inside one that still waits, and with the hooks of
`stepscope inspect`, interleaved. The cost is the difference of the medians; the cost of an empty
step, which is not hidden by the machine's noise, is printed as well.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import stepscope
from stepscope.advisor.scope.stages import Effort
from stepscope.advisor.scope.watching import Watcher
from stepscope.measure.device import pick_device
from stepscope.measure.interleaved import time_interleaved

WIDTH, ROWS, EMPTY = 256, 64, 20_000
FOREVER = 1_000_000


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    waiting = stepscope.Scope(model, optimizer, warmup=FOREVER)
    done = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=1, memory=False)
    while not done.done:
        with done.step():
            step()

    def inside(scope: stepscope.Scope, run: Callable[[], None]) -> Callable[[], None]:
        def one() -> None:
            with scope.step():
                run()

        return one

    variants = {
        "bare": step,
        "scope waits": inside(waiting, step),
        "scope is done": inside(done, step),
    }
    with tempfile.TemporaryDirectory() as folder:
        watcher = Watcher(Path(folder), Effort(warmup=FOREVER), "benchmark", [], stop=False)
        watched = _watched(watcher, step)
        timing = time_interleaved(variants, pick_device("cpu"), rounds=200)
        medians = {s.variant: statistics.median(s.values) for s in timing.series}
        bare = medians["bare"]
        print(f"a step takes {bare:.3f} ms")
        for name, ms in medians.items():
            print(f"{name:<16}{(ms - bare) * 1e3:+9.1f} µs{(ms / bare - 1):+9.2%}")
        hooks = watched()
    for name, scope in (("scope waits", waiting), ("scope is done", done)):
        run = inside(scope, lambda: None)
        cost = _each(run) - _each(lambda: None)
        print(f"{name:<16}{cost * 1e6:9.2f} µs for an empty step, {cost / bare * 1e3:.2%} of it")
    print(f"{'inspect waits':<16}{hooks * 1e6:9.2f} µs for an edge, {hooks / bare * 1e3:.2%} of it")


def _watched(watcher: Watcher, step: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        """Seconds per optimizer step of a watcher that waits."""
        watcher.start()
        for _ in range(5):
            step()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        with_hooks = _each(optimizer.step)
        watcher.finish()
        return with_hooks - _each(optimizer.step)

    return measure


def _each(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(EMPTY // 5):
            run()
        best = min(best, (time.perf_counter() - start) / (EMPTY // 5))
    return best


if __name__ == "__main__":
    main()
