"""What the fastest step is to reach, next to what a user would take instead. No torch."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec

from stepscope.errors import unknown_name
from stepscope.studies.step.ladder import start
from stepscope.studies.workload import Workload

SCOPES = ("block", "model")
MODES = ("default", "reduce-overhead", "max-autotune")
ATTENTIONS = ("sdpa_flash", "sdpa_cudnn")


class Goal(NamedTuple):
    """A training step, and what ours is to reach in it."""

    size: str
    context: int
    batch: int
    dtype: str = "bfloat16"
    table: str = "2025"
    faster: float | None = None
    """How many times as fast as the peer at least."""
    most_ms: float | None = None
    aim_mfu: float | None = None
    """Of the data sheet's rate."""
    memory: float | None = None
    """Our peak as a share of the peer's at most."""
    checkpoint: str = "no"
    """For both sides: without it the step does not fit."""
    spare: bool = False
    """Ours races with checkpointing as well."""


GOALS: dict[str, Goal] = {
    "2.7b-2048": Goal("2.7b", 2048, 4, faster=1.10, aim_mfu=0.56, memory=0.9, spare=True),
    "2.7b-512": Goal("2.7b", 512, 4, faster=1.25, aim_mfu=0.50),
    "xl-512": Goal("xl", 512, 4, faster=1.4, aim_mfu=0.40),
    "xl-2048": Goal("xl", 2048, 4, faster=1.15, aim_mfu=0.55),
    "small-512": Goal("small", 512, 4, most_ms=9.0, aim_mfu=0.22),
    "8b-32768": Goal(
        "8b", 32_768, 1, "bfloat16-pure", "2026", faster=1.15, aim_mfu=0.55, checkpoint="1"
    ),
    "tiny-64": Goal("tiny", 64, 2, "float32"),
}
SPARE_TIME, SPARE_MEMORY, SPARE_AIM = 1.15, 0.8, 0.75
"""With checkpointing: at most so many times the peer's time, at most this share of its memory."""
MEMORY_AIM = 0.85


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """How a form of the step did alone; kept in a record's notes."""

    ms: float
    first_s: float
    """Until it had run for the first time: building, compiling, tuning."""
    peak_bytes: float | None = None


class Racer(NamedTuple):
    side: str
    """`peer`, `ours`, or `spare`: ours with checkpointing."""
    workload: Workload

    @property
    def name(self) -> str:
        w = self.workload
        parts = [
            w.compile if w.compile != "no" else "eager",
            *([] if w.compile == "no" else [w.compile_mode]),
            w.attention,
            *(["fused pieces"] if w.fused else []),
            *(["graph"] if w.graph else []),
            *(["checkpointed"] if self.side == "spare" else []),
        ]
        return f"{self.side}: {' '.join(parts)}"


def goal(name: str) -> Goal:
    if name not in GOALS:
        raise unknown_name("race", name, GOALS)
    return GOALS[name]


def racers(
    name: str, scopes: tuple[str, ...] = SCOPES, modes: tuple[str, ...] = MODES,
    attentions: tuple[str, ...] = ATTENTIONS,
) -> tuple[Racer, ...]:  # fmt: skip
    """The peer in all its forms, then ours; the same formats of weights, gradients and state."""
    wanted = goal(name)
    first = start(wanted.size, wanted.table, wanted.context, wanted.batch, {})
    common = msgspec.structs.replace(first, dtype=wanted.dtype, checkpoint=wanted.checkpoint)
    # All logits of a long sequence over a large vocabulary do not fit: both get the fused loss.
    loss = "fused" if wanted.checkpoint != "no" else "plain"
    peer = msgspec.structs.replace(common, optimizer="torch-fused", loss=loss)
    ours = msgspec.structs.replace(
        common, optimizer="stepscope-fused", attention="auto", loss="fused"
    )
    if wanted.size == "tiny":
        # For machines without a GPU, where nothing is compiled in a hurry.
        return (
            *(_racer("peer", peer, attention=kind) for kind in ("sdpa", "reference")),
            _racer("ours", ours, optimizer="torch-fused"),
        )
    found = [
        _racer("peer", peer, compile=scope, compile_mode=mode, attention=attention)
        for scope, mode, attention in itertools.product(scopes, modes, attentions)
    ]
    # A graph of a checkpointed step would hold what checkpointing is there to let go of.
    graph = wanted.checkpoint == "no"
    found += [
        *(_racer("ours", ours, compile=scope, graph=graph) for scope in scopes),
        _racer("ours", ours, fused=True, graph=graph),
    ]
    if "max-autotune" in modes:
        tuned = "max-autotune-no-cudagraphs"
        found.append(_racer("ours", ours, compile="block", compile_mode=tuned, graph=graph))
    if not graph:
        found.append(_racer("ours", ours, compile="block", attention="sdpa_cudnn"))
    if wanted.spare:
        found.append(_racer("spare", ours, compile="block", checkpoint="1"))
    return tuple(found)


def _racer(side: str, workload: Workload, **changes: object) -> Racer:
    return Racer(side, msgspec.structs.replace(workload, **changes))
