"""AdamW that updates each parameter as soon as its gradient is there, beside the rest of backward.

An update moves bytes and a matrix product computes, so on a GPU one can run beside the other:
updates have a stream of their own. A gradient lives until its update is done, so there are never
all of them. What needs all gradients at once (clipping by a global norm, accumulation over several
backwards, loss scaling that skips steps) cannot be had with it.

    optimizer = InBackwardAdamW(model.parameters(), lr=3e-4)
    loss.backward()
    optimizer.step()  # waits for the updates, on the device

With `as_made` joined products hand gradients over in their own format: under bfloat16 autocast
these are the values that torch's gradients have, which are rounded to bfloat16 before they are
widened, and half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.optim.fused import Copies, FusedAdamW, kernel_takes, rules
from stepscope.torch_tools.gradient_hooks import hook_for_life, hook_of
from stepscope.torch_tools.side_stream import SideStream, offered
from stepscope.torch_tools.triton_available import supports_dtype

if TYPE_CHECKING:
    from stepscope.optim.device_settings import DeviceSettings


class Crowd(NamedTuple):
    """The parameters of one device that a kernel can take."""

    settings: DeviceSettings
    groups: tuple[dict[str, Any], ...]
    """Of each row of the settings its parameter group."""
    beside: SideStream | None


class InBackwardAdamW(FusedAdamW):
    """`overlap=False` updates on the backward's own stream. With `attach=False` it listens only
    within `attached()`: several optimizers can then take turns on the same parameters. A backward
    that raises outside of `attached()` is over with `step()`: what it reached is updated."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        copies: Copies | None = None,
        overlap: bool = True,
        attach: bool = True,
        as_made: bool = False,
        master: bool = False,
    ) -> None:
        if as_made and attach:
            raise ValueError("as_made is for backwards within attached(): pass attach=False")
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=True, copies=copies, master=master
        )
        self._overlap = overlap
        self._as_made = as_made
        self._attach = attach
        self._listen_where_attached()

    _KEPT = (*FusedAdamW._KEPT, "_overlap", "_as_made", "_attach")

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "_tables" not in self.__dict__
        super().__setstate__(state)
        if copied:
            self._listen_where_attached()

    def _start_anew(self) -> None:
        super()._start_anew()
        self._beside: dict[torch.device, SideStream] = {}
        self._crowds: list[Crowd] = []
        self._places: dict[Tensor, tuple[Crowd, int]] = {}
        self._begun = False
        self._handed: set[Tensor] = set()
        self._reached: set[Tensor] = set()
        self.updated = 0
        """Parameters that the last backward reached."""

    def _listen_where_attached(self) -> None:
        if self._attach:
            for number in range(len(self.param_groups)):
                self._listen_on(number)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Updates happen in backwards within this, and what only they wait for is made on their
        stream: such a gradient is there for others after `step()`. Where a backward raises, what it
        had reached is updated and the rest is not; the next one is a new step."""
        groups = range(len(self.param_groups))
        handles = [handle for number in groups for handle in self._listen(number)]
        try:
            with offered(self):
                yield
        except BaseException:
            self._finish()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # The base class adds the first groups before this one is made.
        if getattr(self, "_attach", False):
            self._listen_on(len(self.param_groups) - 1)
        if getattr(self, "_crowds", None):
            self._forget_settings()

    def prepare(self) -> None:
        """Nothing is to be prepared: a captured backward has its updates in it."""

    def refresh(self) -> None:
        for crowd in self._crowds:
            crowd.settings.follow(rules(crowd.groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # The counts are others now.
        self._forget_settings()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Wait, on the device, until all updates of this backward are done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._has_gradients():
            self._finish()
            raise RuntimeError(
                "gradients were made while InBackwardAdamW was not listening: run the backward"
                " within attached(), or make it with attach=True, and after all that it is to"
                " update has requires_grad"
            )
        self._finish()
        return loss

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        if not self._as_made or not weight.requires_grad:
            return False
        if dtype == weight.dtype or not supports_dtype(dtype):
            return False
        if not self._crowds:
            self._gather()
        return weight in self._places

    @torch.no_grad()
    def take(self, weight: Tensor, gradient: Tensor) -> None:
        if not self._begun:
            self._begin()
        if weight in self._handed:
            raise RuntimeError(
                "a weight got two gradients in one backward: with as_made each is used at once, so"
                " a weight may be in one product only"
            )
        self._handed.add(weight)
        self._update_by_kernel(weight, gradient)

    def beside(self, device: torch.device) -> SideStream | None:
        if not self._overlap or device.type != "cuda":
            return None
        if device not in self._beside:
            self._beside[device] = SideStream(device)
        return self._beside[device]

    def _finish(self) -> None:
        if self._begun:
            self._uncount_the_rest()
        for beside in self._beside.values():
            beside.join()
        self._begun = False

    def _uncount_the_rest(self) -> None:
        """All were counted with the first gradient, when nobody knew which would follow."""
        missed: dict[int, list[int]] = {}
        for parameter, (crowd, row) in self._places.items():
            if parameter not in self._reached:
                missed.setdefault(id(crowd), []).append(row)
        for crowd in self._crowds:
            rows = missed.get(id(crowd))
            if rows and crowd.beside is None:
                crowd.settings.uncount(rows)
            elif rows and crowd.beside is not None:
                crowd.beside.run(partial(crowd.settings.uncount, rows), None)

    def _forget_settings(self) -> None:
        self._crowds.clear()
        self._places.clear()

    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None and parameter.requires_grad
            for group in self.param_groups
            for parameter in group["params"]
        )

    def _listen_on(self, number: int) -> None:
        for parameter in self._trained(number):
            hook_for_life(self, parameter, _taking_from(number))

    def _listen(self, number: int) -> list[Any]:
        return [hook_of(self, one, _taking_from(number)) for one in self._trained(number)]

    def _trained(self, number: int) -> list[Tensor]:
        return [one for one in self.param_groups[number]["params"] if one.requires_grad]

    def _take(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self._begun:
            self._begin()
        if parameter in self._places and not gradient.is_sparse:
            self._update_by_kernel(parameter, gradient)
            return
        self.updated += 1
        beside = self.beside(parameter.device)
        if beside is not None:
            # The gradient may be made there.
            beside.join()
        self._update(parameter, gradient, group)

    def _update_by_kernel(self, parameter: Tensor, gradient: Tensor) -> None:
        self.updated += 1
        self._reached.add(parameter)
        crowd, row = self._places[parameter]
        state, copy = self._state_for_kernel(parameter), self._copy_of(parameter)
        updated, dense = self._updated(parameter), gradient.contiguous()

        def update() -> None:
            from stepscope.optim.triton_adamw import update_one

            mean, square = state["exp_avg"], state["exp_avg_sq"]
            update_one(updated, dense, mean, square, copy, crowd.settings.rows, row)

        if crowd.beside is None:
            update()
        else:
            crowd.beside.run(update, dense)

    def _begin(self) -> None:
        """Count the step; the first time, make the settings of all parameters."""
        if not self._crowds:
            self._gather()
        for crowd in self._crowds:
            if not _capturing(crowd.settings.rows.device):
                crowd.settings.follow(rules(crowd.groups))
            if crowd.beside is None:
                crowd.settings.advance()
            else:
                crowd.beside.run(crowd.settings.advance, None)
        self._begun, self.updated = True, 0
        self._handed.clear()
        self._reached.clear()

    def _gather(self) -> None:
        members: dict[torch.device, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if kernel_takes(parameter, parameter):
                    members.setdefault(parameter.device, []).append((parameter, group))
        for device, held in members.items():
            self._crowds.append(self._crowd(device, held))

    def _crowd(self, device: torch.device, members: list[tuple[Tensor, dict[str, Any]]]) -> Crowd:
        from stepscope.optim.device_settings import DeviceSettings

        if _capturing(device):
            raise RuntimeError("run a step before the capture: it makes the moments")
        groups = tuple(group for _, group in members)
        counts = [float(self._state_for_kernel(parameter)["step"]) for parameter, _ in members]
        settings = DeviceSettings(counts, rules(groups), device)
        crowd = Crowd(settings, groups, self.beside(device))
        for row, (parameter, _) in enumerate(members):
            self.state[parameter]["step"] = settings.steps[row]
            self._places[parameter] = (crowd, row)
        return crowd


def _taking_from(number: int) -> Callable[[InBackwardAdamW, Tensor], None]:
    """By the number of the group: loading a state makes new groups."""

    def take(optimizer: InBackwardAdamW, parameter: Tensor) -> None:
        if parameter.grad is None:
            # It was taken as it was made.
            return
        with torch.no_grad():
            optimizer._take(parameter, parameter.grad, optimizer.param_groups[number])
        parameter.grad = None

    return take


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
