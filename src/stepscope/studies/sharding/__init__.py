"""What does dividing the optimizer's state among ranks save, and what does it cost?

    stepscope run sharding --size small --context 128 --ranks 2

Each way first runs alone, and what its tensors take is counted by kind; then all run interleaved.
"""

from stepscope.studies.sharding.cases import STUDY as STUDY
