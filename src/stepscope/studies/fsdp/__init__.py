"""What does fully sharded data parallelism save, and what does it cost?

    stepscope run fsdp --size small --context 128 --ranks 2

Measured as `sharding` is: each way first runs alone and its tensors are counted; then all run
interleaved.
"""

from stepscope.studies.fsdp.cases import STUDY as STUDY
