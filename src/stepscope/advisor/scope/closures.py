"""Run the closure passed to `Optimizer.step` inside a context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_closure(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    context: Callable[[], AbstractContextManager[None]],
) -> Arguments | None:
    """Return the arguments of `step`, the optimizer first, with a closure that runs inside
    `context()`; None if there is no closure."""

    def within(closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with context():
                return closure(*given, **named)

        return call

    if callable(keywords.get("closure")):
        return arguments, {**keywords, "closure": within(keywords["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):
        optimizer, closure, *rest = arguments
        return (optimizer, within(closure), *rest), keywords
    return None
