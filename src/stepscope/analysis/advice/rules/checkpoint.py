"""Activation checkpointing: trade memory for time, or time for memory."""

from __future__ import annotations

from typing import Any

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import TIGHT, Change, Left, rule

_CHECKPOINTED_SHARE = 0.75
"""Share of the bytes saved for backward that lies inside blocks, and is freed by checkpointing."""


@rule("checkpoint", "activation checkpointing of each block")
def _checkpoint(facts: Facts) -> Change | Left | None:
    if facts.recomputed_bytes:
        return Left("activation checkpointing is used already")
    if not facts.is_tight(TIGHT):
        return Left(f"the peak is below {TIGHT:.0%} of the memory, and recomputation costs time")
    if not facts.saved_bytes:
        return None
    if (planned := facts.planned("step")) is not None and planned.plan is not None:
        return Left("a plan of what the blocks save costs less time")
    gain = facts.lower_peak(int(_CHECKPOINTED_SHARE * facts.saved_bytes))
    if not gain:
        return Left("the peak is that of the optimizer, not of saved activations")
    forward = facts.phase_ms("forward")
    return Change(
        after=facts,
        gain_ms=-forward,
        gain_bytes=gain,
        why=f"the peak is {facts.peak_bytes / facts.memory_bytes:.0%} of the memory, and"
        f" {facts.saved_bytes / 2**30:.3g} GiB of it are saved for backward",
        risk=f"time: a second forward pass of {forward:.3g} ms, or a part of it with"
        " `stepscope.fit`, which recomputes what a budget needs; it pays if the freed memory is"
        " used, for example for a larger batch",
        lines=(
            "from torch.utils.checkpoint import checkpoint",
            f"x = checkpoint(block, x, use_reentrant=False){_block_list_comment(facts)}",
        ),
        setting={"checkpoint": "blocks"},
    )


def _block_list_comment(facts: Facts) -> str:
    return f"  # each block of model.{facts.block_list}" if facts.block_list else ""


@rule("no-checkpoint", "fewer checkpointed blocks")
def _no_checkpoint(facts: Facts) -> Change | Left | None:
    free_bytes = facts.memory_bytes * TIGHT - facts.peak_bytes
    if not facts.recomputed_bytes:
        return Left("no activation checkpointing is used")
    if free_bytes < facts.recomputed_bytes:
        return Left("the memory has no room for the activations that are recomputed now")
    forward = facts.phase_ms("forward")
    return Change(
        after=facts,
        gain_ms=forward,
        gain_bytes=-facts.recomputed_bytes,
        why=f"the backward pass recomputes activations for up to {forward:.3g} ms, and"
        f" {free_bytes / 2**30:.3g} GiB are free; without checkpointing the step needs"
        f" {facts.recomputed_bytes / 2**30:.3g} GiB more",
        risk="memory",
        lines=("x = block(x)  # instead of checkpoint(block, x)",),
        setting={"checkpoint": "no"},
    )


@setting("checkpoint", "blocks", without="the model has no nn.ModuleList of repeated blocks")
def _checkpoint_blocks(program: Program, value: str) -> None:  # noqa: ARG001
    program.checkpoint_blocks()


@setting("checkpoint", "no", without="the model has no checkpointed blocks")
def _disable_checkpointing(program: Program, value: str) -> None:  # noqa: ARG001
    """Let checkpointed segments save their activations."""
    import torch.utils.checkpoint

    def call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        program.applied["checkpoint"] += 1
        for option in (
            "use_reentrant",
            "context_fn",
            "determinism_check",
            "debug",
            "preserve_rng_state",
            "early_stop",
        ):
            keywords.pop(option, None)
        return function(*arguments, **keywords)

    torch.utils.checkpoint.checkpoint = call
