"""The fsdp study: memory and time of fully sharded data parallelism.

    stepscope run fsdp --size small --context 128 --ranks 2

Measured like `sharding`. Besides, steps of `FSDP` are recorded: when the gather of each weight
ends, and when the weight is needed.
"""

from __future__ import annotations

from stepscope.studies.sharding import Sharding


class FullySharded(Sharding):
    name = "fsdp"
    title = "Fully sharded data parallelism"
    question = (
        "What does sharding parameters, gradients and state save, what does it cost, and do the"
        " gathers end in time?"
    )
    examples = ("stepscope run fsdp --size small --ranks 2",)


STUDY = FullySharded()
