"""How the ranks of a job share the models of a program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.acceleration.sharded.units import is_unit, parameter_groups, state_of
from stepscope.records.sharing import Sharing


def sharing_of(models: Iterable[nn.Module]) -> Sharing | None:
    """Return how the first of these models that is shared is shared."""
    for model in models:
        if isinstance(model, DistributedDataParallel):
            return _ddp(model)
        if units := [one for one in model.modules() if is_unit(one) and parameter_groups(one)]:
            return _fsdp2(units)
    return None


def _ddp(model: DistributedDataParallel) -> Sharing:
    return Sharing(
        kind="ddp",
        tensors=sum(one.requires_grad for one in model.parameters()),
        finds_unused=model.find_unused_parameters and not model.static_graph,
        gradient_views=model.gradient_as_bucket_view,
    )


def _fsdp2(units: list[nn.Module]) -> Sharing:
    states = [state_of(unit) for unit in units]
    groups = [group for unit in units for group in parameter_groups(unit)]
    return Sharing(
        kind="fsdp2",
        tensors=sum(len(group.fsdp_params) for group in groups),
        units=len(units),
        prefetches=any(
            one._states_to_forward_prefetch or one._states_to_backward_prefetch for one in states
        ),
        resharded_bytes=sum(map(_bytes, groups)),
    )


def _bytes(group: Any) -> int:
    """Bytes of a group's parameters that are freed after the forward pass."""
    if group.post_forward_mesh_info is None:
        return 0
    sizes = (
        math.prod(one._orig_size) * (one.param_dtype or one.orig_dtype).itemsize
        for one in group.fsdp_params
    )
    return sum(sizes)
