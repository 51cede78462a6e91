"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before any test loads
them. No test fails because a machine is slow."""

from __future__ import annotations

import gc
import os
import signal
import sys

import torch
from hypothesis import HealthCheck, settings

import fast_interpreter

collect_ignore = ["integrations"]
"""They need other libraries: `make test-integrations` installs them and names the folder."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    fast_interpreter.install()
    # Tests run side by side: more threads than cores spin in OpenMP's barriers, which doubles the
    # CPU time of whatever is timed.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Tests share the machine with each other: a command that waited for them would never begin.
os.environ["STEPSCOPE_WAIT"] = "0"

settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")

# The suite starts hundreds of processes, and every worker imports every test: where no bytecode is
# written, each of them compiles the package again, a quarter of the CPU time of a `stepscope run`.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts what runs in its background with SIGINT ignored, and every process below inherits
# that: tests of an interrupt would wait for an effect that it cannot have.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports and collection make almost no garbage, but set off one pass after another.
gc.disable()


def pytest_collection_finish() -> None:
    """Exempt the imported modules and collected tests from garbage collection: a pass over them
    takes 0.3 s, and everything that is timed collects garbage first."""
    gc.collect()
    gc.freeze()
    gc.enable()
