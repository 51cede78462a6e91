"""State that a graph depends on: modules, optimizers, gradients and the host's random numbers.

A graph reads memory by address. Before each replay a snapshot checks that modules and optimizers
still have the same tensors at the same addresses, for a few microseconds per parameter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.graphs.optimizers import RefreshedControl, control_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class State:
    """The modules and optimizers that a function uses, and parameters of neither."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        parameters: Sequence[Tensor] = (),
    ) -> None:
        self._given = list(parameters)
        self.roots = _distinct(modules)
        self.modules = _distinct(module for root in self.roots for module in root.modules())
        self.controls = [control_of(optimizer) for optimizer in _distinct(optimizers)]
        of_modules = (p for module in self.modules for p in module._parameters.values())
        self.parameters: list[Tensor] = _distinct(
            [*(p for p in of_modules if p is not None), *self._of_optimizers(), *self._given]
        )

    def _of_optimizers(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [control.optimizer for control in self.controls]

    def has(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        parameters: Sequence[Tensor] = (),
    ) -> bool:
        return (
            _same(self.roots, modules)
            and _same(self.optimizers, optimizers)
            and _same(self._given, parameters)
        )

    def now(self) -> State:
        """Return the state with the present parts and parameters."""
        return State(self.roots, self.optimizers, self._given)

    def is_complete(self) -> bool:
        """Return whether modules and optimizers still have the same parts and parameters."""
        now = self.now()
        return _same(self.modules, now.modules) and _same(self.parameters, now.parameters)

    def modes(self) -> Hashable:
        """Return what of the modules and of torch selects other kernels."""
        return (
            tuple([module.training for module in self.modules]),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def devices(self) -> set[torch.device]:
        return {parameter.device for parameter in self.parameters}

    def versions(self) -> list[int]:
        """Return the version counters: they change with every write that torch sees."""
        return [0 if one.is_inference() else one._version for one in self.parameters]

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters]

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def constants(self) -> list[Any]:
        return [control.constants() for control in self.controls]

    def learning_rates(self) -> list[float]:
        """Return what a scheduler would change; a learning rate that is a tensor counts as zero."""
        return [
            0.0 if isinstance(group.get("lr"), Tensor) else float(group.get("lr", 0.0))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]

    @contextmanager
    def captured(self) -> Iterator[None]:
        with ExitStack() as stack:
            for control in self.controls:
                stack.enter_context(control.captured())
            yield

    @contextmanager
    def kept_optimizer_state(self) -> Iterator[None]:
        """Restore the optimizers' state if the body raises, and raise if it created state: a graph
        would create it again in every replay. Optimizers with `prepare()` do both themselves."""
        plain = [c.optimizer for c in self.controls if not isinstance(c, RefreshedControl)]
        before = [(opt, {p: dict(s) for p, s in opt.state.items()}) for opt in plain]
        try:
            yield
            for optimizer, states in before:
                if not _same_state(optimizer, states):
                    raise RuntimeError(
                        "the optimizer created state during the capture: parameters that had no"
                        " gradient in earlier steps have one now"
                    )
        except BaseException:
            for optimizer, states in before:
                for parameter in list(optimizer.state):
                    if parameter in states:
                        optimizer.state[parameter].clear()
                        optimizer.state[parameter].update(states[parameter])
                    else:
                        del optimizer.state[parameter]
            raise


class _Slot(NamedTuple):
    """An entry of a dictionary that has to stay the same object."""

    owner: dict[str, Any]
    name: str
    value: Any


class Snapshot:
    """Objects and addresses of a state at one time. It keeps all of them alive.

    The checks are flat lists, because they run before every replay.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._dicts = [part for module in state.modules for part in _dicts_of(module)]
        self._lengths = list(map(len, self._dicts))
        self._kinds = _kinds(state.modules)
        self._slots = [slot for module in state.modules for slot in _slots_of_module(module)]
        self._states = [
            (optimizer, optimizer.state, list(optimizer.state.items()))
            for optimizer in state.optimizers
        ]
        self._of_optimizers = [
            _Slot(values, name, value)
            for _, _, states in self._states
            for _, values in states
            for name, value in values.items()
        ]
        slots = (slot.value for slot in (*self._slots, *self._of_optimizers))
        self._tensors: list[Tensor] = _distinct(
            [*state.parameters, *(value for value in slots if isinstance(value, Tensor))]
        )
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._trained = [parameter.requires_grad for parameter in state.parameters]
        self._groups = [_groups(optimizer) for optimizer in state.optimizers]
        self._constants = state.constants()

    def difference(self) -> str | None:
        """Return what has changed; None if nothing has."""
        if [len(part) for part in self._dicts] != self._lengths:
            return "a module has other hooks, parameters, buffers or children"
        if _kinds(self._state.modules) != self._kinds:
            return "the class or the forward of a module was replaced"
        if _replaced(self._slots):
            return "a module has another parameter, buffer or child"
        if self._optimizers_changed():
            return "the optimizer has other parameters or other state"
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            return "a tensor of a module or of the optimizer has another address"
        if [parameter.requires_grad for parameter in self._state.parameters] != self._trained:
            return "requires_grad of a parameter changed"
        constants = self._state.constants()
        if constants != self._constants:
            names = ", ".join(_changed_names(self._constants, constants)) or "hyperparameters"
            return f"{names} of the optimizer changed, which is constant in a graph"
        return None

    def _optimizers_changed(self) -> bool:
        if [_groups(optimizer) for optimizer in self._state.optimizers] != self._groups:
            return True
        for optimizer, state, items in self._states:
            if optimizer.state is not state or len(state) != len(items):
                return True
            if any(state.get(parameter) is not values for parameter, values in items):
                return True
        return _replaced(self._of_optimizers)


def _replaced(slots: list[_Slot]) -> bool:
    return any(owner.get(name) is not value for owner, name, value in slots)


class HostRandom:
    """Random number generators of the host; a graph would repeat the numbers of its capture."""

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def was_used(self) -> bool:
        return (
            not torch.equal(self._torch, torch.default_generator.get_state())
            or self._python != random.getstate()
            or self._numpy != _numpy_state()
        )


def increment_versions(parameters: Sequence[Tensor]) -> None:
    """Record that the parameters were written by something that torch does not see."""
    if parameters:
        torch.autograd.graph.increment_version(parameters)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), rest


def _slots_of_module(module: nn.Module) -> Iterator[_Slot]:
    for owner in (module._parameters, module._buffers, module._modules):
        for name, value in owner.items():
            yield _Slot(owner, name, value)
    attributes = vars(module)
    for name, value in attributes.items():
        if isinstance(value, Tensor):
            yield _Slot(attributes, name, value)


def _dicts_of(module: nn.Module) -> list[Any]:
    attributes = vars(module)
    hooks = [attributes[name] for name in _HOOKS if name in attributes]
    return [module._parameters, module._buffers, module._modules, *hooks]


def _kinds(modules: Sequence[nn.Module]) -> list[tuple[Any, Any]]:
    return [(type(module), module.__dict__.get("forward")) for module in modules]


def _groups(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _same_state(optimizer: Optimizer, states: dict[Tensor, dict[str, Any]]) -> bool:
    return optimizer.state.keys() == states.keys() and all(
        values.keys() == states[parameter].keys()
        and all(values[name] is states[parameter][name] for name in values)
        for parameter, values in optimizer.state.items()
    )


def _changed_names(before: list[Any], after: list[Any]) -> list[str]:
    """Name the hyperparameters that differ, without repetition."""

    def entries(constants: list[Any]) -> list[Any]:
        return [entry for control in constants for group in control for entry in group or ()]

    pairs = zip(entries(before), entries(after), strict=False)
    changed = (b for a, b in pairs if a != b and isinstance(b, tuple))
    return list(dict.fromkeys(str(name) for name, _ in changed))


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
