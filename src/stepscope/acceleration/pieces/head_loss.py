"""Head and cross-entropy without materialized logits, within the forward of any language model.

The head is a linear layer with as many outputs as an embedding of the model has entries; the
modules that contain it run their own forward. In training the head defers its matmul, and the
cross-entropy that one of these forwards computes from it is the fused one. Nothing else of them is
assumed: a soft-capped or scaled logit, a metric, or a loss with other options materializes them,
and the results are those of the original. If a program reads them in several steps in a row, they
are no longer deferred. Where no forward computes a loss from them, they are tensors.

A custom autograd Function would lose the gradients of deferred logits: if one reads them, the
forward runs once more without deferring them, and so do all later ones. `with_deferred_logits`
extends the deferral to a loss that is computed outside of the model.

Under torch.compile, in evaluation mode, without gradients, with hooks on the head or with a sharded
weight the original forward runs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stepscope.acceleration.forward_registry import own_forward
from stepscope.acceleration.own_classes import embeddings
from stepscope.acceleration.pieces.deferred_logits import (
    HEAD_LOSS,
    DeferredLogits,
    ReadInAutogradFunctionError,
)
from stepscope.acceleration.replacement import (
    Left,
    Replacement,
    bias_of,
    has_hooks,
    is_linear,
    rows_of,
)
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.module_hooks import has_global_hooks

PIECE = HEAD_LOSS
_LOGITS = "logits"
_MAX_READS = 2
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_TRANSFORMED = {
    "final_logit_softcapping": "logit soft-capping",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "lm_head_multiplier": "scaled logits",
}
"""Options of Hugging Face configurations that transform the logits before the loss."""


def find(model: nn.Module, copies: WeightCopies | None) -> tuple[list[Replacement], list[Left]]:
    """Return the heads of a model and the modules that compute a loss from them."""
    vocabularies = {table.weight.shape[0] for table in embeddings(model)}
    modules = dict(model.named_modules())
    _DEFERRALS[model] = deferral = _Deferral(copies)
    head_forward, owner_forward = _forwards(deferral)
    heads: list[Replacement] = []
    owners: dict[str, Replacement] = {}
    left: list[Left] = []
    for name, owner in modules.items():
        if any(name == one.name or name.startswith(f"{one.name}.") for one in left):
            # Parts of a head, such as its adapter.
            continue
        if any(part.isdigit() for part in name.split(".")):
            # A layer of a block.
            continue
        for child, head in owner.named_children():
            if rows_of(head) not in vocabularies:
                continue
            full_name = f"{name}.{child}".lstrip(".")
            within = _within(name)
            reason = _reason(owner, head, [modules[one] for one in within])
            if reason is not None:
                left.append(Left(PIECE, full_name, reason))
                continue
            heads.append(Replacement(PIECE, full_name, head, head_forward))
            for one in within:
                if not isinstance(modules[one], _CONTAINERS):
                    owners[one] = Replacement(PIECE, one, modules[one], owner_forward)
    return [*heads, *owners.values()], left


def with_deferred_logits(model: nn.Module, function: Callable[[], Any]) -> Any:
    """Call a function that computes a loss from what the model returns. Within it the logits of an
    accelerated model stay deferred, so that a cross-entropy of them is the fused one."""
    deferral = _DEFERRALS.get(model)
    if deferral is None or not deferral.applies(model) or torch.compiler.is_compiling():
        return function()
    return deferral.run(function)


def _within(name: str) -> list[str]:
    """Return the names of a module and of those that contain it."""
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def _reason(owner: nn.Module, head: nn.Module, within: list[nn.Module]) -> str | None:
    if any(own_forward(one) is not None for one in (head, *within)):
        return "its forward is already replaced"
    if not is_linear(head):
        return f"the head is a {type(head).__name__}, not an nn.Linear"
    if isinstance(owner, _CONTAINERS):
        return f"the head is in a {type(owner).__name__}, which computes no loss"
    configs = [getattr(one, "config", None) for one in within]
    for option, what in _TRANSFORMED.items():
        values = [getattr(config, option, None) for config in configs]
        if any(value not in (None, 1, 1.0, False) for value in values):
            return f"{what} ({option})"
    return None


class _Deferral:
    """Defers the matmul of a head within the forwards of the modules that contain it."""

    def __init__(self, copies: WeightCopies | None) -> None:
        self._copies = copies
        self._running = threading.local()
        self._is_read = False
        """True if the program has read the last deferred logits."""
        self._reads = 0
        """Consecutive calls whose logits the program has read."""
        self._is_first = True

    def owner_forward(self, owner: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        original = functools.partial(_original(owner), *arguments, **keywords)
        if not self.applies(owner):
            return original()
        outputs = self.run(original)
        return _with_logits(outputs) if self._depth == 0 or has_hooks(owner) else outputs

    def run(self, function: Callable[[], Any]) -> Any:
        """Call a function within which logits are deferred."""
        restore = _random_state() if self._depth == 0 and self._is_first else None
        self._depth += 1
        try:
            return function()
        except ReadInAutogradFunctionError:
            if self._depth > 1:
                raise
            self._reads = _MAX_READS
        finally:
            self._depth -= 1
            self._is_first = False
        if restore is not None:
            restore()
        return function()

    def head_forward(self, head: Any, x: Tensor) -> Any:
        linear = _original(head)
        if self._depth == 0 or not _can_defer(head, x):
            return linear(x)
        self._reads = self._reads + 1 if self._is_read else 0
        self._is_read = False

        def read(x: Tensor) -> Any:
            self._is_read = True
            return linear(x)

        return DeferredLogits.of(read, x, head.weight, self._copies, bias_of(head))

    @property
    def _depth(self) -> int:
        """Forwards of modules that contain the head that this thread is in."""
        return getattr(self._running, "depth", 0)

    @_depth.setter
    def _depth(self, depth: int) -> None:
        self._running.depth = depth

    def applies(self, owner: nn.Module) -> bool:
        return (
            owner.training
            # Deferring logits that the program reads only costs time.
            and self._reads < _MAX_READS
            and torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()
            # They get the output of the head.
            and not has_global_hooks()
        )


def _random_state() -> Callable[[], None]:
    """Return a function that restores the present state of all generators."""
    state = torch.get_rng_state()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_devices = torch.cuda.get_rng_state_all() if initialized else []

    def restore() -> None:
        torch.set_rng_state(state)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)

    return restore


_DEFERRALS: weakref.WeakKeyDictionary[nn.Module, _Deferral] = weakref.WeakKeyDictionary()
"""By the model in which heads were found."""


def _forwards(deferral: _Deferral) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward of the head and of its owner, as functions: torch.compile traces these."""

    def head_forward(head: Any, x: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return _original(head)(x)
        return deferral.head_forward(head, x)

    def owner_forward(owner: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return _original(owner)(*arguments, **keywords)
        return deferral.owner_forward(owner, *arguments, **keywords)

    return head_forward, owner_forward


def _original(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the class: a copy of the module must not run that of the original."""
    return functools.partial(type(module).forward, module)


def _can_defer(head: Any, x: Tensor) -> bool:
    weight, bias = head.weight, bias_of(head)
    return (
        type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and (bias is None or type(bias) is type(weight))
        and x.dim() >= 2
        and x.is_floating_point()
        and x.device == weight.device
        and not (x.is_inference() or weight.is_inference())
        and (x.requires_grad or weight.requires_grad)
        and torch.is_grad_enabled()
        and not has_hooks(head)
    )


def _with_logits(outputs: Any) -> Any:
    """Return the outputs, with logits computed unless a loss has been computed from them."""
    if isinstance(outputs, DeferredLogits):
        return _tensor_without_loss(outputs)
    if isinstance(outputs, tuple | list):
        deferred = any(isinstance(one, DeferredLogits) for one in outputs)
        return tree_map(_tensor_without_loss, outputs) if deferred else outputs
    if not isinstance(outputs, dict):
        return outputs
    for name, value in list(outputs.items()):
        if isinstance(value, DeferredLogits):
            outputs[name] = _tensor_without_loss(value)
    is_model_output = hasattr(outputs, "__dataclass_fields__")
    if isinstance(outputs.get(_LOGITS), DeferredLogits) and is_model_output:
        return _lazy_class(type(outputs))(**dict(outputs.items()))
    return outputs


def _tensor_without_loss(value: Any) -> Any:
    if isinstance(value, DeferredLogits) and not value.has_loss:
        return value.materialize()
    return value


class _LazyLogits(dict[str, Any]):
    """A `ModelOutput` of Hugging Face whose logits are computed when they are read by attribute,
    key or index. `items()` and `values()` do not compute them: wrappers map over these."""

    @property
    def logits(self) -> Any:
        value = self.__dict__.get(_LOGITS)
        # While it is created, some versions of transformers read the attributes, before the keys.
        if isinstance(value, DeferredLogits) and _LOGITS in self.keys():
            value = self.logits = value.materialize()
        return value

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__[_LOGITS] = value

    def __getitem__(self, key: Any) -> Any:
        names = list(self.keys())
        if isinstance(key, int):
            return self[names[key]]
        if isinstance(key, slice):
            return tuple(self[name] for name in names[key])
        return self.logits if key == _LOGITS and key in names else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __reduce__(self) -> Any:
        values = tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self).__bases__[1], values


@functools.cache
def _lazy_class(kind: type[Any]) -> Any:
    if issubclass(kind, _LazyLogits):
        return kind
    return type(kind.__name__, (_LazyLogits, kind), {"__module__": kind.__module__})
