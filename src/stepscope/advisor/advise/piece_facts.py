"""Kernels of a recorded step that `stepscope.accelerate` would replace, by piece."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from stepscope.advisor.advise.attention_facts import words_of
from stepscope.analysis.advice.facts import PhaseWork, PieceShare, PieceWork
from stepscope.analysis.advice.pieces import (
    ATTENTION,
    EMBEDDING,
    MLP,
    NORM,
    group_of,
)
from stepscope.analysis.kernels.classes import MEMORY_BOUND
from stepscope.analysis.trace.summary import Summary, Use

_DIGITS = re.compile(r"\d+")
_FUSED_OVER_LONGEST = 1.1
"""Time of a fused kernel over that of the longest kernel that it replaces: both read and write
most of what all of them do."""
_FUSED_LAUNCHES = {"forward": 1.0, "backward": 2.0}
"""Kernels of a fused layer; the backward also sums the gradient of a weight."""
_WITH_PARTS = (MLP,)
"""Pieces that replace their submodules too; those of others are pieces themselves."""
_KINDS = {
    NORM: MEMORY_BOUND,
    MLP: ("elementwise",),
    ATTENTION: ("elementwise", "copy/cast"),
    EMBEDDING: (*MEMORY_BOUND, "other"),
}
"""Kernel classes that a piece replaces. Others have no kernels of their own: see the rules."""


def piece_work(
    pieces: Mapping[str, Mapping[str, int]], summary: Summary, attention: Sequence[PhaseWork]
) -> tuple[PieceWork, ...]:
    """Return the pieces with the time of the kernels that each would replace. `pieces` has names
    of modules and how many there are; `attention` is the naive attention, which is not part of
    them."""
    return tuple(
        PieceWork(
            piece=piece,
            modules=sum(names.values()),
            shares=_shares(piece, tuple(names), summary, attention),
        )
        for piece, names in pieces.items()
    )


def _shares(
    piece: str, names: Sequence[str], summary: Summary, attention: Sequence[PhaseWork]
) -> tuple[PieceShare, ...]:
    group = group_of(piece)
    if not summary.on_device or group not in _KINDS:
        return ()
    modules = {_words(name) for name in names if name}
    uses = [
        use
        for use in summary.uses
        if use.kind in _KINDS[group] and _belongs(_words(use.module), modules, group)
    ]
    phases = ("backward",) if group == EMBEDDING else ("forward", "backward")
    shares = (_share(phase, [use for use in uses if use.phase == phase]) for phase in phases)
    found = [share for share in shares if share.launches]
    if group == ATTENTION:
        found = [_without(share, attention) for share in found]
    return tuple(found)


def _words(module: str) -> str:
    """Return a name without numbers: a trace writes a star for every one, as in `norm*`."""
    return words_of(_DIGITS.sub("*", module))


def _belongs(module: str, modules: set[str], group: str) -> bool:
    if group in _WITH_PARTS:
        return any(module == one or module.startswith(f"{one} ") for one in modules)
    return module in modules


def _share(phase: str, uses: Sequence[Use]) -> PieceShare:
    classes: dict[str, float] = {}
    longest: dict[str, tuple[float, float]] = {}
    for use in uses:
        classes[use.kind] = classes.get(use.kind, 0.0) + use.ms
        if use.count:
            known = longest.get(use.module, (0.0, 0.0))
            longest[use.module] = max(known, (use.ms / use.count, float(use.places)))
    return PieceShare(
        phase=phase,
        classes=classes,
        launches=sum(use.count for use in uses),
        fused_ms=_FUSED_OVER_LONGEST * sum(ms * places for ms, places in longest.values()),
        fused_launches=_FUSED_LAUNCHES[phase] * sum(places for _, places in longest.values()),
    )


def _without(share: PieceShare, attention: Sequence[PhaseWork]) -> PieceShare:
    """Return the share without the naive attention, whose kernels are in the same module."""
    naive = next((work for work in attention if work.name == share.phase), None)
    if naive is None:
        return share
    classes = {k: max(0.0, ms - naive.classes.get(k, 0.0)) for k, ms in share.classes.items()}
    left = sum(classes.values()) / share.ms if share.ms else 0.0
    return PieceShare(
        phase=share.phase,
        classes=classes,
        launches=left * share.launches,
        fused_ms=left * share.fused_ms,
        fused_launches=min(left * share.launches, share.fused_launches),
    )
