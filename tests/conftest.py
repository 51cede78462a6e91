"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before any test loads
them. No test fails because a machine is slow."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

collect_ignore = ["integrations"]
"""They need other libraries: `make test-integrations` installs them and names the folder."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tests share the machine with each other: a command that waited for them would never begin.
os.environ["STEPSCOPE_WAIT"] = "0"

settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")
