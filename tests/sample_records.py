"""Synthetic records like those of a measurement on a GPU, for tests without a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from stepscope.records.schema import Ceiling, Clock, Environment, Quantity, Record, Run, Series

PHASE_SHARES = {"forward": 0.30, "loss": 0.02, "backward": 0.60, "optimizer": 0.08}


def environment(**changes: Any) -> Environment:
    fields: dict[str, Any] = {
        "device_kind": "cuda",
        "device_name": "NVIDIA H200",
        "device_count": 1,
        "device_memory_bytes": 139 << 30,
        "cpu": "Xeon 8480",
        "cpu_cores": 16,
        "host_memory_bytes": 128 << 30,
        "threads": 16,
        "platform": "Linux-6.1",
        "python": "3.11.9",
        "torch": "2.11.0",
        "stepscope": "1.0.0",
        "driver": "570.1",
        "cuda": "12.8",
        # A limit without usual ceilings: the rates of tests are planted.
        "power_limit_w": 690.0,
        "commit": "abc123",
    }
    return Environment(**fields | changes)


def samples(
    median: float, count: int = 20, *, spread: float = 0.01, seed: int = 0
) -> tuple[float, ...]:
    noise, middle = _noise(count, spread, seed)
    return tuple((median * noise / middle).tolist())


@cache
def _noise(count: int, spread: float, seed: int) -> tuple[np.ndarray[Any, Any], float]:
    """Noise and its median. Every record asks for the same few."""
    noise = np.random.default_rng(seed).lognormal(0.0, spread, count)
    noise.flags.writeable = False
    return noise, float(np.median(noise))


def times(
    name: str,
    median: float,
    clock: Clock = "device",
    *,
    variant: str = "",
    phase: str = "",
    rank: int = 0,
    size: int = 0,
    **how: Any,
) -> Series:
    return Series(
        name=name,
        unit="ms",
        values=samples(median, **how),
        clock=clock,
        variant=variant,
        phase=phase,
        rank=rank,
        size=size,
    )


def merged(*groups: Iterable[Quantity]) -> tuple[Quantity, ...]:
    """Quantities of all groups; a quantity replaces an earlier one with the same name and
    dimensions."""
    by_key = {
        (one.name, one.variant, one.phase, one.rank, one.size): one
        for group in groups
        for one in group
    }
    return tuple(by_key.values())


def quantity_of(
    quantities: Iterable[Quantity],
    name: str,
    *,
    variant: str = "",
    phase: str = "",
    rank: int = 0,
    size: int = 0,
) -> Quantity:
    """The only quantity with that name and these dimensions."""
    wanted = (name, variant, phase, rank, size)
    (match,) = (
        one
        for one in quantities
        if (one.name, one.variant, one.phase, one.rank, one.size) == wanted
    )
    return match


def value_of(quantities: Iterable[Quantity], name: str, **dimensions: Any) -> float:
    return quantity_of(quantities, name, **dimensions).value


def step_series(step: float = 100.0, issued: float = 0.4, **how: Any) -> tuple[Series, ...]:
    """A train step whose phases add up; issuing it takes the share `issued` of its time."""
    phases = (times(name, step * share, **how) for name, share in PHASE_SHARES.items())
    launches = (
        times(name, step * share * issued, "host", **how) for name, share in PHASE_SHARES.items()
    )
    return (
        times("step", step, **how),
        times("step", step * 1.01, "host", **how),
        *phases,
        *launches,
        times("issue", step * issued, "host", **how),
    )


def ceilings(bfloat16: float = 700e12, sheet: float = 989e12) -> tuple[Ceiling, ...]:
    name, unit = "matmul.bfloat16", "FLOP/s"
    return (
        Ceiling(name=name, value=bfloat16, unit=unit, source="measured"),
        Ceiling(name=name, value=sheet, unit=unit, source="NVIDIA H200 data sheet"),
    )


def record(**changes: Any) -> Record:
    """A valid record of a train step; its case and id follow from its config unless given."""
    config = {
        "size": "xl",
        "context": 512,
        "batch": 4,
        "dtype": "bfloat16",
        "mode": "train-step",
    } | changes.pop("config", {})
    case = "-".join(str(value) for value in config.values())
    defaults = (
        Quantity(name="flops", value=28e12, unit="FLOP"),
        Quantity(name="tokens", value=2048, unit="tokens"),
        Quantity(name="peak_bytes", value=40 << 30, unit="B"),
        Quantity(name="gradients_missing", value=0, unit="parameters"),
    )
    fields: dict[str, Any] = {
        "run": "run-1",
        "study": "benchmark",
        "case": case,
        "config": config,
        "status": "ok",
        "environment": environment(),
        "started": "2026-01-02T03:04:05+00:00",
        "elapsed_s": 12.5,
        "series": step_series(),
        "ceilings": ceilings(),
    } | changes
    fields["quantities"] = merged(defaults, changes.get("quantities", ()))
    fields.setdefault(
        "id",
        "-".join((fields["run"], fields["study"], fields["case"], str(fields.get("attempt", 1)))),
    )
    return Record(**fields)


def planted(
    study: str,
    case: Any,
    changes: Mapping[str, Any],
    *,
    known: Mapping[str, Any] | None = None,
    **measured: Any,
) -> Record:
    """A record of a case of a study with the fields `known`, those that were `measured`, which a
    failed case does not have, and the changes of a test."""
    if changes.get("status", "ok") != "ok":
        measured = {"series": ()}
    fields = {"case": case.key, "config": case.config, **(known or {}), **measured}
    return record(study=study, **fields | dict(changes))


def run(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "id": "run-1",
        "created": "2026-01-02T03:04:00+00:00",
        "command": "stepscope run benchmark",
        "plan": "plan-a",
        "cases": 3,
    }
    return Run(**fields | changes)
