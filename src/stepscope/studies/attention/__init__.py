"""What does attention written out as the formula reads cost, in time and in memory?

    stepscope run attention --head 16 64 128 --seq 256 1024 4096

Forward and backward are cases of their own: the backward is timed without the forward, from a
gradient that is there already. What the forward leaves in memory is counted and predicted.
"""

from stepscope.studies.attention.cases import STUDY as STUDY
