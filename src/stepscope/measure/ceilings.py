"""Ceilings: measured limits of this machine, matmul rate per dtype, memory bandwidth, launch rate.

A ceiling is the best batch of runs over several shapes, on random data: the rate that a large,
well-shaped matmul or copy reaches on an undisturbed machine, not the rate of the datasheet.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.measure.device import Device
from stepscope.records.decoding import from_json
from stepscope.records.jsonl import replace_file
from stepscope.records.schema import Ceiling, Environment

_DTYPES = ("float32", "tf32", "float16", "bfloat16", "fp8")
_MATRIX_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (128, 512, 1024, 2048)}
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_FILLED_BYTES = 4 << 20
"""Random numbers that are repeated up to the size of a copy: generating all takes seconds."""
_SECONDS_PER_SHAPE = {"cuda": 0.5, "cpu": 0.3}
_SETTLED = {"cuda": 0.0, "cpu": 0.01}
"""Sampling ends early if the two best batches differ by less than this share. A GPU is sampled to
the end of its budget, because its clock rises under load."""
_HOPELESS = 1.5
"""A shape whose first calls take this many times as long as at the best rate so far is dropped."""
_LAUNCHES = 2000
_CHECKED_SIZE = {"cuda": 4096, "cpu": 512}
_CHECKED_CALLS = 5
_EXCEEDED = 1.1
"""A cached ceiling that these matmuls exceed by this factor is measured again."""

Progress = Callable[[int, int, str], None]


def ceilings(
    device: Device,
    environment: Environment,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> tuple[Ceiling, ...]:
    """This machine's ceilings: from the cache, or measured now (or `again`) and cached. Cached ones
    that a quick matmul exceeds were measured on a busy machine, and are measured again."""
    path = _cache_file(environment)
    measured = None if again else _cached(path)
    if measured is None or _exceeded(device, measured):
        measured = measure_ceilings(device, progress)
        _write_cache(path, measured)
    return (*measured, *datasheet_ceilings(environment.device_name))


def known_ceilings(environment: Environment) -> tuple[Ceiling, ...]:
    """Cached and datasheet ceilings of this machine, without measuring."""
    return (
        *(_cached(_cache_file(environment)) or ()),
        *datasheet_ceilings(environment.device_name),
    )


def measure_ceilings(device: Device, progress: Progress | None = None) -> tuple[Ceiling, ...]:
    dtypes = [name for name in _DTYPES if name not in device.lacks()]
    jobs: list[tuple[str, Callable[[], Ceiling]]] = [
        (f"matmul rate, {name}", partial(_matmul_rate, device, name)) for name in dtypes
    ]
    jobs += [
        ("memory bandwidth", partial(_copy_rate, device)),
        ("launch rate", partial(_launch_rate, device)),
    ]
    measured = []
    for done, (title, job) in enumerate(jobs):
        if progress:
            progress(done, len(jobs), title)
        measured.append(job())
    device.release()
    return tuple(measured)


def _timed(device: Device, call: Callable[[], object], times: int = 1) -> float:
    """Seconds per call of one batch of calls."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    device.synchronize()
    return max((time.perf_counter() - start) / times, 1e-7)


def _seconds_per_call(
    device: Device, call: Callable[[], object], budget_s: float, hopeless_s: float = math.inf
) -> float:
    """Time one call in the best of repeated batches, after a warm-up.

    A call longer than the budget is timed once, and one that takes more than `hopeless_s` twice.
    """
    device.synchronize()
    once = _timed(device, call)
    if once > budget_s:
        return once
    once = min(once, _timed(device, call))
    if once > hopeless_s:
        return once
    # A batch is long enough that the final synchronization is negligible.
    batch = max(1, round(budget_s / 10 / once))
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < 3 or time.perf_counter() < deadline:
        samples.append(_timed(device, call, batch))
        best = sorted(samples)[:2]
        if len(samples) >= 3 and best[1] < best[0] * (1 + _SETTLED[device.kind]):
            break
    return min(samples)


def _matmul_rate(device: Device, name: str) -> Ceiling:
    budget = _SECONDS_PER_SHAPE[device.kind]
    best = 0.0
    shape = ""
    with _tf32(name == "tf32"):
        for n in _MATRIX_SIZES[device.kind]:
            # A dtype without hardware support is slow from the first shape on; larger shapes would
            # take minutes.
            if best and 2 * n**3 / best > budget:
                break
            try:
                calls = _matmuls(name, n, device.torch_device)
                calls["nt"]()
            except torch.OutOfMemoryError:
                # A small or shared GPU: the smaller shapes have given a rate.
                break
            for layout, multiply in calls.items():
                hopeless_s = _HOPELESS * 2 * n**3 / best if best else math.inf
                rate = 2 * n**3 / _seconds_per_call(device, multiply, budget, hopeless_s)
                if rate > best:
                    best, shape = rate, f"{n}×{n}×{n} {layout}"
    return Ceiling(
        name=f"matmul.{name}", value=best, unit="FLOP/s", source="measured", detail=shape
    )


def _matmuls(name: str, n: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Matmuls of two n×n matrices by layout: some libraries are fast for one layout only, and a
    linear layer multiplies by a transpose. FP8 tensor cores take that layout only."""
    a, b = torch.randn(2, n, n, device=device)
    if name == "fp8":
        one = torch.ones((), device=device)
        a, b = (matrix.to(torch.float8_e4m3fn) for matrix in (a, b))
        scaled = partial(
            torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return {"nt": scaled}
    dtype = getattr(torch, "float32" if name == "tf32" else name)
    a, b = a.to(dtype), b.to(dtype)
    return {"nn": partial(torch.mm, a, b), "nt": partial(torch.mm, a, b.t())}


def _exceeded(device: Device, measured: tuple[Ceiling, ...]) -> bool:
    """Return whether a few float32 matmuls are faster than their ceiling."""
    limit = next((one.value for one in measured if one.name == "matmul.float32"), math.inf)
    if limit == math.inf:
        return False
    n = _CHECKED_SIZE[device.kind]
    with _tf32(False):
        multiply = _matmuls("float32", n, device.torch_device)["nt"]
        device.synchronize()
        seconds = min(_timed(device, multiply) for _ in range(_CHECKED_CALLS))
    return 2 * n**3 / seconds > _EXCEEDED * limit


def _copy_rate(device: Device) -> Ceiling:
    size = min(_COPY_BYTES[device.kind], device.memory_bytes // 8)
    part = min(size, _FILLED_BYTES)
    source = torch.randn(part // 4, device=device.torch_device).repeat(size // part)
    target = torch.empty_like(source)
    seconds = _seconds_per_call(device, lambda: target.copy_(source), 1.0)
    return Ceiling(
        name="memory.copy",
        value=2 * source.nbytes / seconds,
        unit="B/s",
        source="measured",
        detail=f"copy of {source.nbytes >> 20} MiB, bytes read plus bytes written",
    )


def _launch_rate(device: Device) -> Ceiling:
    x = torch.zeros(1, device=device.torch_device)

    def burst() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    seconds = _seconds_per_call(device, burst, 0.5) / _LAUNCHES
    return Ceiling(
        name="launch.rate",
        value=1 / seconds,
        unit="launches/s",
        source="measured",
        detail="one-element in-place additions, eager, one after the other",
    )


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    # torch has two settings; the older one (`allow_tf32`) raises once this one has been used.
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if on else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _cache_file(environment: Environment) -> Path:
    """Cache file of this machine: everything that changes a ceiling is part of the name."""
    identity = [
        environment.device_kind,
        environment.device_name,
        environment.cpu_cores,
        environment.threads,
        environment.torch,
        environment.driver,
        environment.power_limit_w,
        _DTYPES,
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / f"ceilings-{digest}.json"


def _cached(path: Path) -> tuple[Ceiling, ...] | None:
    try:
        return from_json(path.read_bytes(), tuple[Ceiling, ...])
    except (OSError, msgspec.DecodeError):
        return None


def _write_cache(path: Path, measured: tuple[Ceiling, ...]) -> None:
    """Write the cache atomically. Without a writable cache, the next call measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [msgspec.json.encode(measured)])
