"""Detect parameters that change after wrapping: added, removed, replaced, (un)frozen, converted.

Fine-tuning does all of these: layers are unfrozen one by one, adapters are added. A wrapper
compares a snapshot before each forward pass, which takes microseconds: identities and a few
attributes, read in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from stepscope.parallel.model_layout import shape_and_dtype

_traits = attrgetter("requires_grad", "dtype", "device", "shape")
_trainable = attrgetter("requires_grad")


class ParameterWatch:
    """The parameters of a module at one point in time."""

    def __init__(self, module: nn.Module) -> None:
        self.named: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._parameters = list(self.named.values())
        self._traits = list(map(_traits, self._parameters))
        self._quick = self._quick_traits()
        tables: list[dict[str, Any]] = [
            table for inner in module.modules() for table in (inner._modules, inner._parameters)
        ]
        self._empty = [table for table in tables if not table]
        self._tables = [table for table in tables if table]
        self._entries = list(self._current())

    def _current(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._tables))

    def _quick_traits(self) -> list[object]:
        """Cheap check, a third of the time: a conversion allocates memory, so the address
        changes."""
        return [*map(_trainable, self._parameters), *map(Tensor.data_ptr, self._parameters)]

    def changed(self) -> bool:
        """True if anything differs from the time of the snapshot."""
        now = list(self._current())
        if any(self._empty) or len(now) != len(self._entries):
            return True
        if not all(map(is_, now, self._entries)):
            return True
        quick = self._quick_traits()
        if quick == self._quick:
            return False
        if list(map(_traits, self._parameters)) != self._traits:
            return True
        # Memory that moved within one dtype and device, as an optimizer may do, is not a change.
        self._quick = quick
        return False

    def new_since(self, before: ParameterWatch) -> list[nn.Parameter]:
        """Return the parameters whose values the ranks have not agreed on yet."""
        known = dict(zip(map(id, before._parameters), before._traits, strict=True))
        return [
            parameter
            for parameter, traits in zip(self._parameters, self._traits, strict=True)
            if id(parameter) not in known or known[id(parameter)][3] != traits[3]
        ]

    def changes_since(self, before: ParameterWatch) -> list[str]:
        """Return one line per parameter that differs; equal on ranks with the same changes."""
        then = dict(zip(before.named, before._traits, strict=True))
        now = dict(zip(self.named, self._traits, strict=True))
        lines = [f"{name} was removed" for name in then if name not in now]
        for name, traits in now.items():
            if name not in then:
                lines.append(f"{name} {shape_and_dtype(self.named[name])} was added")
            elif self.named[name] is not before.named[name]:
                lines.append(f"{name} {shape_and_dtype(self.named[name])} was replaced")
            elif traits[3] != then[name][3]:
                lines.append(f"{name} was resized to {shape_and_dtype(self.named[name])}")
            elif traits[1:3] != then[name][1:3]:
                dtype = str(traits[1]).removeprefix("torch.")
                # Without the device index, which differs between ranks.
                lines.append(f"{name} was converted to {dtype} on {traits[2].type}")
            if name in then and traits[0] != then[name][0]:
                lines.append(f"{name} was {'unfrozen' if traits[0] else 'frozen'}")
        return lines


def unplanned_gradient(watch: ParameterWatch, planned: set[int]) -> str | None:
    """Name of a trainable parameter with a gradient that is not averaged; None if there is none."""
    for name, parameter in watch.named.items():
        if id(parameter) not in planned and _has_gradient(parameter):
            return name
    return None


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None
