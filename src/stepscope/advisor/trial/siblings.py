"""Modules of a list that a loop calls one after the other with the same input, such as the heads of
an attention, run as one batch: `vmap` over their stacked parameters."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from stepscope.acceleration.forward_registry import has_own_forward
from stepscope.acceleration.fused_attention import FusedAttention

SETTING = "siblings"
_PLAIN = (bool, int, float, str, type(None))
"""Types of attributes in which siblings must not differ."""


class Siblings:
    """Lists of modules that are alike, and are called in order with one tensor."""

    def __init__(
        self,
        applied: Counter[str],
        is_on: Callable[[str], bool],
        attention: Callable[[], FusedAttention | None],
    ) -> None:
        self._applied = applied
        self._is_on = is_on
        self._attention = attention
        self._lists: list[_Batch] = []

    def find(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.ModuleList) and len(module) > 1 and _are_alike(list(module)):
                self._lists.append(_Batch(list(module), self._use, self._fused))

    def settle(self) -> None:
        """After a step: run those together that were called with the same input each time."""
        for one in self._lists:
            one.settle()

    @property
    def together(self) -> list[nn.Module]:
        """The modules that run as one batch, whose attention is fused there."""
        return [module for one in self._lists if one.is_together for module in one.modules]

    def _use(self) -> bool:
        self._applied[SETTING] += 1
        return self._is_on(SETTING)

    def _fused(self) -> FusedAttention | None:
        return self._attention() if self._is_on("attention") else None


class _Batch:
    """Modules that are alike, in place of whose forwards one is called."""

    def __init__(
        self,
        modules: list[nn.Module],
        use: Callable[[], bool],
        attention: Callable[[], FusedAttention | None],
    ) -> None:
        self.modules = modules
        self._use, self._attention = use, attention
        self._forwards = [module.forward for module in modules]
        skeleton = copy.deepcopy(modules[0]).to("meta")
        self._skeleton = skeleton
        self._buffers = [dict(module.named_buffers()) for module in modules]
        self._versions = self._written()
        self._expected = self._rounds = 0
        self.is_together = False
        self._refused = False
        self._input: Tensor | None = None
        self._version = -1
        self._outputs: list[Any] = []
        self._traced: dict[object, Callable[..., Any] | None] = {}
        """The forward with fused attention, by what a trace has of its input; None: it has none."""
        for number, module in enumerate(modules):
            module.forward = partial(self._call, number)

    def _written(self) -> list[int]:
        return [one._version for buffers in self._buffers for one in buffers.values()]

    def settle(self) -> None:
        if self.is_together or self._refused:
            return
        alone = not self._rounds or self._expected or self._written() != self._versions
        self.is_together, self._refused = not alone, bool(alone and self._rounds)
        self._shared = {
            name for name, first in self._buffers[0].items()
            if all(torch.equal(first, other[name]) for other in self._buffers[1:])
        }  # fmt: skip

    def _call(self, number: int, *arguments: Any, **keywords: Any) -> Any:
        own = self._forwards[number]
        if self._refused or keywords or len(arguments) != 1:
            self._refused = True
            return own(*arguments, **keywords)
        x = arguments[0]
        if not self.is_together:
            self._watch(number, x)
            return own(x)
        if number == 0:
            self._forget()
            if isinstance(x, Tensor) and self._use():
                self._compute(x)
        if not self._outputs or not self._is_input(x):
            return self._alone(number, x)
        output = self._outputs[number]
        if number == len(self.modules) - 1:
            self._forget()
        return output

    def _watch(self, number: int, x: Any) -> None:
        """Note a call as it is: all of a round have the same input, which nothing has written."""
        same = number == 0 or self._is_input(x)
        if not isinstance(x, Tensor) or number != self._expected or not same:
            self._refused = True
            return
        self._input, self._version = x, x._version
        self._expected = (number + 1) % len(self.modules)
        if not self._expected:
            self._rounds += 1
            self._forget()

    def _is_input(self, x: Tensor) -> bool:
        """Return True if it is the input of the first module, and was not written since."""
        return x is self._input and x._version == self._version

    def _forget(self) -> None:
        self._input, self._outputs = None, []

    def _compute(self, x: Tensor) -> None:
        run = self._fused(x) or self._run
        several = [self._tensors(number) for number in range(len(self.modules))]
        parameters, own = (_stacked([one[part] for one in several]) for part in range(2))
        try:
            mapped = vmap(run, (0, 0, None, None), randomness="different")
            together = mapped(parameters, own, several[0][2], x)
        except (RuntimeError, ValueError, NotImplementedError):
            # The module does something that cannot be mapped, as a decision by a value.
            self._refused = True
            return
        if isinstance(together, Tensor):
            self._input, self._version = x, x._version
            self._outputs = list(together.unbind(0))
        self._refused = not self._outputs

    def _alone(self, number: int, x: Any) -> Any:
        """Run one of the modules while the batch is taken back."""
        run = self._fused(x) if isinstance(x, Tensor) else None
        return self._forwards[number](x) if run is None else run(*self._tensors(number), x)

    def _fused(self, x: Tensor) -> Callable[..., Any] | None:
        """Return a forward with fused attention for such an input; None if it has no attention, or
        is not to be changed."""
        attention = self._attention()
        if attention is None:
            return None
        training = self.modules[0].training
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (x.shape, x.dtype, autocast, training)
        if key not in self._traced:
            self._traced[key] = attention.of_function(self._run, [*self._tensors(0), x])
        return self._traced[key]

    def _tensors(self, number: int) -> list[dict[str, Tensor]]:
        """Return the parameters, the own buffers and the shared ones of a module."""
        buffers = self._buffers[number]
        shared = {name: self._buffers[0][name] for name in self._shared}
        own = {name: one for name, one in buffers.items() if name not in shared}
        return [dict(self.modules[number].named_parameters()), own, shared]

    def _run(
        self,
        parameters: dict[str, Tensor],
        own: dict[str, Tensor],
        shared: dict[str, Tensor],
        x: Tensor,
    ) -> Any:
        self._skeleton.train(self.modules[0].training)
        return functional_call(self._skeleton, {**parameters, **own, **shared}, (x,))


def _stacked(several: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in several]) for name in several[0]}


def _are_alike(modules: list[nn.Module]) -> bool:
    """Return True if the modules differ in nothing but the values of their tensors."""
    first, *others = map(_form, modules)
    hooked = any(_has_hooks(part) for module in modules for part in module.modules())
    has_weights = any(True for _ in modules[0].parameters())
    return has_weights and not hooked and all(other == first for other in others)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module does more than the forward of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "parametrizations" in module._modules
        or has_own_forward(module)
    )


def _form(module: nn.Module) -> list[Any]:
    parts = [
        (name, type(part), {k: v for k, v in vars(part).items() if isinstance(v, _PLAIN)})
        for name, part in module.named_modules()
    ]
    tensors = [
        (name, one.shape, one.dtype, one.device, one.requires_grad)
        for name, one in (*module.named_parameters(), *module.named_buffers())
    ]
    return [parts, tensors]
