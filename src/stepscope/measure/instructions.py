"""Instructions that a process executes, counted by the processor (perf_event_open).

Unlike times, their number does not depend on other work on the machine. Containers and virtual
machines often have no such counter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

_SYSTEM_CALL = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES = 128
"""Size of `perf_event_attr`."""
_FLAGS_AT = 40
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 1 << 3
INSTRUCTIONS = (0, 1)
"""Type and number of the event: hardware, retired instructions."""


class Counter:
    """Counts an event in this thread, and in threads and processes that it starts later."""

    def __init__(self, event: tuple[int, int] = INSTRUCTIONS) -> None:
        self._file = _open(*event)

    def read(self) -> int | None:
        """Return the count so far; None where the machine has no such counter."""
        if self._file < 0:
            return None
        with contextlib.suppress(OSError):
            return int.from_bytes(os.read(self._file, 8), "little")
        return None


def _open(kind: int, number: int) -> int:
    call = _SYSTEM_CALL.get(platform.machine())
    if call is None or platform.system() != "Linux":
        return -1
    attributes = bytearray(_ATTRIBUTES)
    struct.pack_into("=IIQ", attributes, 0, kind, _ATTRIBUTES, number)
    struct.pack_into("=Q", attributes, _FLAGS_AT, _INHERIT | _NO_KERNEL | _NO_HYPERVISOR)
    block = (ctypes.c_char * _ATTRIBUTES).from_buffer(attributes)
    return int(ctypes.CDLL(None).syscall(call, block, 0, -1, -1, _CLOSE_ON_EXEC))
