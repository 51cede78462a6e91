"""Several forms of one training step on the same weights and moments, so that all fit at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def adopt_weights(model: torch.nn.Module, source: torch.nn.Module) -> None:
    """Give a model built on the meta device the parameters and buffers of another of its shape."""
    for name, module in model.named_modules():
        same = source.get_submodule(name)
        module._parameters.update(same._parameters)
        module._buffers.update(same._buffers)
    # One set of copies for all: whoever updates a weight writes them too.
    if hasattr(model, "copies"):
        model.copies = source.copies


def begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero for every parameter, for others to adopt."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
            }


def adopt_moments(optimizer: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Work on the moments of another AdamW over the same parameters, with a count of its own."""
    import torch

    for group in optimizer.param_groups:
        # Where torch's own keeps its count depends on how it runs; ours begins on the host.
        counts_there = isinstance(optimizer, torch.optim.AdamW) and (
            group.get("fused") or group.get("capturable")
        )
        for parameter in group["params"]:
            held = source.state.get(parameter)
            if held:
                where = parameter.device if counts_there else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.ones((), dtype=torch.float32, device=where),
                    "exp_avg": held["exp_avg"],
                    "exp_avg_sq": held["exp_avg_sq"],
                }
