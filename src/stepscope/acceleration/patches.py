"""Installs replacements in a model and restores it.

A replacement is a layer above the forward of a module (`forward_registry`). The original runs in
every call without gradients, in every call that torch.compile traces, which fuses the original
itself, and where global module hooks would miss the parts of a fused module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.acceleration.checks import Alike, compile_replacement, difference
from stepscope.acceleration.forward_registry import add_layer, forward_below
from stepscope.acceleration.replacement import Replacement, has_hooks
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.derivatives import transforms_active
from stepscope.torch_tools.kernel_compilation import compiles_only
from stepscope.torch_tools.module_hooks import has_global_hooks

FP8_TOLERANCE = 0.2
"""Relative error of outputs and gradients of a part with FP8 layers: that of one layer is about 4 %
(two roundings to four bits), and a block has four in a row."""


class Patch:
    """A replacement in its module. Its first call with gradients compares it with the original, in
    training and in evaluation mode."""

    _comparisons = 0
    """Of all patches, in progress."""

    def __init__(
        self,
        replacement: Replacement,
        checked: bool,
        on_difference: Callable[[Patch, str], None],
        copies: WeightCopies | None = None,
        alike: Alike | None = None,
        owner: object = None,
    ) -> None:
        self.replacement = replacement
        self._copies = copies
        self._alike = alike or Alike()
        self._checked_modes = {True, False} if checked else set()
        self._on_difference = on_difference
        self._declined, self._is_used, self._is_called = "", False, False
        self._in_tuple: dict[frozenset[object], bool] = {}
        """Whether the original returns a tuple of one output, by the flags of a call: they may ask
        for others. Empty unless it did in the call that was compared."""
        self._original = forward_below(replacement.module)
        self._layer = add_layer(replacement.module, self.call, owner)

    @property
    def is_checked(self) -> bool:
        return bool(self._checked_modes)

    @property
    def declined(self) -> str:
        """Why the original has run in every call so far; empty if it has not."""
        return "" if self._is_used else self._declined

    def undo(self) -> None:
        self._layer.remove()

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transforms_active():
            return self._original(*args, **kwargs)
        if reason := self._declines(args, kwargs):
            self._record(reason)
            return (self._observed if self._in_tuple else self._original)(*args, **kwargs)
        if compiles_only():
            self._alike.compiled.add(type(module))
            return self._replaced(*args, **kwargs)
        self._record("")
        if module.training not in self._checked_modes:
            if self._copies is not None and self._copies.suspends_fp8:
                # A module that contains this one is compared. This one is once FP8 is back.
                return self._original(*args, **kwargs)
            self._check(args, kwargs)
            if not self._layer.is_active:
                return self._original(*args, **kwargs)
        return self._replaced(*args, **kwargs)

    def _record(self, declined: str) -> None:
        """Note whether the original runs in a call. Those in comparisons of a module that contains
        this one have other weights, and no cache: they count until the model calls this one."""
        if Patch._comparisons and self._is_called:
            return
        if not Patch._comparisons and not self._is_called:
            self._declined, self._is_used, self._is_called = "", False, True
        self._declined = self._declined or declined
        self._is_used = self._is_used or not declined

    def _declines(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return why the original runs in a call with these arguments; empty if it does not."""
        if has_global_hooks() and self.replacement.module._modules:
            return "global module hooks would miss its parts"
        if self._in_tuple and not self._in_tuple.get(_flags(args, kwargs)):
            return "it may return other outputs with these flags"
        return self.replacement.declines(self.replacement.module, *args, **kwargs)

    def _observed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original, and note whether it returns a tuple of one output."""
        output = self._original(*args, **kwargs)
        is_single = isinstance(output, tuple) and len(output) == 1
        if is_single or self._in_tuple:
            self._in_tuple[_flags(args, kwargs)] = is_single
        return output

    def _replaced(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement, and return its output in the form of the original's."""
        output = self.replacement.forward(self.replacement.module, *args, **kwargs)
        return (output,) if self._in_tuple and isinstance(output, Tensor) else output

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = self.replacement.module
        self._checked_modes.add(module.training)
        Patch._comparisons += 1
        try:
            why = _not_comparable(module) or self._difference(args, kwargs)
        except torch.OutOfMemoryError:
            why = "there is not enough memory to compare it with the original"
        finally:
            Patch._comparisons -= 1
        if why:
            self.undo()
            self._on_difference(self, why)

    def _difference(self, args: Any, kwargs: Any) -> str:
        """Return how it differs: at the precision of the original, then with layers in FP8."""
        module, unused = self.replacement.module, self.replacement.unused
        inputs = (module, self._observed, self._replaced, args, kwargs)
        if self._copies is None or self._copies.fp8 is None:
            self._compile(args, kwargs)
            return difference(*inputs, unused=unused, alike=self._alike)
        with self._copies.without_fp8():
            self._compile(args, kwargs)
            why = difference(*inputs, unused=unused, alike=self._alike)
        if why:
            return why
        why = difference(*inputs, FP8_TOLERANCE, unused, self._alike)
        return f"in FP8 {why}" if why else ""

    def _compile(self, args: Any, kwargs: Any) -> None:
        """Compile the kernels of the first module of its class, and of those within it."""
        module = self.replacement.module
        if type(module) not in self._alike.compiled:
            self._alike.compiled.add(type(module))
            compile_replacement(module, self._replaced, args, kwargs)


def _flags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[object]:
    """Return the arguments that are True, such as `use_cache` and `output_attentions`."""
    given = (*enumerate(args), *kwargs.items())
    return frozenset(name for name, value in given if value is True)


def _not_comparable(module: nn.Module) -> str:
    """Return why the forward cannot run several times in a row: hooks within it count or gather,
    and a wrapper that shows gathered parameters under their names reduces their gradients."""
    if any(has_hooks(part) for part in module.modules() if part is not module):
        return "a part of it has hooks"
    for part in module.modules():
        if any(name in vars(part) for name in part._parameters):
            return "a wrapper replaces its parameters"
    return ""
