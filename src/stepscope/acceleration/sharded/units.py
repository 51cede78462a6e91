"""FSDP2 as the graph backend sees it: which modules are units, and what is private to torch.

A unit is a module with `fully_shard`. Within its hooks its weights are gathered: plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_TENSOR_PARALLEL = (
    "some of its parameters are DTensors in a forward, too (tensor parallelism), where operators"
    " communicate"
)


def is_unit(module: nn.Module) -> bool:
    """Return whether a module gathers its weights in hooks of `fully_shard`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def has_units(model: nn.Module) -> bool:
    return any(map(is_unit, model.modules()))


def units_of(module: nn.Module, *, itself: bool = True) -> Iterator[nn.Module]:
    """Yield the outermost units in a module."""
    if itself and is_unit(module):
        yield module
        return
    seen = set()
    for child in module.children():
        for unit in units_of(child):
            if unit not in seen:
                seen.add(unit)
                yield unit


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Return the module and its parts outside of other units. Every call of a unit asks for them:
    `children()` takes several times as long."""
    found = [module]
    for one in found:
        found += [x for x in one._modules.values() if x is not None and not is_unit(x)]
    return found


def within_checkpoint(unit: nn.Module) -> nn.Module:
    """Return the module whose forward a unit runs: not that of torch's `checkpoint_wrapper`, within
    which a compiled part is computed again."""
    inner = getattr(unit, "_checkpoint_wrapped_module", None)
    return unit if inner is None else inner


def state_of(unit: nn.Module) -> Any:
    return unit._get_fsdp_state()  # type: ignore[operator]


def policy_of(unit: nn.Module) -> Any:
    """Return the `MixedPrecisionPolicy` of a unit."""
    return state_of(unit)._mp_policy


def runs_forward(unit: nn.Module) -> bool:
    """Return whether the forward of a unit runs, within its hooks."""
    return bool(state_of(unit)._training_state.name == "FORWARD")


def hooks_of_fsdp(module: nn.Module) -> set[int]:
    """Return the keys of the hooks that gather and free the weights of a unit."""
    if not is_unit(module):
        return set()
    state = state_of(module)
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    found = set()
    for handle in handles:
        found |= {one.id for one in getattr(handle, "handles", (handle,))}
    return found


def device_of(model: nn.Module) -> torch.device:
    """Return where the units of a model compute."""
    device: torch.device = state_of(next(filter(is_unit, model.modules())))._device
    return device


def mesh_groups(model: nn.Module) -> list[Any]:
    """Return the process groups over which the weights of a model are sharded or replicated."""
    for module in model.modules():
        if is_unit(module):
            for group in parameter_groups(module):
                mesh = group.mesh_info.mesh
                return [mesh.get_group(at) for at in range(mesh.ndim)]
    return []


def why_not_compiled(model: nn.Module) -> str | None:
    """Return why parameters of a model, sharded by whatever means, stay as they are, if so."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return None
    of_fsdp = {
        id(one)
        for unit in model.modules()
        if is_unit(unit)
        for group in parameter_groups(unit)
        for p in group.fsdp_params
        if not p.is_dtensor
        for one in (p.sharded_param, getattr(p, "_unsharded_param", None))
    }
    others = (p for p in model.parameters() if id(p) not in of_fsdp)
    return _TENSOR_PARALLEL if any(isinstance(p, tensor.DTensor) for p in others) else None


def parameter_groups(unit: nn.Module) -> Sequence[Any]:
    """Return what a unit gathers at once."""
    state = state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group or none.
        groups = [state._fsdp_param_group]
    return [one for one in groups if one is not None]


def agreed(values: Sequence[int], groups: Sequence[Any], device: torch.device) -> list[int]:
    """Return the largest of each value on any rank of these groups."""
    together = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=group)
    return [int(x) for x in together.tolist()]


def is_first(groups: Sequence[Any]) -> bool:
    """Return whether this rank is the first one of its groups."""
    return all(torch.distributed.get_rank(group) == 0 for group in groups)
