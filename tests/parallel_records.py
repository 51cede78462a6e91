"""Records of the studies on several ranks, with given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sample_records import planted, times
from stepscope.records.schema import Quantity, Record
from stepscope.studies.registry import find_study

SIZES = (2**10, 2**16, 2**22)


def collective_record(
    collective: str = "all-reduce",
    *,
    ranks: int = 2,
    latency_ms: float = 0.1,
    bytes_per_ms: float = 1e6,
    wrong: int = 0,
    **changes: Any,
) -> Record:
    """A sweep on a link with this latency and bandwidth; rank 1 is always slightly later."""
    study = find_study("allreduce")
    flags = study.flags(collective=(collective,), ranks=(ranks,), sizes=SIZES)
    (case,) = study.cases(flags)
    series = tuple(
        times(
            "collective",
            (latency_ms + size / bytes_per_ms) * (1 + rank / 100),
            "host",
            rank=rank,
            size=size,
        )
        for size in SIZES
        for rank in range(ranks)
    )
    return planted(
        "allreduce",
        case,
        changes,
        known={
            "quantities": tuple(
                Quantity(name="wrong", size=size, value=wrong, unit="elements") for size in SIZES
            )
        },
        series=series,
        notes={"backend": "gloo"},
    )


STRATEGIES = ("naive", "flat", "overlap", "bucketed 1 MiB", "bucketed 10 MiB")


def ddp_record(
    steps: Mapping[str, float] | None = None,
    *,
    ranks: int = 2,
    context: int = 128,
    communication: float = 40.0,
    **changes: Any,
) -> Record:
    """Each strategy with a step of that many ms; rank 1 is later and waits less for others."""
    study = find_study("ddp")
    flags = study.flags(context=(context,), ranks=(ranks,), bucket_mb=(1.0, 10.0))
    (case,) = study.cases(flags)
    durations = {"no communication": 100.0, **dict.fromkeys(STRATEGIES, 120.0), "torch DDP": 120.0}
    durations |= steps or {}
    series = []
    for strategy, step in durations.items():
        phases = {
            "step": step,
            "forward": 30.0,
            "backward": 60.0,
            "waited": step - 100.0,
            "optimizer": 10.0,
        }
        if strategy in STRATEGIES:
            phases |= {"slowest": 2.0, "transfer": step - 102.0, "communication": communication}
        for name, ms in phases.items():
            for rank in range(ranks):
                ms = max(ms, 1e-3)
                series.append(
                    times(name, ms, "host", variant=strategy, rank=rank, seed=len(series))
                )
    lanes = {"naive": {"compute": [(0.0, 30.0, "forward")], "reductions": [(90.0, 95.0, "2 MiB")]}}
    return planted(
        "ddp",
        case,
        changes,
        known={"quantities": (Quantity(name="gradient_bytes", value=2**29, unit="B"),)},
        series=tuple(series),
        notes={"backend": "gloo"},
        attachments={"timeline": lanes},
    )


def sharding_record(
    steps: Mapping[str, float] | None = None,
    *,
    ranks: int = 2,
    context: int = 128,
    shares: Sequence[float] | None = None,
    **changes: Any,
) -> Record:
    """Parameters of 1 GiB; `shares` are the ranks' fractions of the 2 GiB of state."""
    study = find_study("sharding")
    flags = study.flags(ranks=(ranks,), context=context, batch=12)
    (case,) = study.cases(flags)
    durations = dict.fromkeys(("unsharded", "broadcast", "scatter", "torch ZeRO"), 100.0)
    durations |= steps or {}
    series, quantities = [], []
    for variant, step in durations.items():
        for name, ms in {"step": step, "backward": step - 20.0, "optimizer": 20.0}.items():
            for rank in range(ranks):
                series.append(times(name, ms, "host", variant=variant, rank=rank, seed=len(series)))
        for rank in range(ranks):
            part = 1.0 if variant == "unsharded" else (shares or [1 / ranks] * ranks)[rank]
            sizes = {"parameters": 2**30, "gradients": 2**30, "state": 2**31 * part}
            for kind, size in sizes.items():
                quantities.append(
                    Quantity(name=kind, variant=variant, rank=rank, value=size, unit="B")
                )
    return planted(
        "sharding",
        case,
        changes,
        series=tuple(series),
        quantities=tuple(quantities),
        notes={"backend": "gloo"},
    )


def fsdp_record(steps: Mapping[str, float] | None = None, **options: Any) -> Record:
    """Like the record of sharding, with every kind of bytes divided by `shares`."""
    shares = options.pop("shares", None)
    base = sharding_record(steps, **options)
    named = {"broadcast": "FSDP", "torch ZeRO": "torch fully_shard"}
    ranks = base.config["ranks"]
    quantities = []
    for one in base.quantities:
        if one.variant in named:
            part = (shares or [1 / ranks] * ranks)[one.rank]
            full = base.quantity(one.name, variant="unsharded", rank=one.rank) or 0.0
            quantities.append(
                msgspec.structs.replace(one, variant=named[one.variant], value=full * part)
            )
        elif one.variant == "unsharded":
            quantities.append(one)
    series = [
        msgspec.structs.replace(one, variant=named.get(one.variant, one.variant))
        for one in base.series
        if one.variant != "scatter"
    ]
    return msgspec.structs.replace(
        base, study="fsdp", id=f"fsdp-{base.id}", series=tuple(series), quantities=tuple(quantities)
    )


def leaderboard_record(
    *,
    step: float = 100.0,
    total_s: float = 50.0,
    ranks: int = 2,
    backend: str = "nccl",
    flags: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """The test of the handout, or with other flags a smaller one."""
    study = find_study("leaderboard")
    (case,) = study.cases(study.flags(ranks=(ranks,), **(flags or {})))
    seconds = {"build_s": 5.0, "first_s": 9.0, "total_s": total_s, "limit_s": 600.0}
    return planted(
        "leaderboard",
        case,
        changes,
        known={
            "quantities": tuple(
                Quantity(name=name, value=value, unit="s") for name, value in seconds.items()
            )
        },
        series=tuple(times("step", step, "host", rank=rank) for rank in range(ranks)),
        notes={"backend": backend},
    )
