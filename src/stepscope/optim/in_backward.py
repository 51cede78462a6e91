"""Optimizer-in-backward: AdamW updates each parameter as soon as its gradient is ready.

An update is bound by memory and a matmul by compute, so on a GPU they overlap: updates run on a
side stream. A gradient is freed after its update, so all gradients are never in memory at once.

With `low_precision_grads`, fused projections pass gradients in the matmul dtype. Under bfloat16
autocast these are the values of torch's gradients, which are rounded to bfloat16 before they are
widened, in half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stepscope.optim.fused import FusedAdamW
from stepscope.optim.launches import Copies, kernel_takes, rules
from stepscope.torch_tools.gradient_hooks import count_readers, hook_for_life, hook_of
from stepscope.torch_tools.side_stream import AsyncTensor, SideStream, offered
from stepscope.torch_tools.triton_available import supports_dtype

if TYPE_CHECKING:
    from stepscope.optim.device_settings import DeviceSettings


class DeviceParameters(NamedTuple):
    """The parameters of one device that the kernel supports."""

    settings: DeviceSettings
    groups: tuple[dict[str, Any], ...]
    """Parameter group of each row of the settings."""
    side_stream: SideStream | None


class InBackwardAdamW(FusedAdamW):
    """AdamW that updates each parameter during the backward pass, as soon as its gradient is ready.

        optimizer = InBackwardAdamW(model.parameters(), lr=3e-4)
        loss.backward()
        optimizer.step()  # waits for the updates, on the device

    Clipping by global norm, accumulation over several backward passes and loss scaling that skips
    steps do not work with it: they need all gradients at once.

    `copies` and `master` are those of `FusedAdamW`. `overlap=False` updates on the stream of the
    backward pass instead of a side stream. With `attach=False` gradient hooks are installed only
    within `attached()`, so that several optimizers can alternate on the same parameters.
    `low_precision_grads` takes gradients in the dtype of the matmuls and needs `attach=False`.
    After a backward pass that raises outside of `attached()`, `step()` ends the step: the
    parameters it reached are updated.
    """

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
        low_precision_grads: bool = False,
        master: bool = False,
    ) -> None:
        if low_precision_grads and attach:
            raise ValueError("low_precision_grads works only within attached(): pass attach=False")
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=True, copies=copies, master=master
        )
        self._overlap = overlap
        self._low_precision_grads = low_precision_grads
        self._attach = attach
        self._install_hooks()

    _COPIED_ATTRIBUTES = (
        *FusedAdamW._COPIED_ATTRIBUTES,
        "_overlap",
        "_low_precision_grads",
        "_attach",
    )

    def __setstate__(self, state: dict[str, Any]) -> None:
        copied = "_launches" not in self.__dict__
        super().__setstate__(state)
        if copied:
            self._install_hooks()

    def _reset_caches(self) -> None:
        super()._reset_caches()
        self._side_streams: dict[torch.device, SideStream] = {}
        self._per_device: list[DeviceParameters] = []
        self._rows: dict[Tensor, tuple[DeviceParameters, int]] = {}
        self._in_step = False
        self._consumed: set[Tensor] = set()
        self._reached: set[Tensor] = set()
        self._overlapped: set[Tensor] = set()
        self._read_by_others: set[Tensor] = set()
        self.updated = 0
        """Number of parameters that the last backward updated."""

    def _install_hooks(self) -> None:
        if self._attach:
            for number in range(len(self.param_groups)):
                self._install_lasting_hooks(number)

    @property
    def attaches(self) -> bool:
        """True if every backward updates, not only those within `attached()`."""
        return self._attach

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Update in backwards within the context. Gradients that only the updates read are computed
        on the side stream. If a backward raises, the parameters it reached are updated and the
        others are not; the next one is a new step."""
        groups = range(len(self.param_groups))
        handles = [handle for number in groups for handle in self._install_removable_hooks(number)]
        try:
            with offered(self):
                yield
        except BaseException:
            self._end_step()
            raise
        finally:
            for handle in handles:
                handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        # The base class adds the first groups before this class is initialized.
        if getattr(self, "_attach", False):
            self._install_lasting_hooks(len(self.param_groups) - 1)
        if getattr(self, "_per_device", None):
            self._forget_settings()

    def prepare(self) -> None:
        """Do nothing: a captured backward includes its updates."""

    def refresh(self) -> None:
        for on_device in self._per_device:
            on_device.settings.set_rules(rules(on_device.groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # The step counts have changed.
        self._forget_settings()

    def _step(self) -> None:
        """Make the current stream wait until all updates of this backward are done."""
        if self._has_gradients():
            self._end_step()
            raise RuntimeError(
                "there are gradients that InBackwardAdamW did not see: run the backward within"
                " attached(), or create the optimizer with attach=True, after every parameter that"
                " it updates has requires_grad=True"
            )
        self._end_step()

    def abandon_step(self) -> None:
        """Forget a step whose capture as a CUDA graph failed: nothing of it has run."""
        self._in_step = False
        self._overlapped.clear()
        for side_stream in self._side_streams.values():
            side_stream.abandon()

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        if not self._low_precision_grads or not weight.requires_grad:
            return False
        if dtype == weight.dtype or not supports_dtype(dtype):
            return False
        if not self._per_device:
            self._group_by_device()
        return weight in self._rows

    @torch.no_grad()
    def take(self, weight: Tensor, gradient: Tensor) -> None:
        if not self._in_step:
            self._begin_step()
        if weight in self._consumed:
            raise RuntimeError(
                "a weight received two gradients in one backward: with low_precision_grads each is"
                " applied immediately, so a weight may be used by one matmul only"
            )
        self._consumed.add(weight)
        self._update_by_kernel(weight, gradient)

    def side_stream(self, device: torch.device) -> SideStream | None:
        if not self._overlap or device.type != "cuda":
            return None
        if device not in self._side_streams:
            self._side_streams[device] = SideStream(device)
        return self._side_streams[device]

    def gradient_stream(self, parameters: Sequence[Tensor]) -> SideStream | None:
        side_stream = self.side_stream(parameters[0].device)
        if side_stream is None:
            return None
        if not self._per_device:
            self._group_by_device()
        if not all(self._is_only_reader(parameter) for parameter in parameters):
            return None
        self._overlapped.update(parameters)
        return side_stream

    def _is_only_reader(self, parameter: Tensor) -> bool:
        """Return whether only the update is expected to read the gradient. For any other reader the
        main stream waits, and with it for all updates before."""
        return (
            parameter in self._rows
            and parameter not in self._read_by_others
            and parameter.grad is None
            and count_readers(parameter) == 1
        )

    def _end_step(self) -> None:
        if self._in_step:
            self._revert_unreached()
        for side_stream in self._side_streams.values():
            side_stream.join()
        self._overlapped.clear()
        self._in_step = False

    def _revert_unreached(self) -> None:
        """Revert the step count of parameters without a gradient: the first gradient of the
        backward advances all counts, before it is known which will follow."""
        missed: dict[int, list[int]] = {}
        for parameter, (on_device, row) in self._rows.items():
            if parameter not in self._reached:
                missed.setdefault(id(on_device), []).append(row)
        for on_device in self._per_device:
            rows = missed.get(id(on_device))
            if rows and on_device.side_stream is None:
                on_device.settings.revert(rows)
            elif rows and on_device.side_stream is not None:
                on_device.side_stream.run(partial(on_device.settings.revert, rows), None)

    def _forget_settings(self) -> None:
        self._per_device.clear()
        self._rows.clear()

    def _has_gradients(self) -> bool:
        return any(
            parameter.grad is not None and parameter.requires_grad
            for group in self.param_groups
            for parameter in group["params"]
        )

    def _install_lasting_hooks(self, number: int) -> None:
        for parameter in self._trained(number):
            hook_for_life(self, parameter, _hook_of_group(number))

    def _install_removable_hooks(self, number: int) -> list[Any]:
        return [hook_of(self, one, _hook_of_group(number)) for one in self._trained(number)]

    def _trained(self, number: int) -> list[Tensor]:
        return [one for one in self.param_groups[number]["params"] if one.requires_grad]

    def _take(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if not self._in_step:
            self._begin_step()
        by_kernel = parameter in self._rows and not gradient.is_sparse
        if isinstance(gradient, AsyncTensor):
            on_device = self._rows[parameter][0] if by_kernel else None
            gradient = gradient.read_on(None if on_device is None else on_device.side_stream)
        elif parameter in self._overlapped:
            # The main stream has waited: its gradient is a sum, or a hook has replaced it.
            self._read_by_others.add(parameter)
        if by_kernel:
            self._update_by_kernel(parameter, gradient)
            return
        self.updated += 1
        self._update(parameter, gradient, group)

    def _update_by_kernel(self, parameter: Tensor, gradient: Tensor) -> None:
        self.updated += 1
        self._reached.add(parameter)
        on_device, row = self._rows[parameter]
        dense = gradient.contiguous().resolve_neg()
        update = self._tensor_update(parameter, dense, on_device.groups[row])
        self._launches.mark_written(update)

        def run() -> None:
            from stepscope.optim.triton_adamw import update_one

            parameter, gradient, mean, square, copy = update[1:6]
            rows = on_device.settings.rows
            update_one(parameter, gradient, mean, square, copy, rows, row, update.amax)

        if on_device.side_stream is None:
            run()
        else:
            on_device.side_stream.run(run, dense)

    def _begin_step(self) -> None:
        """Count the step; the first time, create the settings of all parameters."""
        if not self._per_device:
            self._group_by_device()
        for on_device in self._per_device:
            if not _capturing(on_device.settings.rows.device):
                on_device.settings.set_rules(rules(on_device.groups))
            if on_device.side_stream is None:
                on_device.settings.advance()
            else:
                on_device.side_stream.run(on_device.settings.advance, None)
        self._in_step, self.updated = True, 0
        self._consumed.clear()
        self._reached.clear()

    def _group_by_device(self) -> None:
        members: dict[torch.device, list[tuple[Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and kernel_takes(parameter, parameter):
                    members.setdefault(parameter.device, []).append((parameter, group))
        for device, of_device in members.items():
            self._per_device.append(self._create_device_parameters(device, of_device))

    def _create_device_parameters(
        self, device: torch.device, members: list[tuple[Tensor, dict[str, Any]]]
    ) -> DeviceParameters:
        from stepscope.optim.device_settings import DeviceSettings

        if _capturing(device):
            raise RuntimeError("run a step before the capture: it allocates the moments")
        groups = tuple(group for _, group in members)
        counts = [float(self._state_for_kernel(parameter)["step"]) for parameter, _ in members]
        settings = DeviceSettings(counts, rules(groups), device)
        on_device = DeviceParameters(settings, groups, self.side_stream(device))
        for row, (parameter, _) in enumerate(members):
            self.state[parameter]["step"] = settings.steps[row]
            self._rows[parameter] = (on_device, row)
        return on_device


def _hook_of_group(number: int) -> Callable[[InBackwardAdamW, Tensor], None]:
    """Return the hook of a group. It looks the group up by number: load_state_dict creates new
    groups."""

    def take(optimizer: InBackwardAdamW, parameter: Tensor) -> None:
        if parameter.grad is None:
            # It was consumed in the matmul dtype.
            return
        with torch.no_grad():
            optimizer._take(parameter, parameter.grad, optimizer.param_groups[number])
        parameter.grad = None

    return take


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
