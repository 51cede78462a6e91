"""The attention study: time and memory of naive attention.

    stepscope run attention --head-dim 16 64 128 --context 256 1024 4096

Forward and backward pass are separate cases: the backward pass is timed alone, from an existing
output gradient. The bytes that the forward pass saves for backward are counted and predicted.
"""

from __future__ import annotations

import itertools

from stepscope.model.config import precision
from stepscope.studies.attention.cases import MODES, AttentionCase, AttentionFlags
from stepscope.studies.base import Study


class Attention(Study[AttentionFlags, AttentionCase]):
    name = "attention"
    title = "Naive attention"
    question = (
        "What does naive attention cost in time and in memory,"
        " and at which length does it no longer fit?"
    )
    examples = (
        "stepscope run attention",
        "stepscope run attention --head-dim 64 --context 1024 4096 16384 --causal --dtype bfloat16",
    )
    flags = AttentionFlags
    case = AttentionCase
    no_model = "it measures attention alone"

    def cases(self, flags: AttentionFlags) -> tuple[AttentionCase, ...]:
        return tuple(
            AttentionCase(
                attention=attention,
                batch=flags.batch,
                heads=flags.heads,
                seq=seq,
                head=head,
                dtype=precision(dtype).name,
                causal=flags.causal,
                mode=mode,
                warmup=flags.warmup,
                steps=flags.steps,
            )
            for attention, dtype, seq, head, mode in itertools.product(
                flags.attention, flags.dtype, flags.context, flags.head_dim, MODES
            )
        )


STUDY = Attention()
