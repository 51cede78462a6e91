"""AdamW in one pass over all parameters: every element is read and written once.

The update rule and the state are those of `optim.adamw`, so a checkpoint of one loads into the
other. What the kernel cannot take (another device, float64, scattered memory) is updated the plain
way. Launches do not wait for the device, and nothing is read back.

In a CUDA graph, with `capturable=True`:

    optimizer.prepare()  # after the capture of the backward, which made the gradients
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
    """Weights in another format beside themselves, such as `model.kernels.copies.WeightCopies`."""

    def find(self, weight: Tensor) -> Tensor | None: ...

    def written(self, weight: Tensor) -> None:
        """What `find` gave is written together with the weight, whose version has moved."""


class Counted(NamedTuple):
    """What a captured launch uses again at every replay."""

    table: Table
    settings: DeviceSettings
    groups: tuple[dict[str, Any], ...]
    """Of each row of the table its parameter group."""


class FusedAdamW(AdamW):
    """`stochastic_bfloat16_state` keeps both moments in bfloat16, rounded up or down by chance so
    that small changes are kept on average: a quarter of the bytes of a step less, and not the same
    numbers. The chance comes from `seed` and the step, so a run repeats. `capturable` keeps the
    count of steps on the device, so that a step may be part of a CUDA graph. Where `copies` has one
    of a parameter, it is written together with the parameter. `master` keeps 16-bit parameters in
    float32 as well, in the state, and updates those: the state is that of `MasterWeights` around
    AdamW, and no gradient is widened for it."""

    _KEPT: tuple[str, ...] = ("_master", "_by_chance", "_seed", "_capturable", "_copies")
    """What a copy of this has as well."""

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
            raise ValueError("a captured step would round by the same chance at every replay")
        if master and stochastic_bfloat16_state:
            raise ValueError("master weights have moments in float32")
        super().__init__(params, lr, betas, eps, weight_decay)
        self._master = master
        self._by_chance = stochastic_bfloat16_state
        self._seed = seed
        self._capturable = capturable
        self._copies = copies
        self._start_anew()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_tables" not in self.__dict__:
            # A copy: what was made for the parameters of another is left behind.
            self._start_anew()

    def _start_anew(self) -> None:
        self._tables: dict[tuple[torch.device, TensorDtypes], Table] = {}
        self._counted: dict[tuple[torch.device, TensorDtypes], Counted] = {}
        self._captured: list[Counted] = []
        """Those that replays of a captured step read: they outlive a change of the gradients."""

    def prepare(self) -> None:
        """Make what a step needs for the gradients that are there, and change nothing else."""
        if not self._capturable:
            raise RuntimeError("only a capturable FusedAdamW prepares: FusedAdamW(capturable=True)")
        self._count_all()

    def refresh(self) -> None:
        """Take the hyperparameters of the groups over into what a captured step reads."""
        for held in (*self._counted.values(), *self._captured):
            held.settings.follow(rules(held.groups))

    def _refuse_capture(self) -> None:
        if not self._capturable:
            super()._refuse_capture()

    def _update_all(self) -> None:
        if not self._capturable:
            self._update_from_the_host()
            return
        for (device, formats), held in self._count_all().items():
            held.settings.advance()
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                held.table.update(held.settings.rows, formats, by_chance=False, seed=0)

    def _count_all(self) -> dict[tuple[torch.device, TensorDtypes], Counted]:
        """Table and settings for all that has a gradient now: those of before where they fit."""
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
                        "a capturable FusedAdamW takes dense tensors of 16 or 32 bits on a GPU,"
                        f" not {parameter.dtype} on {parameter.device}"
                    )
                state, copy = self._state_for_kernel(parameter), self._copy_of(parameter)
                updated = self._updated(parameter)
                place = len(gathered.get(_key(updated, gradient, state, copy), ()))
                key, row = _described(updated, gradient, state, copy, place)
                gathered.setdefault(key, []).append(parameter)
                rows.setdefault(key, []).append(row)
                groups.setdefault(key, []).append(group)
        return {
            key: self._fitting(key, parameters, tuple(rows[key]), tuple(groups[key]))
            for key, parameters in gathered.items()
        }

    def _fitting(
        self, key: tuple[torch.device, TensorDtypes], parameters: list[Tensor],
        rows: tuple[Row, ...], groups: tuple[dict[str, Any], ...],
    ) -> Counted:  # fmt: skip
        from stepscope.optim.device_settings import DeviceSettings
        from stepscope.optim.triton_adamw import Table

        device, kept = key[0], self._counted.get(key)
        states = [self.state[parameter] for parameter in parameters]
        counts_fit = (
            kept is not None
            and len(kept.groups) == len(groups)
            and all(
                state["step"] is steps
                for state, steps in zip(states, kept.settings.steps, strict=True)
            )
            # Loading a state makes new groups.
            and all(held is group for held, group in zip(kept.groups, groups, strict=True))
        )
        fits = kept is not None and counts_fit and kept.table.rows == rows
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if kept is None or not fits:
                raise RuntimeError(
                    "FusedAdamW has not seen these gradients: call prepare() before the capture"
                )
            self._captured.append(kept)
            return kept
        if kept is None or not fits:
            if kept is not None and counts_fit:
                settings = kept.settings
            else:
                settings = DeviceSettings(self._counts(states), rules(groups), device)
            for state, steps in zip(states, settings.steps, strict=True):
                state["step"] = steps
            kept = self._counted[key] = Counted(
                Table(rows, device, kept.table if kept else None), settings, groups
            )
        kept.settings.follow(rules(groups))
        return kept

    def _counts(self, states: list[dict[str, Tensor]]) -> list[float | Tensor]:
        """The steps so far; the tensor itself where a captured step advances it."""
        captured = {id(steps) for held in self._captured for steps in held.settings.steps}
        return [
            state["step"] if id(state["step"]) in captured else float(state["step"])
            for state in states
        ]

    def _update_from_the_host(self) -> None:
        gathered: dict[tuple[torch.device, TensorDtypes], list[Row]] = {}
        settings: dict[Settings, int] = {}
        seed = self._seed
        dense: list[Tensor] = []
        """Held until the launch: a row has an address alone."""
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
                own = settings.setdefault(_settings(group, steps), len(settings))
                updated, copy = self._updated(parameter), self._copy_of(parameter)
                key, row = _described(updated, gradient, state, copy, own)
                gathered.setdefault(key, []).append(row)
        for (device, formats), rows in gathered.items():
            self._launch(device, formats, tuple(rows), list(settings), seed)

    def _launch(
        self, device: torch.device, formats: TensorDtypes, rows: tuple[Row, ...],
        settings: list[Settings], seed: int,
    ) -> None:  # fmt: skip
        from stepscope.optim.triton_adamw import Table, sent

        table = self._tables.get((device, formats))
        # An allocator gives gradients the same addresses again, step after step.
        if table is None or table.rows != rows:
            table = self._tables[device, formats] = Table(rows, device, table)
        by_chance = self._by_chance and formats.moments == torch.bfloat16
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            table.update(
                sent(torch.tensor(settings, dtype=torch.float32), device),
                formats,
                by_chance=by_chance,
                seed=seed % _LARGEST_SEED,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._master:
            return
        # The base class has rounded all of it to the format of the parameters.
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            held = state_dict["state"].get(number, {}) if self._has_master(parameter) else {}
            for name in held.keys() & {MASTER, *MOMENTS}:
                made = held[name].to(parameter.device, torch.float32, copy=True)
                self.state[parameter][name] = made

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
        """What the rule works on."""
        return self.state[parameter][MASTER] if self._has_master(parameter) else parameter

    def _copy_of(self, parameter: Tensor) -> Tensor | None:
        """What the kernel writes beside what it updates: the parameter where that is a master copy,
        else its own copy. A parameter's version tells others that it changed: the kernel writes
        past torch, so it is counted here."""
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
        moments = torch.bfloat16 if self._by_chance else wide
        state = self._state_of(parameter, moments)
        if self._has_master(parameter) and MASTER not in state:
            state[MASTER] = parameter.detach().to(wide, memory_format=torch.contiguous_format)
        for name in MOMENTS:
            # A loaded state comes in the parameter's format and may be scattered.
            if state[name].dtype != moments or not state[name].is_contiguous():
                state[name] = state[name].to(moments).contiguous()
        return state


def rules(groups: tuple[dict[str, Any], ...]) -> tuple[Rule, ...]:
    return tuple(Rule.of(group) for group in groups)


def kernel_takes(parameter: Tensor, gradient: Tensor) -> bool:
    if not HAS_TRITON or gradient.is_sparse or gradient.device != parameter.device:
        return False
    formats = (parameter.dtype, gradient.dtype)
    if not all(map(supports_dtype, formats)) or not parameter.numel():
        return False
    if not (parameter.is_contiguous() and gradient.is_contiguous()):
        return False
    return parameter.is_cuda or is_interpreted()


def _settings(group: dict[str, Any], steps: float) -> Settings:
    from stepscope.optim.triton_adamw import Settings

    rule = Rule.of(group)
    return Settings.of(rule, rule.lr / (1 - rule.beta1**steps), math.sqrt(1 - rule.beta2**steps))


def _described(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    copy: Tensor | None,
    settings: int,
) -> tuple[tuple[torch.device, TensorDtypes], Row]:
    from stepscope.optim.triton_adamw import Row

    mean, square = state["exp_avg"], state["exp_avg_sq"]
    row = Row(
        parameter.data_ptr(), gradient.data_ptr(), mean.data_ptr(), square.data_ptr(),
        copy.data_ptr() if copy is not None else 0, parameter.numel(), settings,
    )  # fmt: skip
    return _key(parameter, gradient, state, copy), row


def _key(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], copy: Tensor | None
) -> tuple[torch.device, TensorDtypes]:
    from stepscope.optim.triton_adamw import TensorDtypes

    copied = copy.dtype if copy is not None else None
    return parameter.device, TensorDtypes(
        parameter.dtype, gradient.dtype, state["exp_avg"].dtype, copied
    )
