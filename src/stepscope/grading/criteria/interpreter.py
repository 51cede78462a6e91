"""Launches of Triton kernels in the interpreter, which computes bfloat16 incorrectly."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from stepscope.torch_tools.triton_available import is_interpreted


class Launches:
    """Counts launches of interpreted kernels in a block."""

    def __init__(self) -> None:
        self.interpreted = 0
        self._executor: Any = None

    def __enter__(self) -> Self:
        module = sys.modules.get("triton.runtime.interpreter")
        if is_interpreted() and module is not None:
            self._executor = module.GridExecutor
            self._original = self._executor.__call__
            original = self._original

            def counted(executor: Any, *arguments: Any, **named: Any) -> Any:
                self.interpreted += 1
                return original(executor, *arguments, **named)

            self._executor.__call__ = counted
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.__call__ = self._original
