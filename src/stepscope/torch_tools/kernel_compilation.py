"""Compilation of the Triton kernels of a function in parallel, before its first call.

Triton compiles a kernel when it is first launched, so that those of a function are compiled one
after the other. `compile_kernels` calls the function without launching them: they are compiled and
loaded in threads, since LLVM, ptxas and the C compiler run without Python's global lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from stepscope.torch_tools.triton_available import HAS_TRITON, is_interpreted

_MAX_THREADS = 16
_NAMESPACE = __name__.partition(".")[0]
"""Of the modules and of the operators of this package."""
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_lock = threading.Lock()
_owner: int | None = None
"""The thread that compiles without launching."""


class NotLaunchedError(Exception):
    """A kernel was compiled, and not launched."""


def compiles_only() -> bool:
    """Return whether the kernels that this thread launches are only compiled."""
    return _owner is not None and _owner == threading.get_ident()


def compile_kernels(function: Callable[[], object]) -> None:
    """Call a function, forward and backward passes, and compile the kernels of this package that it
    would launch. Their outputs are zeros; what the function returns or raises is discarded.

    Does nothing without a GPU, in a capture, in the interpreter, and with versions of Triton that
    compile in one thread only.
    """
    if not HAS_TRITON or is_interpreted() or not torch.cuda.is_available() or compiles_only():
        return
    if torch.cuda.is_current_stream_capturing():
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return
    if active_mode.get() is not None:
        return
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with (
        _lock,
        ThreadPoolExecutor(threads) as pool,
        AsyncCompileMode(_Loading(pool, torch.cuda.current_device()), ignore_errors=True),
        _without_launches(),
        # In this thread, and not in that of the device.
        torch.autograd.set_multithreading_enabled(False),
        # Modes and hooks of the caller do not see it: they count operators and saved tensors.
        saved_tensors_hooks(Tensor.detach, lambda saved: saved),
        _disable_current_modes(),
        _Zeros(),  # type: ignore[no-untyped-call]
        # The first call that launches raises it again.
        suppress(Exception),
    ):
        function()


class _Loading:
    """Submits compilations that also load the kernel and build its launcher."""

    def __init__(self, pool: ThreadPoolExecutor, device: int) -> None:
        self._pool, self._device = pool, device

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(partial(self._loaded, compilation))

    def _loaded(self, compilation: Callable[[], Any]) -> Any:
        torch.cuda.set_device(self._device)
        kernel = compilation()
        # The launcher is built and the kernel loaded when this property is first read.
        _ = kernel.run
        return kernel


@contextmanager
def _without_launches() -> Iterator[None]:
    """Compile the kernels that this thread would launch. Those of other packages are launched: an
    autotuned one would be timed without running."""
    from triton.runtime import JITFunction

    global _owner
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not compiles_only() or not self.fn.__module__.startswith(f"{_NAMESPACE}."):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        run(self, *args, grid=grid, warmup=True, **kwargs)
        return None

    JITFunction.run, _owner = compiled, threading.get_ident()
    try:
        yield
    finally:
        JITFunction.run, _owner = run, None


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates zeros in place of uninitialized tensors: a kernel that is not launched does not write
    them, and an operator that reads them as indices would fail on the device. Operators of this
    package create theirs below this mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY or func.namespace == _NAMESPACE:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    x.zero_()
        return out
