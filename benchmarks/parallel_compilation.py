"""Compilation of Triton kernels in parallel processes, before a benchmark measures them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any


def run_in_processes(
    work: Callable[..., None], arguments: Sequence[tuple[Any, ...]], limit: float
) -> None:
    """Call a function once with each of the arguments, in processes of their own: the kernels stay
    in Triton's cache. After `limit` seconds the rest is compiled when it is measured."""
    context = multiprocessing.get_context("spawn")
    # Daemons end with this process, also if it raises.
    running = [context.Process(target=work, args=each, daemon=True) for each in arguments]
    end = time.monotonic() + limit
    for process in running:
        process.start()
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
