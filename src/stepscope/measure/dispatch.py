"""A mode of the dispatcher that observes every operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `before` and `after` around every operator that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.aside(self.before)
        result = function(*arguments, **(keywords or {}))
        self.aside(self.after, function, arguments, keywords or {}, result)
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
