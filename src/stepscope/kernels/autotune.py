"""Autotuned GEMMs: the fastest of the cuBLASLt algorithms for a shape, measured on this GPU.

torch uses the first algorithm of cuBLAS's heuristic. Like `torch.backends.cudnn.benchmark` for
convolutions, this times all of them when a shape is first used, for up to four seconds, and uses
the fastest from then on; it is meant for training steps with static shapes. Large GEMMs are timed
for as long as the power cap needs to take effect: the fastest kernel in a burst is not always the
one that takes the least energy. Nothing can be timed during a capture: run a step before it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from stepscope.kernels.cublaslt import ALIGNMENT, Kernel, Matmul, Plan

ROUNDS, SAMPLE_MS, MAX_LAUNCHES = 5, 4.0, 32
"""Samples per kernel, the duration of a sample, and the maximum number of launches in one."""
POWER_CAP_FLOPS, RETIME_WITHIN = 1e10, 1.1
"""GEMMs of at least this many FLOPs reach the power cap. Of these, kernels within this factor of
the fastest are timed again under sustained load."""
SUSTAINED_ROUNDS, SUSTAINED_MS = 2, 240.0
MAX_TIME_RATIO = 0.985
"""A kernel replaces torch's choice if it takes less than this fraction of its time."""
_AHEAD_CYCLES = 500_000
"""Cycles that the device sleeps before timed launches, so that the CPU is ahead of it."""
_HALF = (torch.float16, torch.bfloat16)

Choice = tuple[Plan, Kernel] | None
"""None if torch's choice is as fast."""
_chosen: dict[tuple[torch.device, Matmul], Choice] = {}
_open_contexts = 0


@contextmanager
def autotuned_matmuls() -> Iterator[None]:
    """Use autotuned GEMMs within the context, in backward passes too."""
    global _open_contexts
    _open_contexts += 1
    try:
        yield
    finally:
        _open_contexts -= 1


def autotuning() -> bool:
    return _open_contexts > 0


def autotuned_matmul_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool = False) -> bool:
    """Compute out = a b, or out += a b. Return False, without computing, if torch should do it."""
    choice = _choice(out, a, b, accumulate)
    if choice is None:
        return False
    plan, kernel = choice
    with torch.cuda.device(out.device):
        plan.launch(kernel, a, b, out)
    return True


def _choice(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> Choice:
    if not autotuning() or not out.is_cuda or not _may_reduce_in(a.dtype):
        return None
    key = _key(out, a, b, accumulate)
    if key is None:
        return None
    if key not in _chosen:
        with torch.cuda.device(out.device):
            if torch.cuda.is_current_stream_capturing():
                return None
            _chosen[key] = _autotune(key[1], a, b, out)
    return _chosen[key]


def _key(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> tuple[torch.device, Matmul] | None:
    """Return the cache key: device, shapes, strides, dtypes, and whether `out` is accumulated into.
    Addresses are not in the key: tensors not aligned to `ALIGNMENT` bytes are left to torch."""
    if a.dtype not in _HALF or a.dtype != b.dtype or not out.device == a.device == b.device:
        return None
    if any(type(x) is not Tensor or x.data_ptr() % ALIGNMENT for x in (out, a, b)):
        return None
    matmul = Matmul.of(a, b, out, accumulate)
    return None if matmul is None else (out.device, matmul)


def _may_reduce_in(dtype: torch.dtype) -> bool:
    """Return whether torch lets cuBLAS reduce partial sums in a 16-bit dtype: kernels that were
    tuned with that setting must not run after it has been turned off."""
    matmul = torch.backends.cuda.matmul
    if dtype == torch.float16:
        return bool(matmul.allow_fp16_reduced_precision_reduction)
    return bool(matmul.allow_bf16_reduced_precision_reduction)


def _autotune(matmul: Matmul, a: Tensor, b: Tensor, out: Tensor) -> Choice:
    plan = Plan(matmul, out.device)
    target = out
    if matmul.accumulate:
        # The timed launches must not change the accumulated tensor.
        target = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)

    def launch(kernel: Kernel) -> None:
        plan.launch(kernel, a, b, target)

    try:
        kernels = plan.kernels()
        first_ms = [_timed(kernel, launch, 1) for kernel in kernels]
    except RuntimeError:
        return None
    if len(kernels) < 2:
        return None
    launches = max(1, min(MAX_LAUNCHES, int(SAMPLE_MS / min(first_ms))))
    times = _medians(kernels, launch, launches, ROUNDS)
    if matmul.flops >= POWER_CAP_FLOPS:
        default, *others = zip(kernels, times, strict=True)
        close = [default[0], *(kernel for kernel, ms in others if ms < RETIME_WITHIN * min(times))]
        launches = int(SUSTAINED_MS / min(times)) + 1
        kernels, times = close, _medians(close, launch, launches, SUSTAINED_ROUNDS)
    best = min(times)
    return (plan, kernels[times.index(best)]) if best < MAX_TIME_RATIO * times[0] else None


def _medians(
    kernels: list[Kernel], launch: Callable[[Kernel], None], launches: int, rounds: int
) -> list[float]:
    samples = [[_timed(kernel, launch, launches) for kernel in kernels] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def _timed(kernel: Kernel, launch: Callable[[Kernel], None], launches: int) -> float:
    """Return milliseconds per launch, over the second half of the launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    for index in range(launches):
        if index == launches // 2:
            start.record()
        launch(kernel)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / (launches - launches // 2)
