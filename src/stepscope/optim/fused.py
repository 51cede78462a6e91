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

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.optim.adamw import AdamW, Rule
from stepscope.torch_tools.triton_available import HAS_TRITON, is_interpreted, supports_dtype

if TYPE_CHECKING:
    from stepscope.optim.device_settings import DeviceSettings
    from stepscope.optim.triton_adamw import Row, Settings, Table, TensorDtypes

_LARGEST_SEED = (1 << 31) - 1
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class Copies(Protocol):
    """Copies of weights in another dtype, such as `kernels.weight_copies.WeightCopies`."""

    def find(self, weight: Tensor) -> Tensor | None: ...

    def written(self, weight: Tensor) -> None:
        """Record that the copy returned by `find` has been written together with the weight."""


class CapturableLaunch(NamedTuple):
    """Device tables that every replay of a captured launch reads."""

    table: Table
    settings: DeviceSettings
    groups: tuple[dict[str, Any], ...]
    """Parameter group of each row of the table."""


class FusedAdamW(AdamW):
    """AdamW in one Triton kernel per device and dtype.

    `stochastic_bfloat16_state` stores both moments in bfloat16 with stochastic rounding, which
    preserves small changes on average: a quarter less traffic per step, and different numerics. The
    random numbers follow from `seed` and the step, so a run is reproducible. `capturable` keeps the
    step count on the device, so that a step can be part of a CUDA graph. A copy of a parameter in
    `copies` is written together with the parameter. `master` keeps float32 copies of 16-bit
    parameters in the state and updates those: the state is that of `MasterWeights` around AdamW,
    without a float32 gradient.
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
        if "_tables" not in self.__dict__:
            # A copy: the caches for the original's parameters are not copied.
            self._reset_caches()

    def _reset_caches(self) -> None:
        self._tables: dict[tuple[torch.device, TensorDtypes], Table] = {}
        self._launches: dict[tuple[torch.device, TensorDtypes], CapturableLaunch] = {}
        self._captured: list[CapturableLaunch] = []
        """Launches that replays of a captured step read: they outlive a change of the gradients."""

    def prepare(self) -> None:
        """Create what a step needs for the current gradients, without an update."""
        if not self._capturable:
            raise RuntimeError("prepare() needs FusedAdamW(capturable=True)")
        self._prepare_all()

    def refresh(self) -> None:
        """Copy the hyperparameters of the groups into the settings that a captured step reads."""
        for launch in (*self._launches.values(), *self._captured):
            launch.settings.set_rules(rules(launch.groups))

    def _refuse_capture(self) -> None:
        if not self._capturable:
            super()._refuse_capture()

    def _update_all(self) -> None:
        if not self._capturable:
            self._update_with_host_counts()
            return
        for (device, dtypes), launch in self._prepare_all().items():
            launch.settings.advance()
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                launch.table.update(launch.settings.rows, dtypes, stochastic=False, seed=0)

    def _prepare_all(self) -> dict[tuple[torch.device, TensorDtypes], CapturableLaunch]:
        """Return table and settings for all parameters with a gradient, reused where they match."""
        gathered: dict[tuple[torch.device, TensorDtypes], list[Tensor]] = {}
        rows: dict[tuple[torch.device, TensorDtypes], list[Row]] = {}
        groups: dict[tuple[torch.device, TensorDtypes], list[dict[str, Any]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if not kernel_takes(parameter, gradient):
                    raise RuntimeError(
                        "a capturable FusedAdamW supports dense 16-bit or 32-bit tensors on a GPU,"
                        f" not {parameter.dtype} on {parameter.device}"
                    )
                state, copy = self._state_for_kernel(parameter), self._copy_of(parameter)
                updated = self._updated(parameter)
                index = len(gathered.get(_key(updated, gradient, state, copy), ()))
                key, row = _table_row(updated, gradient, state, copy, index)
                gathered.setdefault(key, []).append(parameter)
                rows.setdefault(key, []).append(row)
                groups.setdefault(key, []).append(group)
        return {
            key: self._launch_for(key, parameters, tuple(rows[key]), tuple(groups[key]))
            for key, parameters in gathered.items()
        }

    def _launch_for(
        self,
        key: tuple[torch.device, TensorDtypes],
        parameters: list[Tensor],
        rows: tuple[Row, ...],
        groups: tuple[dict[str, Any], ...],
    ) -> CapturableLaunch:
        from stepscope.optim.device_settings import DeviceSettings
        from stepscope.optim.triton_adamw import Table

        device, launch = key[0], self._launches.get(key)
        states = [self.state[parameter] for parameter in parameters]
        same_counts = (
            launch is not None
            and len(launch.groups) == len(groups)
            and all(
                state["step"] is steps
                for state, steps in zip(states, launch.settings.steps, strict=True)
            )
            # load_state_dict creates new groups.
            and all(known is group for known, group in zip(launch.groups, groups, strict=True))
        )
        matches = launch is not None and same_counts and launch.table.rows == rows
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if launch is None or not matches:
                raise RuntimeError(
                    "FusedAdamW has not seen these gradients: call prepare() before the capture"
                )
            self._captured.append(launch)
            return launch
        if launch is None or not matches:
            if launch is not None and same_counts:
                settings = launch.settings
            else:
                settings = DeviceSettings(self._counts(states), rules(groups), device)
            for state, steps in zip(states, settings.steps, strict=True):
                state["step"] = steps
            launch = self._launches[key] = CapturableLaunch(
                Table(rows, device, launch.table if launch else None), settings, groups
            )
        launch.settings.set_rules(rules(groups))
        return launch

    def _counts(self, states: list[dict[str, Tensor]]) -> list[float | Tensor]:
        """Return the step counts; the tensor itself if a captured step advances it."""
        captured = {id(steps) for launch in self._captured for steps in launch.settings.steps}
        return [
            state["step"] if id(state["step"]) in captured else float(state["step"])
            for state in states
        ]

    def _update_with_host_counts(self) -> None:
        gathered: dict[tuple[torch.device, TensorDtypes], list[Row]] = {}
        settings: dict[Settings, int] = {}
        seed = self._seed
        dense: list[Tensor] = []
        """Keeps contiguous copies alive until the launch: a row has only their addresses."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if not gradient.is_sparse and not gradient.is_contiguous():
                    gradient = gradient.contiguous()
                    dense.append(gradient)
                if not kernel_takes(parameter, gradient):
                    self._update(parameter, gradient, group)
                    continue
                state = self._state_for_kernel(parameter)
                steps = state["step"].add_(1).item()
                seed = self._seed + int(steps)
                settings_row = settings.setdefault(_settings(group, steps), len(settings))
                updated, copy = self._updated(parameter), self._copy_of(parameter)
                key, row = _table_row(updated, gradient, state, copy, settings_row)
                gathered.setdefault(key, []).append(row)
        for (device, dtypes), rows in gathered.items():
            self._launch(device, dtypes, tuple(rows), list(settings), seed)

    def _launch(
        self,
        device: torch.device,
        dtypes: TensorDtypes,
        rows: tuple[Row, ...],
        settings: list[Settings],
        seed: int,
    ) -> None:
        from stepscope.optim.triton_adamw import Table, sent

        table = self._tables.get((device, dtypes))
        # The caching allocator gives gradients the same addresses, step after step.
        if table is None or table.rows != rows:
            table = self._tables[device, dtypes] = Table(rows, device, table)
        stochastic = self._stochastic and dtypes.moments == torch.bfloat16
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            table.update(
                sent(torch.tensor(settings, dtype=torch.float32), device),
                dtypes,
                stochastic=stochastic,
                seed=seed % _LARGEST_SEED,
            )

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

    def _updated(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the rule updates: the master copy or the parameter."""
        return self.state[parameter][MASTER] if self._has_master(parameter) else parameter

    def _copy_of(self, parameter: Tensor) -> Tensor | None:
        """Return the second tensor that the kernel writes: the parameter if a master copy is
        updated, else the parameter's copy. Also advance the parameter's version counter, because
        torch does not see the kernel's writes."""
        torch.autograd.graph.increment_version(parameter)
        if self._has_master(parameter):
            return parameter
        copy = self._copies.find(parameter) if self._copies is not None else None
        if copy is None or not copy.is_contiguous() or not supports_dtype(copy.dtype):
            return None
        assert self._copies is not None
        self._copies.written(parameter)
        return copy

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


def rules(groups: tuple[dict[str, Any], ...]) -> tuple[Rule, ...]:
    return tuple(Rule.of(group) for group in groups)


def kernel_takes(parameter: Tensor, gradient: Tensor) -> bool:
    if not HAS_TRITON or gradient.is_sparse or gradient.device != parameter.device:
        return False
    dtypes = (parameter.dtype, gradient.dtype)
    if not all(map(supports_dtype, dtypes)) or not parameter.numel():
        return False
    if not (parameter.is_contiguous() and gradient.is_contiguous()):
        return False
    return parameter.is_cuda or is_interpreted()


def _settings(group: dict[str, Any], steps: float) -> Settings:
    from stepscope.optim.triton_adamw import Settings

    rule = Rule.of(group)
    return Settings.of(rule, rule.lr / (1 - rule.beta1**steps), math.sqrt(1 - rule.beta2**steps))


def _table_row(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    copy: Tensor | None,
    settings: int,
) -> tuple[tuple[torch.device, TensorDtypes], Row]:
    from stepscope.optim.triton_adamw import Row

    mean, square = state["exp_avg"], state["exp_avg_sq"]
    row = Row(
        parameter.data_ptr(),
        gradient.data_ptr(),
        mean.data_ptr(),
        square.data_ptr(),
        copy.data_ptr() if copy is not None else 0,
        parameter.numel(),
        settings,
    )
    return _key(parameter, gradient, state, copy), row


def _key(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], copy: Tensor | None
) -> tuple[torch.device, TensorDtypes]:
    from stepscope.optim.triton_adamw import TensorDtypes

    copy_dtype = copy.dtype if copy is not None else None
    return parameter.device, TensorDtypes(
        parameter.dtype, gradient.dtype, state["exp_avg"].dtype, copy_dtype
    )
