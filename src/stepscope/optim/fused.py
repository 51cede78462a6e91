"""Fused AdamW in one pass over all parameters: every element is read and written once.

The update rule and the state are those of `optim.adamw`, so a checkpoint of one loads into the
other. Parameters that the kernel does not support (another device, float64, non-contiguous memory)
are updated by the naive version. There is no synchronization with the device.

In a CUDA graph, with `capturable=True`:

    optimizer.prepare()  # after the capture of the backward, which allocates the gradients
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    optimizer.refresh()  # after a change of the learning rate, between two replays
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.optim.adamw import AdamW
from stepscope.optim.launches import Copies, FusedLaunches, TensorUpdate, kernel_takes

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class FusedAdamW(AdamW):
    """AdamW in one Triton kernel per device and dtype.

    `stochastic_bfloat16_state` stores both moments in bfloat16 with stochastic rounding, which
    preserves small changes on average: a quarter less traffic per step, and different numerics. The
    random numbers follow from `seed` and the step, so a run is reproducible. `capturable` keeps the
    step count on the device, so that a step can be part of a CUDA graph. `copies` has low-precision
    copies of parameters (`TransformerLM.copies`), which are written together with them. `master`
    keeps float32 copies of 16-bit parameters in the state and updates those: the state is that of
    `MasterWeights` around AdamW, without a float32 gradient.
    """

    _COPIED_ATTRIBUTES: tuple[str, ...] = (
        "_master",
        "_stochastic",
        "_seed",
        "_capturable",
        "_copies",
    )
    """Attributes that pickle and deepcopy preserve."""

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
        capturable: bool = False,
        copies: Copies | None = None,
        master: bool = False,
    ) -> None:
        if capturable and stochastic_bfloat16_state:
            raise ValueError(
                "a captured step would use the same random numbers for rounding at every replay"
            )
        if master and stochastic_bfloat16_state:
            raise ValueError("master weights have moments in float32")
        super().__init__(params, lr, betas, eps, weight_decay)
        self._master = master
        self._stochastic = stochastic_bfloat16_state
        self._seed = seed
        self._capturable = capturable
        self._copies = copies
        self._reset_caches()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            name: getattr(self, name) for name in self._COPIED_ATTRIBUTES
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_launches" not in self.__dict__:
            # A copy: the caches for the original's parameters are not copied.
            self._reset_caches()

    def _reset_caches(self) -> None:
        self._launches = FusedLaunches(self._copies)

    def prepare(self) -> None:
        """Create what a step needs for the current gradients, without an update."""
        if not self._capturable:
            raise RuntimeError("prepare() needs FusedAdamW(capturable=True)")
        self._launches.prepare(self._capturable_updates())

    def refresh(self) -> None:
        """Copy the hyperparameters of the groups into the settings that a captured step reads."""
        self._launches.refresh()

    def _refuse_capture(self) -> None:
        if not self._capturable:
            super()._refuse_capture()

    def _update_all(self) -> None:
        if self._capturable:
            self._launches.update_with_device_counts(self._capturable_updates())
            return
        updates = []
        for group, parameter, gradient in self._gradients():
            if not gradient.is_sparse:
                # The update keeps a contiguous copy alive until the launch.
                gradient = gradient.contiguous().resolve_neg()
            if kernel_takes(parameter, gradient):
                updates.append(self._tensor_update(parameter, gradient, group))
            else:
                self._update(parameter, gradient, group)
        self._launches.update_with_host_counts(
            updates, stochastic=self._stochastic, seed=self._seed
        )

    def _capturable_updates(self) -> list[TensorUpdate]:
        updates = []
        for group, parameter, gradient in self._gradients():
            if not kernel_takes(parameter, gradient):
                raise RuntimeError(
                    "a capturable FusedAdamW supports dense 16-bit or 32-bit tensors on a GPU,"
                    f" not {parameter.dtype} on {parameter.device}"
                )
            updates.append(self._tensor_update(parameter, gradient, group))
        return updates

    def _gradients(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """Return group, parameter and gradient of all parameters with a gradient."""
        return [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _tensor_update(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> TensorUpdate:
        """Return what the kernel reads and writes. With a master copy, that is updated, and the
        parameter is the copy."""
        state = self._state_for_kernel(parameter)
        has_master = self._has_master(parameter)
        updated = state[MASTER] if has_master else parameter
        copy = parameter if has_master else self._launches.copy_of(parameter)
        mean, square = (state[name] for name in MOMENTS)
        amax = self._launches.amax_of(parameter, updated)
        return TensorUpdate(parameter, updated, gradient, mean, square, copy, state, group, amax)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._master:
            return
        # The base class has cast all state to the dtype of the parameters.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {}) if self._has_master(parameter) else {}
            for name in saved.keys() & {MASTER, *MOMENTS}:
                value = saved[name].to(parameter.device, torch.float32, copy=True)
                self.state[parameter][name] = value

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self._has_master(parameter):
            super()._update(parameter, gradient, group)
            return
        state = self._state_for_kernel(parameter)
        self._apply_rule(state[MASTER], gradient.to(state[MASTER].dtype), state, group)
        parameter.copy_(state[MASTER])

    def _has_master(self, parameter: Tensor) -> bool:
        return self._master and parameter.dtype in (torch.float16, torch.bfloat16)

    def _state_for_kernel(self, parameter: Tensor) -> dict[str, Tensor]:
        wide = torch.float32 if self._has_master(parameter) else parameter.dtype
        moments = torch.bfloat16 if self._stochastic else wide
        state = self._state_of(parameter, moments)
        if self._has_master(parameter) and MASTER not in state:
            state[MASTER] = parameter.detach().to(wide, memory_format=torch.contiguous_format)
        for name in MOMENTS:
            # Loaded state has the dtype of the parameter and may be non-contiguous.
            if state[name].dtype != moments or not state[name].is_contiguous():
                state[name] = state[name].to(moments).contiguous()
        return state
