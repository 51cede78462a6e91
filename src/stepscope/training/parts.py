"""Optimizers of a training step, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.analysis.predict.plan import LOW_PRECISION_GRADS, WITHIN_BACKWARD
from stepscope.training.case import CaseSkipped

if TYPE_CHECKING:
    import torch


_OF_USERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-4},
    "adamw-loop": {"lr": 1e-4, "foreach": False},
    "adamw-fused": {"lr": 1e-4, "fused": True},
    "sgd": {"lr": 1e-3, "momentum": 0.9},
    "sgd-fused": {"lr": 1e-3, "momentum": 0.9, "fused": True},
}
"""Optimizers for users' models: torch's, without ranges of Stepscope."""


def make_optimizer(
    name: str, model: torch.nn.Module, *, master: bool = False, capturable: bool = False
) -> torch.optim.Optimizer:
    """Build an optimizer. `master`: it works on float32 copies of the weights. `capturable`: its
    step may be part of a CUDA graph."""
    import torch

    from stepscope.optim import AdamW, FusedAdamW, InBackwardAdamW, MasterWeights
    from stepscope.torch_tools.ranges import name_groups

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name in _OF_USERS:
        of_torch = torch.optim.SGD if name.startswith("sgd") else torch.optim.AdamW
        return of_torch(trained, **_OF_USERS[name])
    if name == "stepscope" and capturable:
        raise CaseSkipped(
            "the plain AdamW reads its step count on the CPU, so it cannot be captured"
        )
    kind: Callable[..., torch.optim.Optimizer] = {
        "stepscope": AdamW,
        "stepscope-fused": FusedAdamW,
        **dict.fromkeys(WITHIN_BACKWARD, InBackwardAdamW),
    }.get(name, torch.optim.AdamW)
    settings: dict[str, Any] = {"capturable": True} if capturable else {}
    if name in WITHIN_BACKWARD:
        settings = {"attach": False, "low_precision_grads": name == LOW_PRECISION_GRADS}
    has_kernel = name in ("stepscope-fused", *WITHIN_BACKWARD)
    if has_kernel:
        settings |= {"copies": getattr(model, "copies", None), "master": master}
    if name == "torch-fused":
        settings["fused"] = True
    optimizer = (
        MasterWeights(trained, kind, **settings)
        if master and not has_kernel
        else kind(trained, **settings)
    )
    name_groups(optimizer)
    return optimizer
