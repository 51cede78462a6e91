"""A GPU's processors divided between matrix products and work beside them.

A product of cuBLAS is laid out for all processors and fills each of them, so nothing runs beside
it; where one is taken, the product's share of it waits for a second turn. Told to, cuBLAS lays its
products out for fewer, and the rest is free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_LIBRARY = "libcublas.so"


@contextmanager
def products_leave(processors: int, device: torch.device) -> Iterator[None]:
    """Products that this thread launches take all processors but so many. A backward runs on this
    thread meanwhile: cuBLAS keeps the number with the thread's own handle."""
    if not processors or device.type != "cuda":
        yield
        return
    there: int = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 < processors < there:
        raise ValueError(f"products cannot leave {processors} of {there} processors")
    with torch.cuda.device(device):
        before = _told(None)
        _told(there - processors)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            _told(before)


def _told(processors: int | None) -> int:
    """What cuBLAS was told for this thread (0: nothing), after telling it a number, if one is
    given."""
    library = _cublas()
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    known = ctypes.c_int()
    if processors is not None and library.cublasSetSmCountTarget(handle, processors):
        raise RuntimeError(f"cuBLAS does not take {processors} processors")
    if library.cublasGetSmCountTarget(handle, ctypes.byref(known)):
        raise RuntimeError("cuBLAS does not say on how many processors it counts")
    return known.value


@cache
def _cublas() -> ctypes.CDLL:
    """The library that torch has loaded."""
    for line in _MAPS.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if _LIBRARY in path:
            return ctypes.CDLL(path)
    raise RuntimeError("torch has loaded no cuBLAS here: its products cannot be told to leave any")
