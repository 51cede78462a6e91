"""What would this step take on ranks that one does not have?

    stepscope run rehearsal --size small --context 512 --dtype bfloat16
    stepscope rehearse --ranks 64 --link infiniband

One step is recorded on this device: how long its phases take, and when each gradient is ready. The
rest is replayed: reductions under a model of the links, for any number of ranks, strategy and
bucket size. With --check-ranks the replay is compared with real ranks of this machine over gloo:
their links are measured, the step is predicted, then run.
"""

from stepscope.studies.rehearsal.cases import STUDY as STUDY
