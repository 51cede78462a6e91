"""Python imports this file at the start of every process that the tests start.

Garbage collection takes a quarter of the CPU time of a process that imports torch and little else:
imports create objects that stay, and at exit two full collections visit all of them.
"""

from __future__ import annotations

import atexit
import gc

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)
