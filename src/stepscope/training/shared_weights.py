"""Share weights and moments among variants of one training step, so that all fit at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def adopt_weights(model: Any, source: Any) -> None:
    """Give a model built on the meta device the parameters and buffers of another of its shape."""
    for name, module in model.named_modules():
        same = source.get_submodule(name)
        module._parameters.update(same._parameters)
        module._buffers.update(same._buffers)
    # One set of copies for all: whichever step updates a weight updates its copies too.
    if hasattr(model, "copies"):
        fp8 = model.copies.fp8
        model.copies = source.copies.shared(fp8)
        model.set_fp8(fp8)


def adopt_moments(optimizer: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    """Use the moments of another AdamW over the same parameters, with a separate step count."""
    import torch

    for group in optimizer.param_groups:
        # The device of torch's step count depends on how it runs; Stepscope's starts on the CPU.
        counts_there = isinstance(optimizer, torch.optim.AdamW) and (
            group.get("fused") or group.get("capturable")
        )
        for parameter in group["params"]:
            moments = source.state.get(parameter)
            if moments:
                where = parameter.device if counts_there else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.ones((), dtype=torch.float32, device=where),
                    "exp_avg": moments["exp_avg"],
                    "exp_avg_sq": moments["exp_avg_sq"],
                }
