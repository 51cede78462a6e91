"""Naive AdamW: the update rule, one parameter after the other, without fusion.

The state has the keys and dtypes of `torch.optim.AdamW`, so a checkpoint of one loads into the
other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.closures import ClosureOptimizer


class Rule(NamedTuple):
    """Hyperparameters of a group as floats: a learning rate may be a tensor that a scheduler
    changes in place."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rule:
        beta1, beta2 = group["betas"]
        values = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        return cls(*map(float, values))


class AdamW(ClosureOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_hyperparameters(self.defaults | param_group)
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise ValueError(
                "AdamW supports real parameters only: pass torch.view_as_real of complex ones"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            _refuse_variants(group)
        super().__setstate__(state)
        for parameter_state in self.state.values():
            if "step" in parameter_state and not isinstance(parameter_state["step"], Tensor):
                # Older versions of torch saved it as a number.
                parameter_state["step"] = torch.tensor(float(parameter_state["step"]))

    def _step(self) -> None:
        self._refuse_capture()
        self._update_all()

    def _refuse_capture(self) -> None:
        """Raise in a CUDA graph capture: replays would repeat the step count of the capture, and
        with it the bias correction."""
        if not is_capturing():
            return
        if any(p.is_cuda for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(self).__name__}.step() is in a CUDA graph capture, but its step count is on"
                " the host: use FusedAdamW(capturable=True)"
            )

    def _update_all(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise RuntimeError("AdamW needs dense gradients; use SparseAdam for sparse ones")
        self._apply_rule(parameter, gradient, self._state_of(parameter, parameter.dtype), group)

    @staticmethod
    def _apply_rule(
        parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        rule = Rule.of(group)
        beta1, beta2 = rule.beta1, rule.beta2

        state["step"] += 1
        steps = state["step"].item()
        parameter.mul_(1 - rule.lr * rule.weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # Both moments start at zero; dividing by 1 - βᵗ corrects that bias.
        root = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(rule.eps)
        parameter.addcdiv_(mean, root, value=-rule.lr / (1 - beta1**steps))

    def _state_of(self, parameter: Tensor, moments: torch.dtype) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # On the host: reading the count must not wait for the device.
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=moments)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=moments)
        return state


def _refuse_variants(group: dict[str, Any]) -> None:
    for variant in ("amsgrad", "maximize"):
        if group.get(variant):
            raise ValueError(f"{variant}=True is not supported by this AdamW")


def _check_hyperparameters(group: dict[str, Any]) -> None:
    _refuse_variants(group)
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name} is {group[name]}; it must be at least 0")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] is {beta}; it must be in [0, 1)")
