"""What does data parallelism cost, and how much of it is hidden behind the backward?

    stepscope run ddp --size small --context 128 --ranks 2

All strategies to average gradients run interleaved in the same ranks: every round has one step of
each, in an order that changes, and one without any communication. `exposed` is what a step takes
longer than that one; the wait at the end of the backward is split into waiting for the slowest rank
and waiting for bytes.
"""

from stepscope.studies.ddp.cases import STUDY as STUDY
