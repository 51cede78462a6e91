"""The loss of a model that is called with a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stepscope.errors import UsageError
from stepscope.torch_tools.module_hooks import modules_of

_CONFIGURATIONS = "transformers.configuration_utils"
"""Module of the base class of all configurations of Hugging Face models."""


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Let Hugging Face models create no key-value cache, which copies keys and values, cannot be
    captured with sliding windows, and is discarded with the rest of the output."""
    configs = {id(one): one for module in modules_of(model) if (one := _caching_config(module))}
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


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with a batch, and return the loss in its output."""
    with without_cache(model):
        output = called(model, batch)
    return scalar(loss_in(output), "the model")


def called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


def loss_in(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, (list, tuple)) and output:
        return output[0]
    return loss


def scalar(loss: Any, source: str) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "no tensor"
    raise UsageError(
        f"{source} returned {what} as the loss",
        "pass labels in the batch, or loss_fn=lambda model, batch: …",
    )
