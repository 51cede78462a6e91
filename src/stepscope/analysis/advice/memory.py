"""Memory for time, and time for memory."""

from __future__ import annotations

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.rule import TIGHT, Advice, Judged, judge

_KEPT_OF_SAVED = 0.75
"""Share of what a model keeps for backward that lies within its blocks and is not kept any more."""


@judge
def _checkpoint(facts: Facts) -> Judged | None:
    if not facts.is_tight(TIGHT) or facts.recomputed_bytes or not facts.saved_bytes:
        return None
    gain = facts.lower_peak(int(_KEPT_OF_SAVED * facts.saved_bytes))
    if not gain:
        return None
    forward = facts.phase_ms("forward")
    advice = Advice(
        code="checkpoint",
        title="blocks run again in the backward",
        gain_ms=-forward,
        gain_bytes=gain,
        why=f"the peak is {facts.peak_bytes / facts.memory_bytes:.0%} of the memory, and"
        f" {facts.saved_bytes / 2**30:.3g} GiB of it are kept for backward",
        risk=f"time: a second forward of {forward:.3g} ms; it pays where the room is used,"
        " for a larger batch say",
        lines=("from torch.utils.checkpoint import checkpoint",
               f"x = checkpoint(block, x, use_reentrant=False){_of_list(facts)}"),
        setting={"checkpoint": "blocks"},
    )  # fmt: skip
    return Judged(advice, facts)


def _of_list(facts: Facts) -> str:
    return f"  # each block of model.{facts.block_list}" if facts.block_list else ""


@judge
def _no_checkpoint(facts: Facts) -> Judged | None:
    room = facts.memory_bytes * TIGHT - facts.peak_bytes
    if not facts.recomputed_bytes or room < facts.recomputed_bytes:
        return None
    forward = facts.phase_ms("forward")
    advice = Advice(
        code="no-checkpoint",
        title="fewer blocks run again in the backward",
        gain_ms=forward,
        gain_bytes=-facts.recomputed_bytes,
        why=f"the backward runs forwards again, for up to {forward:.3g} ms, and"
        f" {room / 2**30:.3g} GiB are free for the {facts.recomputed_bytes / 2**30:.3g} GiB that"
        " this saves",
        risk="memory",
        lines=("x = block(x)  # instead of checkpoint(block, x)",),
        setting={"checkpoint": "no"},
    )
    return Judged(advice, facts)
