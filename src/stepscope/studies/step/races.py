"""The races of the step study: their shapes, and the forms of each side. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.kernels.activation_policy import ALL, GATES, INPUTS, NORMS
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.studies.step.ladder import start
from stepscope.studies.training.flags import AS_MADE, IN_BACKWARD
from stepscope.studies.training.workload import Workload

SCOPES = ("block", "model")
MODES = ("default", "reduce-overhead")
"""Tuning takes minutes for each form, so max-autotune is asked for by name."""
ATTENTIONS = ("sdpa_flash", "sdpa_cudnn")


class RaceSpec(NamedTuple):
    """The training step of a race, and which of our forms take part in it."""

    size: str
    context: int
    batch: int
    dtype: str = "bfloat16"
    table: str = "2025"
    checkpoint: str = NONE
    """Activation checkpointing of the peer, where the step does not fit without."""
    thrifty: int = 0
    """Blocks of ours that save only their inputs, where the peer is checkpointed."""
    other_attention: str = "sdpa_cudnn"
    """Tried next to `auto`, which decides for steps whose host is not ahead."""
    less_memory: bool = False
    """Our forms save less for the backward than they could, and one saves inputs only; their peak
    memory is compared with the peer's."""


RACES: dict[str, RaceSpec] = {
    "2.7b-2048": RaceSpec("2.7b", 2048, 4, less_memory=True),
    "2.7b-512": RaceSpec("2.7b", 512, 4, other_attention="triton"),
    "xl-512": RaceSpec("xl", 512, 4, other_attention="triton"),
    "xl-2048": RaceSpec("xl", 2048, 4),
    "small-512": RaceSpec("small", 512, 4, other_attention="triton"),
    "8b-32768": RaceSpec("8b", 32_768, 1, "bfloat16-pure", "2026", checkpoint="1", thrifty=16),
    "tiny-64": RaceSpec("tiny", 64, 2, "float32"),
}


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


def race_spec(name: str) -> RaceSpec:
    if name not in RACES:
        raise unknown_name("race", name, RACES)
    return RACES[name]


def racers(
    name: str,
    scopes: tuple[str, ...] = SCOPES,
    modes: tuple[str, ...] = MODES,
    attentions: tuple[str, ...] = ATTENTIONS,
    forms: tuple[str, ...] = (),
) -> tuple[Racer, ...]:
    """The peer in its forms and ours; the same formats of weights, gradients and state. One of the
    peer, then ours, then the rest: where time runs out there is a race all the same. `forms` leaves
    those whose name has one of these words in it."""
    spec = race_spec(name)
    first = start(spec.size, spec.table, spec.context, spec.batch, {})
    common = msgspec.structs.replace(first, dtype=spec.dtype)
    # All logits of a long sequence over a large vocabulary do not fit: both get the fused loss.
    loss = "fused" if spec.checkpoint != NONE else "plain"
    peer = msgspec.structs.replace(
        common, optimizer="torch-fused", loss=loss, checkpoint=spec.checkpoint
    )
    ours = msgspec.structs.replace(
        common, optimizer="stepscope-fused", attention="auto", loss="fused"
    )
    if spec.size == "tiny":
        # For machines without a GPU, where nothing is compiled in a hurry.
        peers = [_racer("peer", peer, attention=kind) for kind in ("sdpa", "reference")]
        own = [_racer("ours", ours, optimizer="torch-fused")]
    else:
        peers = [
            _racer("peer", peer, compile=scope, compile_mode=mode, attention=attention)
            for scope, mode, attention in itertools.product(scopes, modes, attentions)
        ]
        own = list(_our_forms(spec, ours))
    found = [*peers[:1], *own, *peers[1:]]
    left = [racer for racer in found if not forms or any(form in racer.name for form in forms)]
    if {"peer", "ours"} - {racer.side for racer in left}:
        raise UsageError(
            f"no race of {name} between forms with {', '.join(forms)} in their name",
            f"name one of each side: {'; '.join(racer.name for racer in found)}",
        )
    return tuple(left)


def _our_forms(spec: RaceSpec, ours: Workload) -> Iterator[Racer]:
    joined = msgspec.structs.replace(ours, fused=True, joined=True)
    beside = msgspec.structs.replace(joined, optimizer=IN_BACKWARD)
    if spec.checkpoint != NONE:
        # As much is kept as fits; what runs again is one product of some blocks.
        for keep in (f"{INPUTS}-{spec.thrifty}", INPUTS):
            yield _racer("ours", beside, keep=keep)
        yield _racer("ours", ours, compile="block", checkpoint=spec.checkpoint)
        return
    keep = GATES if spec.less_memory else ALL
    yield _racer("ours", beside, keep=keep, graph=True)
    if spec.less_memory:
        yield _racer("ours", beside, keep=NORMS, graph=True, searched=True)
    for attention in ("auto", spec.other_attention):
        yield _racer("ours", beside, keep=keep, graph=True, searched=True, attention=attention)
    yield _racer("ours", joined, keep=keep, graph=True)
    if spec.less_memory:
        yield _racer("ours", beside, keep=keep)
    yield _racer("ours", ours, compile="block", graph=True)
    # Gradients in another format than the peer's, and a stream: no forms of the same row.
    made = msgspec.structs.replace(beside, keep=keep, graph=True, optimizer=AS_MADE)
    yield _racer("narrow", made)
    most = NORMS if spec.less_memory else ALL
    made = msgspec.structs.replace(made, dtype=f"{spec.dtype}-stream", searched=True, keep=most)
    for attention in ("auto", spec.other_attention):
        yield _racer("narrow", made, attention=attention)
    if spec.less_memory:
        yield _racer("spare", beside, keep=INPUTS)


def _racer(side: str, workload: Workload, **changes: object) -> Racer:
    return Racer(side, msgspec.structs.replace(workload, **changes))
