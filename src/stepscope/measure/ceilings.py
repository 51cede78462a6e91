"""Ceilings: measured limits of this machine, matmul rate per dtype, memory bandwidth, launch rate.

A ceiling is the best batch of runs over several shapes, on random data: the rate that a large,
well-shaped matmul or copy reaches on an undisturbed machine, not the rate of the datasheet.

Other work can only make a ceiling too low. Each is therefore measured two to four times, until two
undisturbed measurements agree with the best one. If they never do, the ceiling has a doubt: it is
measured again before its next use, and what rests on it is marked as a bound.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from stepscope.files import replace_file
from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.measure.device import Device
from stepscope.records.decoding import from_json
from stepscope.records.schema import Ceiling, Environment, Reading

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
_LEAST_TIMES, _MOST_TIMES = 2, 4
"""Measurements of a ceiling."""
_APART, _LAUNCHES_APART = 0.05, 0.15
"""Largest relative difference of measurements that agree. Launches depend on the CPU's clock."""
_WAITED = 0.10
"""Seconds per second that threads wait for a core, from which on a measurement is disturbed; the
same as in the check `busy-machine`."""
_SLOWED = frozenset({"hardware-slowdown", "thermal-software", "thermal-hardware", "power-brake"})
"""Throttle reasons of a disturbed measurement. The power cap is usual for large matmuls."""
_IN_USE, _REST_S = 0.10, 1.0
"""Share of the time in which other processes use the GPU, from which on ceilings are disturbed; and
the time over which the driver averages it."""

Progress = Callable[[int, int, str], None]


def ceilings(
    device: Device,
    environment: Environment,
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> tuple[Ceiling, ...]:
    """This machine's ceilings: from the cache, or measured now (or `again`) and cached. Cached ones
    with a doubt are measured again, and all of them if a quick matmul exceeds its ceiling."""
    path = _cache_file(environment)
    cached = () if again else _cached(path, environment)
    if not cached or _exceeded(device, cached):
        measured = _checked(measure_ceilings(device, progress), environment)
        _write_cache(path, measured)
    elif doubted := [one.name for one in cached if one.doubt]:
        later = {
            one.name: one
            for one in _checked(measure_ceilings(device, progress, doubted), environment)
        }
        measured = tuple(_better(one, later.get(one.name, one)) for one in cached)
        _write_cache(path, measured)
    else:
        measured = cached
    return (*measured, *datasheet_ceilings(environment.device_name))


def known_ceilings(environment: Environment) -> tuple[Ceiling, ...]:
    """Cached and datasheet ceilings of this machine, without measuring."""
    return (
        *_cached(_cache_file(environment), environment),
        *datasheet_ceilings(environment.device_name),
    )


def _checked(measured: tuple[Ceiling, ...], environment: Environment) -> tuple[Ceiling, ...]:
    return tuple(one.checked(environment) for one in measured)


def _better(first: Ceiling, second: Ceiling) -> Ceiling:
    """Of two measurements the one without a doubt, else the higher one."""
    return max(first, second, key=lambda one: (not one.doubt, one.value))


def measure_ceilings(
    device: Device, progress: Progress | None = None, names: Collection[str] | None = None
) -> tuple[Ceiling, ...]:
    """Measure all ceilings, or those of these names."""
    dtypes = [name for name in _DTYPES if name not in device.lacks()]
    jobs: dict[str, tuple[str, Measure]] = {
        f"matmul.{name}": (f"matmul rate, {name}", partial(_matmul_rate, device, name))
        for name in dtypes
    }
    jobs |= {
        "memory.copy": ("memory bandwidth", partial(_copy_rate, device)),
        "launch.rate": ("launch rate", partial(_launch_rate, device)),
    }
    wanted = [job for name, job in jobs.items() if names is None or name in names]
    in_use = _in_use(device)
    measured = []
    for done, (title, job) in enumerate(wanted):
        if progress:
            progress(done, len(wanted), title)
        measured.append(_repeated(device, job, in_use))
    device.release()
    return tuple(measured)


Measure = Callable[[Ceiling | None], Ceiling]
"""Measures one ceiling; given an earlier measurement, only the shape that it found best."""


def _repeated(device: Device, measure: Measure, in_use: str = "") -> Ceiling:
    """Return the best of two to four measurements, with a doubt unless two undisturbed ones agree
    with it."""
    best: Ceiling | None = None
    undisturbed: list[float] = []
    disturbances: list[str] = []
    values_apart = ""
    for done in range(1, _MOST_TIMES + 1):
        before = device.read()
        ceiling = measure(best)
        best = ceiling if best is None or ceiling.value > best.value else best
        if disturbance := in_use or _disturbance(before, device.read()):
            disturbances.append(disturbance)
        else:
            undisturbed.append(ceiling.value)
        apart = _LAUNCHES_APART if best.name == "launch.rate" else _APART
        agreeing = [value for value in undisturbed if value >= (1 - apart) * best.value]
        if done >= _LEAST_TIMES and len(agreeing) >= _LEAST_TIMES:
            return best
        values_apart = f"measurements of {best.name} differ by more than {100 * apart:.0f} %"
    assert best is not None
    return msgspec.structs.replace(best, doubt=next(iter(disturbances), values_apart))


def _disturbance(before: Reading, after: Reading) -> str:
    """Return what disturbed a measurement between two readings; empty if nothing is known."""
    slowed = sorted(_SLOWED & {*before.throttle, *after.throttle})
    if slowed:
        return f"the device was throttled ({', '.join(slowed)})"
    elapsed = after.at_s - before.at_s
    if before.waited_s is None or after.waited_s is None or elapsed <= 0:
        return ""
    waited = (after.waited_s - before.waited_s) / elapsed
    return "the machine was busy" if waited >= _WAITED else ""


def _in_use(device: Device) -> str:
    """Return a reason if other processes use the device; a GPU reports it while this one rests."""
    if device.kind == "cpu":
        return ""
    device.synchronize()
    time.sleep(_REST_S)
    share = device.utilization()
    return f"other work used {100 * share:.0f} % of the GPU" if share and share >= _IN_USE else ""


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


def _matmul_rate(device: Device, name: str, before: Ceiling | None = None) -> Ceiling:
    budget = _SECONDS_PER_SHAPE[device.kind]
    best = 0.0
    shape = ""
    with _tf32(name == "tf32"):
        for n in _MATRIX_SIZES[device.kind]:
            if before is not None and _shape(n) not in before.detail:
                continue
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
                if before is not None and before.detail != f"{_shape(n)} {layout}":
                    continue
                hopeless_s = _HOPELESS * 2 * n**3 / best if best else math.inf
                rate = 2 * n**3 / _seconds_per_call(device, multiply, budget, hopeless_s)
                if rate > best:
                    best, shape = rate, f"{_shape(n)} {layout}"
    return Ceiling(
        name=f"matmul.{name}", value=best, unit="FLOP/s", source="measured", detail=shape
    )


def _shape(n: int) -> str:
    return f"{n}×{n}×{n}"


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


def _copy_rate(device: Device, _: Ceiling | None = None) -> Ceiling:
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


def _launch_rate(device: Device, _: Ceiling | None = None) -> Ceiling:
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
        # Ceilings of earlier versions were stored without their doubts.
        "doubts",
    ]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / f"ceilings-{digest}.json"


def _cached(path: Path, environment: Environment) -> tuple[Ceiling, ...]:
    """Return the cached ceilings; empty without a readable cache."""
    try:
        return _checked(from_json(path.read_bytes(), tuple[Ceiling, ...]), environment)
    except (OSError, msgspec.DecodeError):
        return ()


def _write_cache(path: Path, measured: tuple[Ceiling, ...]) -> None:
    """Write the cache atomically. Without a writable cache, the next call measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [msgspec.json.encode(measured)])
