"""The fused update of a torch optimizer, parameter by parameter, during the backward pass.

`InBackwardAdamW` works on the groups and the state of the user's optimizer, which stays the object
that schedulers change and checkpoints save. On a GPU the updates overlap with the backward pass,
and each gradient is freed after its update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.optimizer import FusedUpdate, why_not_fused
from stepscope.optim.in_backward import InBackwardAdamW
from stepscope.optim.launches import kernel_takes


class UpdateInBackward(InBackwardAdamW):
    """An optimizer-in-backward that shares the groups and the state of a fused optimizer."""

    def __init__(self, fused: FusedUpdate) -> None:
        self._owner = fused.optimizer
        super().__init__(_parameters(fused.optimizer), copies=fused.copies, attach=False)
        self._linked: Any = None
        self.link()

    def link(self) -> None:
        """Use the current groups and state of the optimizer: `load_state_dict` replaces them, and
        parameters may be added or unfrozen."""
        owner = self._owner
        current = (
            [id(group) for group in owner.param_groups],
            [(id(parameter), parameter.requires_grad) for parameter in _parameters(owner)],
        )
        if self.state is not owner.state or self._linked != current:
            self.state, self.param_groups, self._linked = owner.state, owner.param_groups, current
            self._forget_settings()


def update_in_backward(optimizer: Optimizer) -> UpdateInBackward | str:
    """Return the optimizer-in-backward for a fused optimizer, or why it would not be the same."""
    fused = getattr(vars(optimizer).get("_init_group"), "__self__", None)
    if not isinstance(fused, FusedUpdate):
        return why_not_fused(optimizer) or "the optimizer was not passed to stepscope.accelerate"
    return _reason(fused) or UpdateInBackward(fused)


def _reason(fused: FusedUpdate) -> str | None:
    optimizer: Any = fused.optimizer
    if fused.left:
        return "; ".join(fused.left)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "gradients of several ranks are reduced after the backward pass of a parameter"
    if optimizer._optimizer_step_pre_hooks or len(optimizer._optimizer_step_post_hooks) > 1:
        return "the optimizer has step hooks"
    step = vars(optimizer).get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        return "its step() is replaced"
    for parameter in _parameters(optimizer):
        if type(parameter) not in (Tensor, nn.Parameter) or not kernel_takes(parameter, parameter):
            return "some parameters are not dense 16-bit or 32-bit tensors on a GPU"
    return None


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
