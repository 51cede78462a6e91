"""Forward of a module in a sharded model: full weights under their names, in the right dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.parallel.guard import NotCopied
from stepscope.parallel.sharded_parameter import Gather, ShardedParameter

COPY_HINT = (
    "for averages of weights copy its parameters(); for a model of one process load"
    " gather_full_params() into a new module"
)


class Root(Protocol):
    """The model, wrapped by FSDP, that a module is a part of."""

    @property
    def sharded(self) -> dict[nn.Parameter, ShardedParameter]: ...

    @property
    def compute_dtype(self) -> torch.dtype | None: ...

    def used(self, shard: ShardedParameter) -> None: ...


class Unit(NotCopied):
    """A module that owns parameters. They are full and in the compute dtype while it runs."""

    label = "a module wrapped by FSDP"
    instead = COPY_HINT

    def __init__(self, owner: nn.Module, root: Root) -> None:
        self._root = root
        self._runs: list[Run] = []
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after, always_call=True)
        # Torch sets an attribute on the hook, which a bound method does not allow.
        owner.register_state_dict_post_hook(partial(self._as_dtensors))  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(self._own_rows)  # type: ignore[no-untyped-call]

    def _before(self, owner: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        # By name, because one parameter may have two names.
        owned = {name: p for name, p in owner._parameters.items() if p is not None}
        # Appended even if a gather fails: `_after` is called in that case as well.
        run = Run({name: owner.__dict__.get(name) for name in owned})
        self._runs.append(run)
        gathered: dict[int, ShardedParameter] = {}
        dtype = self._dtype_of(owner, owned)
        for name, parameter in owned.items():
            shard = self._root.sharded.get(parameter)
            if shard is not None:
                value = Gather.apply(parameter, shard)  # type: ignore[no-untyped-call]
                if value.numel():
                    # Empty tensors have no address of their own.
                    gathered[value.untyped_storage().data_ptr()] = shard
                self._root.used(shard)
            else:
                value = _cast(parameter, dtype) if dtype else parameter
            # An instance attribute takes precedence over a registered parameter.
            owner.__dict__[name] = value
        references = saved_tensors_hooks(SaveReferences(gathered), _unpack)
        references.__enter__()
        run.references = references
        if dtype is None:
            return inputs, named
        if dtype is not self._root.compute_dtype:
            run.output_dtype = _common_dtype((inputs, named))
        return tree_map(lambda t: _cast(t, dtype), (inputs, named))  # type: ignore[no-any-return]

    def _dtype_of(self, owner: nn.Module, owned: dict[str, nn.Parameter]) -> torch.dtype | None:
        """The dtype in which the module computes; None if it is not restricted."""
        if self._root.compute_dtype is None or not owned:
            return None
        if any(p in self._root.sharded for p in owned.values()) or owner._modules:
            return self._root.compute_dtype
        return next((p.dtype for p in owned.values() if p.is_floating_point()), None)

    def _after(self, owner: nn.Module, _: Any, output: Any) -> Any:
        run = self._runs.pop()
        run.references.__exit__(None, None, None)
        for name, value in run.outer.items():
            if value is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = value
            parameter = owner._parameters[name]
            if parameter in self._root.sharded:
                self._root.sharded[parameter].release()
        dtype = run.output_dtype
        return None if dtype is None else tree_map(lambda t: _cast(t, dtype), output)

    def _as_dtensors(self, owner: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
        """Convert this rank's rows in a state_dict to DTensors of the full shape."""
        for name, shard in self._sharded(owner):
            value = entries.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                entries[prefix + name] = shard.divided(value.detach())

    def _own_rows(self, owner: nn.Module, entries: dict[str, Any], prefix: str, *_: Any) -> None:
        """Replace full parameters in a state_dict by this rank's rows."""
        for name, shard in self._sharded(owner):
            value = entries.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == shard.shape:
                entries[prefix + name] = shard.rows_of(value)

    def _sharded(self, owner: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
        for name, parameter in owner._parameters.items():
            if parameter in self._root.sharded:
                yield name, self._root.sharded[parameter]


@dataclass
class Run:
    """State of one forward call of a module."""

    outer: dict[str, Any]
    """Attributes of an enclosing forward of the same module, restored afterwards."""
    references: AbstractContextManager[Any] = field(default_factory=nullcontext)
    output_dtype: torch.dtype | None = None
    """The dtype of the output if it differs from the one in which the module computes."""


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Delegated(NamedTuple):
    """A tensor packed by the enclosing hooks, for example those of a checkpointed segment."""

    unpack: Callable[[Any], Tensor]
    packed: Any


def _hooks_around() -> Hooks | None:
    """The enclosing hooks. Torch only calls the innermost ones, which must call the others."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


class Reference(NamedTuple):
    """A view of a full weight: what is needed to make it again from the gathered rows."""

    shard: ShardedParameter
    dtype: torch.dtype
    """Differs from that of the weight in a view such as `torch.view_as_real(weight)`."""
    geometry: tuple[int, torch.Size, tuple[int, ...]]
    """Offset in the storage, shape and strides."""
    is_conj: bool
    is_neg: bool
    """The lazy bits of `weight.conj()` and `weight.conj().imag`."""

    def of(self, full: Tensor) -> Tensor:
        view = full.new_empty(0, dtype=self.dtype).set_(full.untyped_storage(), *self.geometry)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class SaveReferences:
    """Pack hook: save a reference and the view's geometry instead of a full weight."""

    def __init__(self, gathered: dict[int, ShardedParameter]) -> None:
        self._gathered = gathered
        self.around = _hooks_around()
        """The enclosing hooks; other code reads this attribute to find them."""

    def __call__(self, tensor: Tensor) -> Any:
        shard = self._gathered.get(tensor.untyped_storage().data_ptr())
        if shard is not None:
            return Reference(
                shard,
                tensor.dtype,
                (int(tensor.storage_offset()), tensor.shape, tensor.stride()),
                tensor.is_conj(),
                tensor.is_neg(),
            )
        return tensor if self.around is None else Delegated(self.around[1], self.around[0](tensor))


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, Delegated):
        return packed.unpack(packed.packed)
    reference: Reference = packed
    shard = reference.shard
    full: Tensor = shard.full("regather")
    if shard.before is not None:
        shard.before.prefetch("regather")
    if not shard.parameter.requires_grad:
        # No gradient will mark the end of its use.
        shard.release()
    return reference.of(full)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _common_dtype(values: Any) -> torch.dtype | None:
    """The dtype common to all floating-point tensors among the values; None if they differ."""
    dtypes = {
        t.dtype for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()
    }
    return dtypes.pop() if len(dtypes) == 1 else None
