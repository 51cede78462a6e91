"""How long do collectives take, and what do the links carry?

    stepscope run allreduce --ranks 2 4 --collective all-reduce all-gather

The ranks start once for a case; what is timed is one collective between two barriers. (A timing of
the whole program is flat at the seconds that processes take to start, for every size.)
"""

from stepscope.studies.allreduce.cases import STUDY as STUDY
