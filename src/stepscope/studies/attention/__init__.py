"""The attention study: time and memory of naive attention.

    stepscope run attention --head-dim 16 64 128 --context 256 1024 4096

Forward and backward pass are separate cases: the backward pass is timed alone, from an existing
output gradient. The bytes that the forward pass saves for backward are counted and predicted.
"""

from __future__ import annotations

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
        cases = AttentionCase.combinations(
            flags,
            *("attention", "dtype", "seq", "head", "mode"),
            dtype=[precision(dtype).name for dtype in flags.dtype],
            seq=flags.context,
            head=flags.head_dim,
            mode=MODES,
        )
        return (*cases,)


STUDY = Attention()
