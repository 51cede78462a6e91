"""AdamW in one pass over all parameters: every element is read and written once.

The update rule and the state are those of `optim.adamw`, so a checkpoint of one loads into the
other. What the kernel cannot take (another device, float64, scattered memory) is updated the plain
way. Launches do not wait for the device, and nothing is read back.
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.optim.adamw import AdamW

if TYPE_CHECKING:
    from stepscope.optim.triton_adamw import Formats, Row, Settings, Table

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_FORMATS = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_SEED = (1 << 31) - 1


class FusedAdamW(AdamW):
    """`stochastic_bfloat16_state` keeps both moments in bfloat16, rounded up or down by chance so
    that small changes are kept on average: a quarter of the bytes of a step less, and not the same
    numbers. The chance comes from `seed` and the step, so a run repeats."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_bfloat16_state: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        self._by_chance = stochastic_bfloat16_state
        self._seed = seed
        self._tables: dict[tuple[torch.device, Formats], Table] = {}

    def _update_all(self) -> None:
        gathered: dict[tuple[torch.device, Formats], list[Row]] = {}
        settings: dict[Settings, int] = {}
        seed = self._seed
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if not _kernel_takes(parameter, gradient):
                    self._update(parameter, gradient, group)
                    continue
                state = self._state_for_kernel(parameter)
                steps = state["step"].add_(1).item()
                seed = self._seed + int(steps)
                own = settings.setdefault(_settings(group, steps), len(settings))
                key, row = _described(parameter, gradient, state, own)
                gathered.setdefault(key, []).append(row)
        for (device, formats), rows in gathered.items():
            self._launch(device, formats, tuple(rows), list(settings), seed)

    def _launch(
        self, device: torch.device, formats: Formats, rows: tuple[Row, ...],
        settings: list[Settings], seed: int,
    ) -> None:  # fmt: skip
        from stepscope.optim.triton_adamw import Table, sent

        table = self._tables.get((device, formats))
        # An allocator gives gradients the same addresses again, step after step.
        if table is None or table.rows != rows:
            table = self._tables[device, formats] = Table(rows, device)
        by_chance = self._by_chance and formats.moments == torch.bfloat16
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            table.update(
                sent(torch.tensor(settings, dtype=torch.float32), device),
                formats,
                by_chance=by_chance,
                seed=seed % _LARGEST_SEED,
            )

    def _state_for_kernel(self, parameter: Tensor) -> dict[str, Tensor]:
        moments = torch.bfloat16 if self._by_chance else parameter.dtype
        state = self._state_of(parameter, moments)
        for name in ("exp_avg", "exp_avg_sq"):
            # A loaded state comes in the parameter's format and may be scattered.
            if state[name].dtype != moments or not state[name].is_contiguous():
                state[name] = state[name].to(moments).contiguous()
        return state


def _kernel_takes(parameter: Tensor, gradient: Tensor) -> bool:
    if not _HAS_TRITON or gradient.is_sparse or gradient.device != parameter.device:
        return False
    formats = (parameter.dtype, gradient.dtype)
    if not all(each in _FORMATS for each in formats) or not parameter.numel():
        return False
    if not (parameter.is_contiguous() and gradient.is_contiguous()):
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        # The interpreter computes bfloat16 wrongly.
        return torch.bfloat16 not in formats
    return parameter.is_cuda


def _settings(group: dict[str, Any], steps: float) -> Settings:
    from stepscope.optim.triton_adamw import Settings

    lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
    return Settings(
        decay=1 - lr * group["weight_decay"],
        mean_share=1 - beta1,
        square_kept=beta2,
        square_share=1 - beta2,
        eps=eps,
        step_size=lr / (1 - beta1**steps),
        root_bias=math.sqrt(1 - beta2**steps),
    )


def _described(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], settings: int
) -> tuple[tuple[torch.device, Formats], Row]:
    from stepscope.optim.triton_adamw import Formats, Row

    mean, square = state["exp_avg"], state["exp_avg_sq"]
    formats = Formats(parameter.dtype, gradient.dtype, mean.dtype)
    row = Row(
        parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr(),
        parameter.numel(), settings,
    )  # fmt: skip
    return (parameter.device, formats), row
