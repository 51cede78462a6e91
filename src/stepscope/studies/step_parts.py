"""Parts of a training step by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.studies.base import CaseSkipped
from stepscope.studies.workload_flags import AS_MADE, WITHIN_BACKWARD

if TYPE_CHECKING:
    import torch


def compile_model(model: torch.nn.Module, how: str, mode: str = "default") -> None:
    if how == "model":
        model.compile(mode=mode)
    elif how == "block":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(mode=mode)


def make_optimizer(
    name: str, model: torch.nn.Module, *, master: bool = False, capturable: bool = False
) -> torch.optim.Optimizer:
    """`master`: it works on float32 copies of the weights. `capturable`: its step may be part of a
    CUDA graph."""
    import torch

    from stepscope.optim import AdamW, FusedAdamW, InBackwardAdamW, MasterWeights
    from stepscope.ranges import name_groups

    if name == "stepscope" and capturable:
        raise CaseSkipped("AdamW written out reads its count of steps on the host: no graph")
    kind: Callable[..., torch.optim.Optimizer] = {
        "stepscope": AdamW, "stepscope-fused": FusedAdamW,
        **dict.fromkeys(WITHIN_BACKWARD, InBackwardAdamW),
    }.get(name, torch.optim.AdamW)  # fmt: skip
    settings: dict[str, Any] = {"capturable": True} if capturable else {}
    if name in WITHIN_BACKWARD:
        settings = {"attach": False, "as_made": name == AS_MADE}
    has_kernel = name in ("stepscope-fused", *WITHIN_BACKWARD)
    if has_kernel:
        settings |= {"copies": getattr(model, "copies", None), "master": master}
    if name == "torch-fused":
        settings["fused"] = True
    made = (
        MasterWeights(model.parameters(), kind, **settings)
        if master and not has_kernel
        else kind(model.parameters(), **settings)
    )
    name_groups(made)
    return made
