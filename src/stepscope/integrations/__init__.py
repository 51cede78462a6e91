"""Stepscope inside the training loops of other libraries, and in notebooks.

    from stepscope.integrations import StepscopeCallback

    trainer = transformers.Trainer(..., callbacks=[StepscopeCallback()])

A library is imported when its class is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.integrations.hugging_face import StepscopeCallback
    from stepscope.integrations.hugging_face_accelerate import StepscopeAccelerateHook
    from stepscope.integrations.lightning import StepscopeLightningCallback

__all__ = ["StepscopeAccelerateHook", "StepscopeCallback", "StepscopeLightningCallback"]

_MODULES = {
    "StepscopeCallback": ("hugging_face", "hf"),
    "StepscopeAccelerateHook": ("hugging_face_accelerate", "hf"),
    "StepscopeLightningCallback": ("lightning", "lightning"),
}
"""Module of each name, and the extra that installs its library."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _MODULES[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        raise ImportError(
            f"{name} needs {library} (pip install 'stepscope[{extra}]')", name=library
        ) from error
