"""The fsdp study: memory and time of fully sharded data parallelism.

    stepscope run fsdp --size small --context 128 --ranks 2

Measured like `sharding`: each strategy first runs alone and the bytes of its tensors are counted;
then all strategies run interleaved.
"""

from __future__ import annotations

from stepscope.studies.sharding import Sharding
from stepscope.studies.sharding.cases import FSDP_STRATEGIES


class FullySharded(Sharding):
    name = "fsdp"
    title = "Fully sharded data parallelism"
    question = "What does sharding parameters, gradients and state save, and what does it cost?"
    examples = ("stepscope run fsdp --size small --ranks 2",)
    strategies = FSDP_STRATEGIES


STUDY = FullySharded()
