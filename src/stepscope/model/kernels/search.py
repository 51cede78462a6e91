"""Of the kernels that cuBLAS has for a product, the one that is fastest here.

cuBLAS chooses by rules, and for shapes that do not divide into its tiles it is often 5 to 15 % off
the best that it has. As `torch.backends.cudnn.benchmark` does for convolutions, the kernels are
tried where a shape is first met, which takes a tenth of a second, and the fastest serves from then
on. So it is for steps whose shapes stay. In a capture nothing can be tried: run a step before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepscope.model.kernels.cublaslt import ALIGNMENT, Kernel, Plan, Product

ROUNDS, LAUNCHES = 5, 3
MARGIN = 0.99
"""Only a kernel that takes less than this of cuBLAS's own choice replaces it."""
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
    took: list[tuple[Kernel, list[float]]] = []
    for kernel in plan.kernels():
        try:
            plan.launch(kernel, a, b, into)
        except RuntimeError:
            continue
        took.append((kernel, []))
    for _ in range(ROUNDS):
        for kernel, times in took:
            times.append(_timed(plan, kernel, a, b, into))
    if not took:
        return None
    medians = [(statistics.median(times), kernel) for kernel, times in took]
    usual, first = medians[0]
    best, fastest = min(medians, key=lambda one: one[0])
    return plan, fastest if best < MARGIN * usual else first


def _timed(plan: Plan, kernel: Kernel, a: Tensor, b: Tensor, out: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(LAUNCHES):
        plan.launch(kernel, a, b, out)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
