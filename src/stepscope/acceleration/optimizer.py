"""Makes the update of a live `torch.optim.AdamW` or `Adam` one fused launch, in place.

`torch.optim.Adam.step` collects the tensors of each group with `_init_group` and passes them to one
of torch's implementations. Here `_init_group` is replaced on the instance: it takes out what the
kernel supports, and after the last group one launch updates all of it. torch updates the rest.
`step` itself is not replaced, so schedulers, hooks, closures, gradient scalers and wrappers that
hold a reference to it work as before; so do `param_groups`, `defaults` and the state, whose keys,
dtypes and devices are torch's. A copy made by `deepcopy` or pickle is an ordinary torch optimizer.

    fused = fuse_optimizer(optimizer)  # a string says why not
    optimizer.prepare()                # before a capture of `optimizer.step()`
    optimizer.refresh()                # after a change of the learning rate, between two replays
    fused.undo()
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim.launches import FusedLaunches, TensorUpdate, kernel_takes
from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.lasting_memory import LastingMemory

_HEALTH_CHECKS = (
    "_accelerator_graph_capture_health_check",
    "_cuda_graph_capture_health_check",
)
"""Method that refuses a capture with `capturable=False`; the name depends on torch's version."""
_AMP_SCALING = "_step_supports_amp_scaling"
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")


class _Scaling(NamedTuple):
    """Attributes that a `GradScaler` sets on an optimizer that unscales and skips by itself."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def fuse_optimizer(optimizer: Any, copies: WeightCopies | None = None) -> FusedUpdate | str:
    """Fuse the update of a `torch.optim.AdamW` or `Adam` in place; return the reason as a string if
    that is not possible. Wrappers of Hugging Face Accelerate and Lightning are unwrapped. Copies of
    weights in `copies` are written together with the weights."""
    inner = _unwrapped(optimizer)
    reason = why_not_fused(inner)
    return FusedUpdate(inner, copies) if reason is None else reason


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer within wrappers: Accelerate's has `optimizer`, Lightning's
    `_optimizer`."""
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, "__dict__", {}).get(name)
        if isinstance(inner, Optimizer):
            return _unwrapped(inner)
    return optimizer


def why_not_fused(optimizer: Any) -> str | None:
    """Return why the update of an optimizer cannot be fused; None if it can."""
    if reason := why_not_on_a_gpu(optimizer):
        return reason
    fused = (
        _local(parameter) is not None and kernel_takes(_local(parameter), _local(parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if _reason_of_group(group, optimizer) is None
    )
    return None if any(fused) else "no parameter is a dense 16-bit or 32-bit tensor on a GPU"


def why_not_on_a_gpu(optimizer: Any) -> str | None:
    """Return why the update could not be fused if the parameters were on a GPU; None if it
    could."""
    kind = type(optimizer)
    if not isinstance(optimizer, Adam):
        return f"{kind.__name__} is not torch.optim.AdamW or Adam"
    own = [
        name
        for name in ("step", "_init_group")
        if inspect.unwrap(getattr(kind, name)) is not inspect.unwrap(getattr(Adam, name))
    ]
    if own:
        return f"{kind.__name__} has its own {' and '.join(own)}()"
    if "_init_group" in vars(optimizer):
        return "its update is already replaced"
    reasons = {_reason_of_group(group, optimizer) for group in optimizer.param_groups}
    return None if None in reasons else "; ".join(sorted(filter(None, reasons)))


def _reason_of_group(group: dict[str, Any], optimizer: Adam) -> str | None:
    """Return why torch updates a group itself."""
    for option in _UNSUPPORTED:
        if group.get(option):
            return f"{option}=True"
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
    if not decoupled and float(group["weight_decay"]) != 0:
        return "Adam's weight_decay is an L2 penalty, not AdamW's decay"
    for value in (group["lr"], *group["betas"]):
        # A captured step reads it there, and a step would wait for the device to read it here.
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return "the learning rate or a beta is a tensor on the GPU"
    return None


class FusedUpdate:
    """The fused update of one optimizer, until `undo()`.

    `optimizer.prepare()` moves the step counts to the device, so that `optimizer.step()` can be
    captured, and makes the optimizer take `grad_scale` and `found_inf` of a `GradScaler`.
    `state_dict()` has them where torch has them, at any time.
    """

    def __init__(self, optimizer: Adam, copies: WeightCopies | None) -> None:
        self.optimizer = optimizer
        self.copies = copies
        self._launches = FusedLaunches(copies)
        self._memory = LastingMemory()
        self._torch_init_group: Callable[..., Any] = optimizer._init_group
        self._pending: list[TensorUpdate] = []
        self._scaling = _Scaling()
        self._prepared = False
        self._captured_by_torch = False
        self._amp_scaling = vars(optimizer).get(_AMP_SCALING)
        self._handles = [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._with_counts_of_torch),
        ]
        self._attributes: dict[str, Any] = {
            "_init_group": self._init_group,
            "prepare": self.prepare,
            "refresh": self.refresh,
        }
        for name in _HEALTH_CHECKS:
            if hasattr(optimizer, name):
                self._attributes[name] = self._checked(getattr(optimizer, name))
        vars(optimizer).update(self._attributes)

    @property
    def left(self) -> tuple[str, ...]:
        """Reasons for which torch updates some of the parameter groups."""
        reasons = (_reason_of_group(group, self.optimizer) for group in self._groups)
        return tuple(dict.fromkeys(reason for reason in reasons if reason))

    @torch.no_grad()
    def prepare(self) -> None:
        """Create what a captured step reads for the current gradients, without an update."""
        updates = []
        for group in self._groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._with_states(group, *lists)
            taken = self._taken(group, lists)
            if not group["capturable"]:
                _refuse_rest(group, lists[0], self.optimizer)
            updates += taken
        self._launches.prepare(updates)
        self._prepared = True
        setattr(self.optimizer, _AMP_SCALING, True)

    def refresh(self) -> None:
        """Copy the hyperparameters of the groups into the settings that a captured step reads."""
        self._launches.refresh()

    def undo(self) -> None:
        """Restore the optimizer. Captured steps are no longer valid."""
        for name, value in self._attributes.items():
            if vars(self.optimizer).get(name) == value:
                delattr(self.optimizer, name)
        for handle in self._handles:
            handle.remove()
        if self._prepared:
            delattr(self.optimizer, _AMP_SCALING)
            if self._amp_scaling is not None:
                setattr(self.optimizer, _AMP_SCALING, self._amp_scaling)
        for group in self._groups:
            if not _has_device_counts(group):
                for parameter in group["params"]:
                    state = self.optimizer.state.get(parameter)
                    if state:
                        state["step"] = _host_count(state["step"])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        """Collect the tensors of a group as torch does; keep those that the kernel updates, and
        launch it after the last group."""
        if _is_traced():
            return self._torch_init_group(group, *lists)
        result = self._with_states(group, *lists)
        if group is self._groups[0]:
            self._begin()
        if is_capturing() and not self._prepared:
            # torch's update can be captured with any gradients.
            self._captured_by_torch = True
            return result
        self._pending += self._taken(group, lists)
        if is_capturing() and not group["capturable"]:
            _refuse_rest(group, lists[0], self.optimizer)
        if not group["fused"]:
            self._scale_rest(lists)
        if group is self._groups[-1]:
            self._finish()
        return result

    def _with_states(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        """Collect the tensors of a group as torch does, which creates states that are missing."""
        device = next((x.device for x in group["params"]), torch.device("cpu"))
        with self._memory.allocations(device):
            return self._torch_init_group(group, *lists)

    def _taken(self, group: dict[str, Any], lists: Sequence[list[Tensor]]) -> list[TensorUpdate]:
        """Return the updates of the kernel, and remove them from the lists."""
        if _reason_of_group(group, self.optimizer) is not None:
            return []
        taken, rest = [], []
        for index, (parameter, gradient) in enumerate(zip(*lists[:2], strict=True)):
            update = self._update_of(parameter, gradient, group)
            if update is None:
                rest.append(index)
            else:
                taken.append(update)
        for values in lists:
            # There is a list for amsgrad, which is empty.
            if values:
                values[:] = [values[index] for index in rest]
        return taken

    def _update_of(
        self, weight: Tensor, gradient: Tensor, group: dict[str, Any]
    ) -> TensorUpdate | None:
        state: dict[str, Tensor] = self.optimizer.state[weight]
        tensors = (weight, gradient, state["exp_avg"], state["exp_avg_sq"])
        locals_ = [_local(tensor) for tensor in tensors]
        parameter, gradient_here, mean, square = locals_
        if parameter is None or gradient_here is None or mean is None or square is None:
            return None
        if len({_layout_of(tensor) for tensor in tensors}) > 1 or mean.dtype != square.dtype:
            return None
        if not all(kernel_takes(parameter, other) for other in (gradient_here, mean, square)):
            return None
        copy = self._launches.copy_of(weight)
        if copy is not None and copy.shape != parameter.shape:
            copy = None
        keeps_count = _has_device_counts(group) or not state["step"].is_cpu
        return TensorUpdate(
            weight,
            parameter,
            gradient_here,
            mean,
            square,
            copy,
            state,
            group,
            self._launches.amax_of(weight, parameter),
            keeps_count,
        )

    def _begin(self) -> None:
        self._pending = []
        self._scaling = _Scaling(
            getattr(self.optimizer, "grad_scale", None), getattr(self.optimizer, "found_inf", None)
        )

    def _scale_rest(self, lists: Sequence[list[Tensor]]) -> None:
        """Unscale or skip what torch updates in a group without `fused`: its implementations
        refuse `grad_scale` and `found_inf`."""
        if self._scaling == _Scaling():
            return
        if lists[0] and self._skips():
            for values in lists:
                values.clear()
        self._unscale(lists[1])
        self._set_scaling(_Scaling())

    def _set_scaling(self, scaling: _Scaling) -> None:
        for name, value in scaling._asdict().items():
            if hasattr(self.optimizer, name):
                setattr(self.optimizer, name, value)

    def _skips(self) -> bool:
        found = self._scaling.found_inf
        return found is not None and bool(found.item())

    def _unscale(self, gradients: Sequence[Tensor]) -> None:
        scale = self._scaling.grad_scale
        if scale is None:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, _), together in alike.items():
            inverse = scale.double().reciprocal().float().to(device)
            unused = torch.zeros_like(inverse)
            torch._amp_foreach_non_finite_check_and_unscale_(together, unused, inverse)

    def _finish(self) -> None:
        """Launch the update of all groups."""
        updates, self._pending = self._pending, []
        self._unscale([update.gradient for update in updates])
        on_host = [update for update in updates if not self._counts_on_device(update)]
        on_device = [update for update in updates if self._counts_on_device(update)]
        if on_host and not self._skips():
            self._launches.update_with_host_counts(on_host)
        self._launches.update_with_device_counts(on_device, self._scaling.found_inf)

    def _counts_on_device(self, update: TensorUpdate) -> bool:
        return self._prepared or update.keeps_count

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        del optimizer
        self._set_scaling(self._scaling)
        self._scaling = _Scaling()
        if self._captured_by_torch:
            self._captured_by_torch = False
            if self.copies is not None:
                # Replays change the weights without their version counters.
                self.copies.refresh(all_of_them=True)

    def _checked(self, check: Any) -> Any:
        """Return torch's check of a capture, which passes if the step counts are on the device."""

        def check_unless_prepared() -> None:
            if not self._prepared:
                check()

        return check_unless_prepared

    def _with_counts_of_torch(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state with step counts on the host where torch has them there."""
        del optimizer
        state = dict(state_dict["state"])
        for index in _indices_with_host_counts(state_dict["param_groups"]):
            if index in state:
                state[index] = state[index] | {"step": _host_count(state[index]["step"])}
        return state_dict | {"state": state}


def _indices_with_host_counts(groups: list[dict[str, Any]]) -> Iterator[int]:
    for group in groups:
        if not _has_device_counts(group):
            yield from group["params"]


def _has_device_counts(group: dict[str, Any]) -> bool:
    """Return whether torch keeps the step counts of a group on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _host_count(steps: Tensor) -> Tensor:
    wide = torch.get_default_dtype() == torch.float64
    return steps.detach().to("cpu", torch.float64 if wide else torch.float32, copy=True)


def _local(tensor: Tensor) -> Any:
    """Return the memory that an update of this tensor changes: of a DTensor, the local shard. None
    for other subclasses."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    if _is_dtensor(tensor):
        local = tensor._local_tensor  # type: ignore[attr-defined]
        return local if type(local) is Tensor else None
    return None


def _layout_of(tensor: Tensor) -> Any:
    """Return how a DTensor is sharded; None for other tensors."""
    return tensor.placements if _is_dtensor(tensor) else None  # type: ignore[attr-defined]


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _refuse_rest(group: dict[str, Any], rest: list[Tensor], optimizer: Adam) -> None:
    if rest:
        reason = _reason_of_group(group, optimizer) or (
            f"{rest[0].dtype} on {rest[0].device} or its gradient is not supported"
        )
        raise RuntimeError(f"this update cannot be captured: {reason}")


def _is_traced() -> bool:
    """Return whether torch.compile traces the step: it runs `_init_group` once, and compiles the
    update of what that returns."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
