"""AdamW: plain, fused, in the backward pass, and with float32 master weights."""

from stepscope.optim.adamw import AdamW
from stepscope.optim.fused import FusedAdamW
from stepscope.optim.in_backward import InBackwardAdamW
from stepscope.optim.master import MasterWeights

__all__ = ["AdamW", "FusedAdamW", "InBackwardAdamW", "MasterWeights"]
