"""Of the kernels that cuBLAS has for a product, the one that is fastest here.

cuBLAS chooses by rules, and for shapes that do not divide into its tiles it is often 5 to 15 % off
the best that it has. As `torch.backends.cudnn.benchmark` does for convolutions, the kernels are
tried where a shape is first met, for up to two seconds, and the fastest serves from then on. So it
is for steps whose shapes stay. In a capture nothing can be tried: run a step before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepscope.model.kernels.cublaslt import ALIGNMENT, Kernel, Plan, Product

ROUNDS, SAMPLE_MS, MOST_LAUNCHES = 5, 4.0, 32
"""Of each kernel so many samples, of as many launches as take that long together."""
HEAVY_FLOPS, NEAR, SUSTAINED_MS = 1e10, 1.1, 200.0
"""Products from this size on draw all the power that a GPU may take, and its clock falls: of
kernels that are near the fastest, the one that is fastest for so long."""
_AHEAD_CYCLES = 500_000
"""The device waits so long before launches are timed: the host is then ahead of it."""
_HALF = (torch.float16, torch.bfloat16)

Choice = tuple[Plan, Kernel] | None
"""None where cuBLAS has no kernel."""
_chosen: dict[tuple[torch.device, Product], Choice] = {}
_open = 0


@contextmanager
def searched_products() -> Iterator[None]:
    """Products within this are made by the fastest kernel, in backwards too."""
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def searching() -> bool:
    return _open > 0


def multiplied_into(out: Tensor, a: Tensor, b: Tensor, adds: bool = False) -> bool:
    """out = a b, or out += a b. False, and nothing is done, where torch has to do it."""
    if not searching() or not out.is_cuda or a.dtype not in _HALF or a.dtype != b.dtype:
        return False
    if any(type(x) is not Tensor or x.data_ptr() % ALIGNMENT for x in (out, a, b)):
        return False
    product = Product.of(a, b, out, adds)
    if product is None:
        return False
    with torch.cuda.device(out.device):
        key = out.device, product
        if key not in _chosen:
            if torch.cuda.is_current_stream_capturing():
                return False
            _chosen[key] = _search(product, a, b, out)
        choice = _chosen[key]
        if choice is None:
            return False
        plan, kernel = choice
        plan.launch(kernel, a, b, out)
    return True


def _search(product: Product, a: Tensor, b: Tensor, out: Tensor) -> Choice:
    plan = Plan(product, out.device)
    into = out
    if product.adds:
        # What is added to must not change meanwhile.
        into = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)

    def launch(kernel: Kernel) -> None:
        plan.launch(kernel, a, b, into)

    try:
        kernels = plan.kernels()
        once = [_timed(kernel, launch, 1) for kernel in kernels]
    except RuntimeError:
        return None
    if not kernels:
        return None
    each = max(1, min(MOST_LAUNCHES, int(SAMPLE_MS / min(once))))
    took = _medians(kernels, launch, each, ROUNDS)
    if product.flops >= HEAVY_FLOPS:
        near = [k for k, ms in zip(kernels, took, strict=True) if ms < NEAR * min(took)]
        kernels, took = near, _medians(near, launch, int(SUSTAINED_MS / min(took)) + 1, 2)
    return plan, kernels[took.index(min(took))]


def _medians(
    kernels: list[Kernel], launch: Callable[[Kernel], None], launches: int, rounds: int
) -> list[float]:
    samples = [[_timed(kernel, launch, launches) for kernel in kernels] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def _timed(kernel: Kernel, launch: Callable[[Kernel], None], launches: int) -> float:
    """Milliseconds of a launch, in the second half of so many."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    for number in range(launches):
        if number == launches // 2:
            start.record()
        launch(kernel)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (launches - launches // 2)
