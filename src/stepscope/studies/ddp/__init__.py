"""The ddp study: cost of averaging gradients, and its overlap with the backward pass.

    stepscope run ddp --size small --context 128 --ranks 2

All strategies for averaging gradients run interleaved on the same ranks, with one in memory at a
time: every round has a turn of each, in shuffled order, and one without communication. Before that,
each runs a few steps whose parameters are compared with those of one process. `exposed` is the step
time minus the time without communication; the wait after the backward pass is split into waiting
for the slowest rank and waiting for the transfer.
"""

from __future__ import annotations

import itertools

from stepscope.studies.base import Study
from stepscope.studies.ddp.cases import DDPCase, DDPFlags


class DataParallel(Study[DDPFlags, DDPCase]):
    name = "ddp"
    title = "Data parallelism"
    question = (
        "What does averaging gradients cost, and how much of it overlaps with the backward pass?"
    )
    examples = (
        "stepscope run ddp --size small --context 128 --ranks 2",
        "stepscope run ddp --size medium --ranks 2 4 --bucket-mb 1 10 100 1000",
        "stepscope run ddp --dtype float32 bfloat16 bfloat16-pure",
    )
    flags = DDPFlags
    case = DDPCase

    def cases(self, flags: DDPFlags) -> tuple[DDPCase, ...]:
        return tuple(
            DDPCase(**subject, ranks=ranks, backend=backend, dtype=dtype, bucket_mb=flags.bucket_mb)
            for subject, ranks, backend, dtype in itertools.product(
                flags.subjects(flags.context), flags.ranks, flags.backend, flags.dtype
            )
        )


STUDY = DataParallel()
