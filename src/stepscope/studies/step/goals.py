"""What the fastest step is to reach, next to what a user would take instead. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.model.memory import ALL, GATES, INPUTS, NORMS
from stepscope.studies.step.ladder import start
from stepscope.studies.workload import Workload
from stepscope.studies.workload_flags import AS_MADE, IN_BACKWARD

SCOPES = ("block", "model")
MODES = ("default", "reduce-overhead")
"""Tuning takes minutes for each form, so max-autotune is asked for by name."""
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
    checkpoint: str = NONE
    """Of the peer: without it the step does not fit."""
    thrifty: int = 0
    """There: blocks that keep their inputs only, where the rest keeps the gates too."""
    other_attention: str = "sdpa_cudnn"
    """Tried beside `auto`, which decides for steps whose host is not ahead."""
    spare: bool = False
    """Ours races with as little kept as one product made again allows, too."""


GOALS: dict[str, Goal] = {
    "2.7b-2048": Goal("2.7b", 2048, 4, faster=1.10, aim_mfu=0.56, memory=0.9, spare=True),
    "2.7b-512": Goal("2.7b", 512, 4, faster=1.25, aim_mfu=0.50, other_attention="triton"),
    "xl-512": Goal("xl", 512, 4, faster=1.4, aim_mfu=0.40, other_attention="triton"),
    "xl-2048": Goal("xl", 2048, 4, faster=1.15, aim_mfu=0.55),
    "small-512": Goal("small", 512, 4, most_ms=9.0, aim_mfu=0.22, other_attention="triton"),
    "8b-32768": Goal(
        "8b",
        32_768,
        1,
        "bfloat16-pure",
        "2026",
        faster=1.15,
        aim_mfu=0.55,
        checkpoint="1",
        thrifty=16,
    ),
    "tiny-64": Goal("tiny", 64, 2, "float32"),
}
SPARE_TIME, SPARE_MEMORY, SPARE_AIM = 1.15, 0.8, 0.75
"""With less kept: at most so many times the peer's time, at most this share of its memory."""
MEMORY_AIM = 0.85


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """How a form of the step did alone; kept in a record's notes."""

    ms: float
    first_s: float
    """Until it had run for the first time: building, compiling, tuning."""
    peak_bytes: float | None = None
    turns_ms: float | None = None
    """In alternation with the forms that were close to the fastest of its side."""


SIDES = {
    "peer": "the peer",
    "ours": "ours",
    "spare": "ours with less kept",
    "narrow": "ours with narrower formats",
}


class Racer(NamedTuple):
    side: str
    """One of `SIDES`."""
    workload: Workload

    @property
    def name(self) -> str:
        w = self.workload
        parts = [
            w.compile if w.compile != "no" else "eager",
            *([] if w.compile == "no" else [w.compile_mode]),
            w.attention,
            *(["joined"] if w.joined else ["fused pieces"] if w.fused else []),
            *(["searched"] if w.searched else []),
            *(["narrow stream"] if precision(w.dtype).narrow_stream else []),
            *([] if w.keep == ALL else [f"keeps {w.keep}"]),
            *(["checkpointed"] if w.checkpoint != NONE else []),
            *([f"{_UPDATES[w.optimizer]} in backward"] if w.optimizer in _UPDATES else []),
            *(["graph"] if w.graph else []),
        ]
        return f"{self.side}: {' '.join(parts)}"


_UPDATES = {IN_BACKWARD: "updates", AS_MADE: "narrow updates"}


def goal(name: str) -> Goal:
    if name not in GOALS:
        raise unknown_name("race", name, GOALS)
    return GOALS[name]


def racers(
    name: str, scopes: tuple[str, ...] = SCOPES, modes: tuple[str, ...] = MODES,
    attentions: tuple[str, ...] = ATTENTIONS, forms: tuple[str, ...] = (),
) -> tuple[Racer, ...]:  # fmt: skip
    """The peer in its forms and ours; the same formats of weights, gradients and state. One of the
    peer, then ours, then the rest: where time runs out there is a race all the same. `forms` leaves
    those whose name has one of these words in it."""
    wanted = goal(name)
    first = start(wanted.size, wanted.table, wanted.context, wanted.batch, {})
    common = msgspec.structs.replace(first, dtype=wanted.dtype)
    # All logits of a long sequence over a large vocabulary do not fit: both get the fused loss.
    loss = "fused" if wanted.checkpoint != NONE else "plain"
    peer = msgspec.structs.replace(
        common, optimizer="torch-fused", loss=loss, checkpoint=wanted.checkpoint
    )
    ours = msgspec.structs.replace(
        common, optimizer="stepscope-fused", attention="auto", loss="fused"
    )
    if wanted.size == "tiny":
        # For machines without a GPU, where nothing is compiled in a hurry.
        peers = [_racer("peer", peer, attention=kind) for kind in ("sdpa", "reference")]
        own = [_racer("ours", ours, optimizer="torch-fused")]
    else:
        peers = [
            _racer("peer", peer, compile=scope, compile_mode=mode, attention=attention)
            for scope, mode, attention in itertools.product(scopes, modes, attentions)
        ]
        own = list(_our_forms(wanted, ours))
    found = [*peers[:1], *own, *peers[1:]]
    left = [racer for racer in found if not forms or any(form in racer.name for form in forms)]
    if {"peer", "ours"} - {racer.side for racer in left}:
        raise UsageError(
            f"no race of {name} between forms with {', '.join(forms)} in their name",
            f"name one of each side: {'; '.join(racer.name for racer in found)}",
        )
    return tuple(left)


def _our_forms(wanted: Goal, ours: Workload) -> Iterator[Racer]:
    joined = msgspec.structs.replace(ours, fused=True, joined=True)
    beside = msgspec.structs.replace(joined, optimizer=IN_BACKWARD)
    if wanted.checkpoint != NONE:
        # As much is kept as fits; what runs again is one product of some blocks.
        for keep in (f"{INPUTS}-{wanted.thrifty}", INPUTS):
            yield _racer("ours", beside, keep=keep)
        yield _racer("ours", ours, compile="block", checkpoint=wanted.checkpoint)
        return
    keep = ALL if wanted.memory is None else GATES
    yield _racer("ours", beside, keep=keep, graph=True)
    if wanted.memory is not None:
        yield _racer("ours", beside, keep=NORMS, graph=True, searched=True)
    for attention in ("auto", wanted.other_attention):
        yield _racer("ours", beside, keep=keep, graph=True, searched=True, attention=attention)
    yield _racer("ours", joined, keep=keep, graph=True)
    if wanted.memory is not None:
        yield _racer("ours", beside, keep=keep)
    yield _racer("ours", ours, compile="block", graph=True)
    # Gradients in another format than the peer's, and a stream: no forms of the same row.
    made = msgspec.structs.replace(beside, keep=keep, graph=True, optimizer=AS_MADE)
    yield _racer("narrow", made)
    most = ALL if wanted.memory is None else NORMS
    made = msgspec.structs.replace(made, dtype=f"{wanted.dtype}-stream", searched=True, keep=most)
    for attention in ("auto", wanted.other_attention):
        yield _racer("narrow", made, attention=attention)
    if wanted.spare:
        yield _racer("spare", beside, keep=INPUTS)


def _racer(side: str, workload: Workload, **changes: object) -> Racer:
    return Racer(side, msgspec.structs.replace(workload, **changes))
