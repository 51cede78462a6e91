"""timm and torchvision, which are no part of the set-up: a torchvision that was built for another
torch cannot be imported, and neither can transformers next to it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest

HOW = "pip install -c constraints.txt -e '.[vision]', from the index that torch is from"


def require(library: str) -> ModuleType:
    """Return the library; skip the test if it is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(_reason(library))
    return importlib.import_module(library)


def needed(library: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need the library."""
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=_reason(library))


def why_not_importable() -> str:
    """Return why torchvision is there but cannot be imported; empty otherwise."""
    if importlib.util.find_spec("torchvision") is None:
        return ""
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, ImportError, OSError) as error:
        return str(error)
    return ""


def _reason(library: str) -> str:
    return f"{library} is not installed: {HOW}"
