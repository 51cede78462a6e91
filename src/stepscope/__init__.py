"""Stepscope: where a training step's time and memory go, and what to change."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from stepscope.version import __version__

if TYPE_CHECKING:
    from stepscope.acceleration.accelerate import accelerate
    from stepscope.acceleration.capture import capture
    from stepscope.acceleration.train_step import TrainStep
    from stepscope.advisor.observer.observer import Observer
    from stepscope.advisor.scope.library import Scope
    from stepscope.planning.fit import fit
    from stepscope.planning.predict import predict

__all__ = [
    "Observer",
    "Scope",
    "TrainStep",
    "__version__",
    "accelerate",
    "capture",
    "fit",
    "predict",
]

_MODULES = {
    "Observer": "stepscope.advisor.observer.observer",
    "Scope": "stepscope.advisor.scope.library",
    "TrainStep": "stepscope.acceleration.train_step",
    "accelerate": "stepscope.acceleration.accelerate",
    "capture": "stepscope.acceleration.capture",
    "fit": "stepscope.planning.fit",
    "predict": "stepscope.planning.predict",
}
"""Modules of the names that need torch, which nothing else in this module does."""


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
