"""Attention masks of Hugging Face models: with the rules that they stand for, and none in a CUDA
graph where eager calls have none.

These models pass no mask where the causal flag of the kernel is enough. To decide that they read
tensors, so while a CUDA graph is captured they build a mask in memory instead, with which attention
takes about three times as long. A model that is called without a mask and without positions has the
same mask for every batch of a shape: the decision of its eager calls holds for the capture. Masks
that are created get rules (`mask_rules`), which attention reads instead.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.forward_registry import forward_below
from stepscope.acceleration.pieces.mask_rules import MaskRules, rules_of
from stepscope.acceleration.replacement import Found, Replacement
from stepscope.torch_tools.capturing import is_capturing

PIECE = "attention mask"
_GIVEN = ("attention_mask", "position_ids")
_CREATES_MASK = re.compile(r"(create|_prepare_4d)_\w*mask\w*")
"""Functions that modules of `transformers.models` import and call; encoders of 4.57 the second."""
_MAX_FIXED = 16
"""Masks of a decoder that are kept: each has the memory of seq × seq scores."""


def find(model: nn.Module) -> Found:
    """Return the innermost modules that take token ids, a mask and positions, and whose file has
    functions that create masks."""
    names = [
        name
        for name, module in model.named_modules()
        if {"input_ids", *_GIVEN} <= inspect.signature(module.forward).parameters.keys()
        and _mask_functions(module)
    ]
    innermost = (
        name
        for name in names
        if not any(other != name and other.startswith(f"{name}.".lstrip(".")) for other in names)
    )
    replacements = []
    for name in innermost:
        decoder = model.get_submodule(name)
        replacements.append(Replacement(PIECE, name, decoder, _Masks(decoder).forward))
    return replacements, []


def _mask_functions(module: nn.Module) -> list[str]:
    return [name for name in _namespace(module) if _CREATES_MASK.fullmatch(name)]


def _namespace(module: nn.Module) -> dict[str, Any]:
    """Return the global names of the file that defines the class."""
    return vars(sys.modules[type(module).__module__])


class _Masks:
    """The decisions of one decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        self._original = forward_below(decoder)
        self._namespace, self._names = _namespace(decoder), _mask_functions(decoder)
        self._unmasked: set[tuple[torch.Size, str]] = set()
        self._fixed: dict[tuple[torch.Size, str], Tensor] = {}
        """The last masks that follow from the shape, by the rules that they carry."""
        self._in_graphs: list[Tensor] = []
        """Masks that CUDA graphs read: they are never freed."""
        self._shape: torch.Size | None = None
        """Shape of the input of the call; None if it may have another mask than the last one."""
        self._rules = MaskRules()

    def forward(self, decoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del decoder
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        # Also masks with a prefix: that of an encoder.
        given = any(one is not None and name.endswith(_GIVEN) for name, one in kwargs.items())
        varies = len(args) > 1 or given or not tensors
        self._shape = None if varies else tensors[0].shape
        with _deciding(self, self._namespace, self._names):
            return self._original(*args, **kwargs)

    def create(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that creates a mask. A capture has none if eager calls have none, and
        that of an eager call if it follows from the shape: not every function can be captured."""
        key = None if self._shape is None else (self._shape, name)
        if is_capturing() and key is not None:
            if key in self._unmasked:
                return None
            fixed = self._fixed.get(key)
            if fixed is not None and rules_of(fixed) is not None:
                self._in_graphs.append(fixed)
                return fixed
        mask = function(*args, **kwargs)
        self._rules.attach(mask, function, args, kwargs, own_positions=key is not None)
        if key is not None and not is_capturing():
            self._unmasked.discard(key)
            self._fixed.pop(key, None)
            rules = rules_of(mask)
            if mask is None:
                self._unmasked.add(key)
            elif rules is not None and not rules.tensors:
                if len(self._fixed) >= _MAX_FIXED:
                    del self._fixed[next(iter(self._fixed))]
                self._fixed[key] = mask
        return mask


_lock = threading.Lock()
_users: Counter[int] = Counter()
"""Decoders that run now, by the namespace in which functions are replaced for them."""
_running = threading.local()


@contextmanager
def _deciding(masks: _Masks, namespace: dict[str, Any], names: list[str]) -> Iterator[None]:
    """Pass the calls of these functions in this thread to `masks`."""
    outer = getattr(_running, "masks", None)
    _running.masks = masks
    with _lock:
        _users[id(namespace)] += 1
        if _users[id(namespace)] == 1:
            namespace.update({name: _passed_on(name, namespace[name]) for name in names})
    try:
        yield
    finally:
        with _lock:
            _users[id(namespace)] -= 1
            if not _users[id(namespace)]:
                namespace.update({name: namespace[name].__wrapped__ for name in names})
        _running.masks = outer


def _passed_on(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        masks = getattr(_running, "masks", None)
        if masks is None:
            return function(*args, **kwargs)
        return masks.create(name, function, *args, **kwargs)

    return create
