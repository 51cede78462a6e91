"""Caches of keys and values, which Hugging Face models create in training calls, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONFIGURATIONS = "transformers.configuration_utils"
"""Module of the base class of all configurations of Hugging Face models."""


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let Hugging Face models create no key-value cache, which copies keys and values, cannot be
    captured with sliding windows, and is discarded with the rest of the output."""
    configs = {id(one): one for module in model.modules() if (one := _caching_config(module))}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _caching_config(module: nn.Module) -> Any:
    """Return the configuration of a Hugging Face model that asks for a cache the loss does not
    depend on; None if this is not one."""
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is not True:
        return None
    if all(kind.__module__ != _CONFIGURATIONS for kind in type(config).__mro__):
        return None
    # In some versions of transformers such layers read the keys and values of others in the cache.
    return None if getattr(config, "num_kv_shared_layers", 0) else config
