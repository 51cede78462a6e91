"""Of the kernels that cuBLAS has for a product, the one that is fastest here.

torch takes the first that cuBLAS's rules name. As `torch.backends.cudnn.benchmark` does for
convolutions, all of them are tried where a shape is first met, for up to four seconds, and the
fastest serves from then on. So it is for steps whose shapes stay. Heavy products are tried for as
long as the power cap needs to act: what is fastest in a burst need not take the least energy. In a
capture nothing can be tried: run a step before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepscope.kernels.cublaslt import ALIGNMENT, Kernel, Matmul, Plan

ROUNDS, SAMPLE_MS, MOST_LAUNCHES = 5, 4.0, 32
"""Of each kernel so many samples, of as many launches as take that long together."""
HEAVY_FLOPS, NEAR = 1e10, 1.1
"""Products from this size on draw all the power that a GPU may take. Of them those kernels go on
that take at most this times as long as the fastest."""
SUSTAINED_ROUNDS, SUSTAINED_MS = 2, 240.0
GAIN = 0.985
"""What takes less than this of the time of torch's choice takes its place."""
_AHEAD_CYCLES = 500_000
"""The device waits so long before launches are timed: the host is then ahead of it."""
_HALF = (torch.float16, torch.bfloat16)

Choice = tuple[Plan, Kernel] | None
"""None where torch's own is as fast."""
_chosen: dict[tuple[torch.device, Matmul], Choice] = {}
_open = 0


@contextmanager
def autotuned_matmuls() -> Iterator[None]:
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
    """out = a b, or out += a b. False, and nothing is done, where torch is to do it."""
    choice = _choice(out, a, b, adds)
    if choice is None:
        return False
    plan, kernel = choice
    with torch.cuda.device(out.device):
        plan.launch(kernel, a, b, out)
    return True


def _choice(out: Tensor, a: Tensor, b: Tensor, adds: bool) -> Choice:
    if not searching() or not out.is_cuda or not _may_reduce_in(a.dtype):
        return None
    key = _key(out, a, b, adds)
    if key is None:
        return None
    if key not in _chosen:
        with torch.cuda.device(out.device):
            if torch.cuda.is_current_stream_capturing():
                return None
            _chosen[key] = _search(key[1], a, b, out)
    return _chosen[key]


def _key(out: Tensor, a: Tensor, b: Tensor, adds: bool) -> tuple[torch.device, Matmul] | None:
    """All that a plan and a kernel for it depend on: device, shapes, strides, dtypes, and whether
    `out` is added to. Addresses are not in it: those that are no multiple of `ALIGNMENT` bytes are
    left to torch."""
    if a.dtype not in _HALF or a.dtype != b.dtype or not out.device == a.device == b.device:
        return None
    if any(type(x) is not Tensor or x.data_ptr() % ALIGNMENT for x in (out, a, b)):
        return None
    product = Matmul.of(a, b, out, adds)
    return None if product is None else (out.device, product)


def _may_reduce_in(dtype: torch.dtype) -> bool:
    """Whether torch lets cuBLAS add up partial sums in a 16-bit dtype: what was searched with that
    must not serve where it has been turned off since."""
    matmul = torch.backends.cuda.matmul
    if dtype == torch.float16:
        return bool(matmul.allow_fp16_reduced_precision_reduction)
    return bool(matmul.allow_bf16_reduced_precision_reduction)


def _search(product: Matmul, a: Tensor, b: Tensor, out: Tensor) -> Choice:
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
    if len(kernels) < 2:
        return None
    each = max(1, min(MOST_LAUNCHES, int(SAMPLE_MS / min(once))))
    took = _medians(kernels, launch, each, ROUNDS)
    if product.flops >= HEAVY_FLOPS:
        usual, *others = zip(kernels, took, strict=True)
        near = [usual[0], *(kernel for kernel, ms in others if ms < NEAR * min(took))]
        launches = int(SUSTAINED_MS / min(took)) + 1
        kernels, took = near, _medians(near, launch, launches, SUSTAINED_ROUNDS)
    best = min(took)
    return (plan, kernels[took.index(best)]) if best < GAIN * took[0] else None


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
