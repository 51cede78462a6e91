"""Modes around all operators, or all torch functions, that run inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of the dispatcher: `run` is called in place of every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        del types
        return self.run(function, arguments, keywords or {})

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError


class FunctionMode(TorchFunctionMode):
    """The same for functions of torch, such as `torch.nn.functional.dropout`."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        del types
        return self.run(function, arguments, keywords or {})

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError


class Observer(OperatorMode):  # type: ignore[no-untyped-call]
    """Calls `before` and `after` around every operator that runs inside."""

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.aside(self.before)
        result = function(*arguments, **keywords)
        self.aside(self.after, function, arguments, keywords, result)
        return result

    def aside(self, note: Callable[..., None], *given: Any) -> None:
        """Run the bookkeeping of the mode; overridden to handle its errors."""
        note(*given)

    def before(self) -> None:
        """Called before every operator."""

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """Called after every operator."""
