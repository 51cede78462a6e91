"""Stepscope: where a training step's time and memory go, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.version import __version__

if TYPE_CHECKING:
    from stepscope.advisor.scope.library import Scope

__all__ = ["Scope", "__version__"]


def __getattr__(name: str) -> object:
    """Import `Scope` on first use: it needs torch, which nothing else in this module does."""
    if name == "Scope":
        from stepscope.advisor.scope.library import Scope

        return Scope
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
