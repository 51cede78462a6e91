"""The forwards of a module: its own, and the layers that were added above it, in order.

A layer is removed by itself, whatever was added before or after it: a module may be part of several
accelerated models, and a program may replace `module.forward` at any time. What a layer runs in
place of itself is looked up in each call (`forward_below`), never saved.

The dispatcher is bound on the instance as `forward`, so hooks, parameter names and `state_dict`
stay as they are. A copy of the module (`deepcopy`, `torch.save`) has the forward that the module
had before: that of its class, or one that the program had set on the instance.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from stepscope.errors import UsageError

_REGISTRY = "_stepscope_forwards"
"""Attribute of a dispatcher."""


class Layer:
    """A forward that `add_layer` has added to a module: `run(module, *args, **kwargs)`."""

    def __init__(self, registry: _Forwards, run: Callable[..., Any], owner: object) -> None:
        self._registry = registry
        self.run, self.owner = run, owner

    @property
    def is_active(self) -> bool:
        return self in self._registry.layers

    def below(self, *args: Any, **kwargs: Any) -> Any:
        """Run what is below this layer in this call."""
        layers = self._registry.layers
        before = layers[: layers.index(self)] if self in layers else layers
        return self._registry.run_at_most(tuple(before), *args, **kwargs)

    def remove(self) -> None:
        """Remove this layer alone. A second call does nothing."""
        if self.is_active:
            self._registry.layers.remove(self)
            self._registry.restore()


class _Forwards:
    """The layers above one forward of a module, the last one first in a call."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers: list[Layer] = []
        self.own = own_forward(module)
        """Forward of the instance when the first layer was added; None for that of its class."""
        self._bound = self._bind()

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the last layer, or the forward below all layers."""
        if module is not self.module:
            # A copy, or a replica.
            return type(module).forward(module, *args, **kwargs)
        if self.layers:
            return self.layers[-1].run(module, *args, **kwargs)
        return self.run_own(*args, **kwargs)

    def run_own(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def run_at_most(self, before: tuple[Layer, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the last of these layers that is still there."""
        for layer in reversed(before):
            if layer in self.layers:
                return layer.run(self.module, *args, **kwargs)
        return self.run_own(*args, **kwargs)

    def restore(self) -> None:
        """Remove the dispatcher after the last layer, unless the program has replaced it."""
        attributes = vars(self.module)
        if self.layers:
            return
        if attributes.get("forward") is self._bound:
            if self.own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self.own
        if _registry_of(self.module) is None:
            attributes.pop("_replicate_for_data_parallel", None)

    def _bind(self) -> Callable[..., Any]:
        # A pickled bound method is looked up by its name, so it must be called `forward`.
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call(module, *args, **kwargs)

        setattr(forward, _REGISTRY, self)
        module, original = self.module, self.module.forward
        # Hugging Face's `Trainer` passes the columns of a data set that the signature names. Not
        # every callable has one.
        with contextlib.suppress(TypeError, ValueError):
            named = inspect.signature(original)
            first = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
            parameters = [first, *(p for p in named.parameters.values() if p.name != first.name)]
            forward.__signature__ = named.replace(parameters=parameters)  # type: ignore[attr-defined]
        binds: Any = MethodType if self.own is None else _CopiedAsOwn
        bound: Callable[..., Any] = binds(forward, module)
        attributes = vars(module)
        attributes["forward"] = bound
        attributes["_replicate_for_data_parallel"] = MethodType(
            _replicate_for_data_parallel, module
        )
        return bound


class _CopiedAsOwn(functools.partial[Any]):
    """A bound dispatcher above a forward that the program has set on the instance: that one is
    copied and pickled in its place."""

    @property
    def _own(self) -> Any:
        return getattr(self.func, _REGISTRY).own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        return _as_it_is, (self._own,)


def _as_it_is(forward: Any) -> Any:
    return forward


def add_layer(
    module: nn.Module, run: Callable[..., Any], owner: object, *, lowest: bool = False
) -> Layer:
    """Run `run(module, *args, **kwargs)` in calls of this module, until the layer is removed: above
    the other layers, or below them."""
    registry = _registry_of(module) or _Forwards(module)
    layer = Layer(registry, run, owner)
    registry.layers.insert(0 if lowest else len(registry.layers), layer)
    return layer


def run_own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward below all layers."""
    registry = _registry_of(module)
    if registry is None or registry.own is None:
        return type(module).forward(module, *args, **kwargs)
    return registry.own(*args, **kwargs)


def forward_below(module: nn.Module) -> Callable[..., Any]:
    """Return what the module runs now, without the layers that will be added: with those of the
    present ones that are there in the call."""
    registry = _registry_of(module)
    if registry is None:
        return module.forward
    return functools.partial(registry.run_at_most, tuple(registry.layers))


def layer_owners(module: nn.Module) -> list[object]:
    """Return the owners of the layers of a module."""
    registry = _registry_of(module)
    return [] if registry is None else [layer.owner for layer in registry.layers]


def own_forward(module: nn.Module) -> Any:
    """Return the forward of the instance; None if it is that of its class, also bound on it as
    copies of an accelerated module have it."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return forward
    if forward.__func__ is type(module).forward:
        return None
    registry = getattr(forward.__func__, _REGISTRY, None)
    return forward if registry is None or registry.module is module else None


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the program has set a forward on the instance, below or above our layers."""
    registry = _registry_of(module)
    return (own_forward(module) if registry is None else registry.own) is not None


def _registry_of(module: nn.Module) -> _Forwards | None:
    """Return the registry whose dispatcher is the forward of the module."""
    forward = vars(module).get("forward")
    function = getattr(forward, "func", None) or getattr(forward, "__func__", None)
    registry = getattr(function, _REGISTRY, None)
    if isinstance(registry, _Forwards) and registry.module is module:
        return registry if registry._bound is forward else None
    return None


def _replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Refuse to be replicated: a replica would call the forward that is bound to the original, with
    the weights of the first device. Pickled as the method of the class, by its name."""
    raise UsageError(
        f"DataParallel cannot replicate an accelerated {type(module).__name__}",
        "use DistributedDataParallel, or undo() of its report",
    )
