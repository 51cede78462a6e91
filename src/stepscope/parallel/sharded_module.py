"""A module of a sharded model in its forward: full weights by their names, in the right dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.parallel.guard import NotCopied
from stepscope.parallel.sharded_parameter import Gather, ShardedParameter

if TYPE_CHECKING:
    from stepscope.parallel.fsdp import FSDP

IN_PLACE_OF_A_COPY = (
    "for averages of weights keep copies of its parameters(); for a model of one process load"
    " gather_full_params() into a new module"
)


class Unit(NotCopied):
    """A module that owns parameters: they are full, in the dtype of computation, while it runs."""

    label = "a module that FSDP wraps"
    instead = IN_PLACE_OF_A_COPY

    def __init__(self, owner: nn.Module, root: FSDP) -> None:
        self._root = root
        self._runs: list[Run] = []
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after, always_call=True)
        # Torch sets an attribute of the hook, which a bound method cannot have.
        owner.register_state_dict_post_hook(partial(self._as_dtensors))  # type: ignore[no-untyped-call]
        owner.register_load_state_dict_pre_hook(self._own_rows)  # type: ignore[no-untyped-call]

    def _before(self, owner: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        # By all its names: one parameter may have two.
        owned = {name: p for name, p in owner._parameters.items() if p is not None}
        # In its place even if a gather fails: `_after` is called then, too.
        run = Run({name: owner.__dict__.get(name) for name in owned})
        self._runs.append(run)
        wholes: dict[int, ShardedParameter] = {}
        dtype = self._dtype_of(owner, owned)
        for name, parameter in owned.items():
            held = self._root.sharded.get(parameter)
            if held is not None:
                shown = Gather.apply(parameter, held)  # type: ignore[no-untyped-call]
                wholes[shown.untyped_storage().data_ptr()] = held
                self._root.used(held)
            else:
                shown = _cast(parameter, dtype) if dtype else parameter
            # An attribute of the instance is found before a registered parameter.
            owner.__dict__[name] = shown
        notes = saved_tensors_hooks(Notes(wholes), _from_note)
        notes.__enter__()
        run.notes = notes
        if dtype is None:
            return inputs, named
        if dtype is not self._root.compute_dtype:
            run.answer = _common_dtype((inputs, named))
        return tree_map(lambda t: _cast(t, dtype), (inputs, named))  # type: ignore[no-any-return]

    def _dtype_of(self, owner: nn.Module, owned: dict[str, nn.Parameter]) -> torch.dtype | None:
        """In which the module computes; None where it may be any."""
        if self._root.compute_dtype is None or not owned:
            return None
        if any(p in self._root.sharded for p in owned.values()) or owner._modules:
            return self._root.compute_dtype
        return next((p.dtype for p in owned.values() if p.is_floating_point()), None)

    def _after(self, owner: nn.Module, _: Any, output: Any) -> Any:
        run = self._runs.pop()
        run.notes.__exit__(None, None, None)
        for name, shown in run.around.items():
            if shown is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = shown
            parameter = owner._parameters[name]
            if parameter in self._root.sharded:
                self._root.sharded[parameter].release()
        dtype = run.answer
        return None if dtype is None else tree_map(lambda t: _cast(t, dtype), output)

    def _as_dtensors(self, owner: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
        """Rows of this rank in a state_dict, as parts of the full parameters."""
        for name, held in self._sharded(owner):
            value = entries.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                entries[prefix + name] = held.divided(value.detach())

    def _own_rows(self, owner: nn.Module, entries: dict[str, Any], prefix: str, *_: Any) -> None:
        """This rank's rows of the full parameters of a state_dict."""
        for name, held in self._sharded(owner):
            value = entries.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == held.shape:
                entries[prefix + name] = held.rows_of(value)

    def _sharded(self, owner: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
        for name, parameter in owner._parameters.items():
            if parameter in self._root.sharded:
                yield name, self._root.sharded[parameter]


@dataclass
class Run:
    """A module within its forward."""

    around: dict[str, Any]
    """What it shows by its names to a run around this one."""
    notes: AbstractContextManager[Any] = field(default_factory=nullcontext)
    answer: torch.dtype | None = None
    """The dtype of what it returns, where that is not the one in which it computes."""


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Handed(NamedTuple):
    """What is kept by whoever was asked before, such as a checkpointed stretch, which drops it."""

    bring: Callable[[Any], Tensor]
    kept: Any


def _hooks_around() -> Hooks | None:
    """Torch asks the innermost alone, so that one has to ask the others."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


class Notes:
    """What autograd keeps: for a whole weight, who can bring it again and how it was seen."""

    def __init__(self, wholes: dict[int, ShardedParameter]) -> None:
        self._wholes = wholes
        self.around = _hooks_around()
        """Where others look who want to know in what this runs."""

    def __call__(self, tensor: Tensor) -> Any:
        held = self._wholes.get(tensor.untyped_storage().data_ptr())
        if held is not None:
            return held, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor if self.around is None else Handed(self.around[1], self.around[0](tensor))


def _from_note(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if isinstance(kept, Handed):
        return kept.bring(kept.kept)
    held, shape, stride, offset = kept
    whole: Tensor = held.whole("regather")
    if held.before is not None:
        held.before.prefetch("regather")
    if not held.parameter.requires_grad:
        # No gradient will come that says when it is done with.
        held.release()
    return whole.as_strided(shape, stride, offset)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _common_dtype(values: Any) -> torch.dtype | None:
    """Of all floating-point tensors among the values; None if they differ."""
    dtypes = {
        t.dtype for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()
    }
    return dtypes.pop() if len(dtypes) == 1 else None
