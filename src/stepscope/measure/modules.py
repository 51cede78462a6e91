"""Find the models that a program trains, and put named profiler ranges around their modules."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from stepscope.measure.hooks import around_calls
from stepscope.torch_tools.module_hooks import OptionalHook

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Attributes of the wrapped module in torch.compile, DDP and FSDP."""
_NO_BACKWARD = -1
_NOT_OF_THE_PROGRAM = ("stepscope.", "torch.")


def trained_models(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """Return the outermost live modules that contain one of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    # `isinstance` would read `__class__`, which makes some lazy objects emit a warning.
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    containing = [m for m in alive if _contains(m, wanted)]
    inside = {id(part) for module in containing for part in module.modules() if part is not module}
    return [module for module in containing if id(module) not in inside]


def _contains(module: torch.nn.Module, wanted: set[int]) -> bool:
    try:
        return any(id(parameter) in wanted for parameter in module.parameters())
    except Exception:
        # Partially constructed, or with another meaning of `parameters`: not a trained model.
        return False


def model_names(models: Sequence[torch.nn.Module]) -> list[str]:
    """Names that distinguish the models: empty for a single model, else the class name. Models of
    the same class also get the name of the program's variable, or a number."""
    if len(models) < 2:
        return [""] * len(models)
    kinds = [type(_unwrapped(model)).__name__ for model in models]
    variable_names = _variable_names(models)
    names: list[str] = []
    for model, kind in zip(models, kinds, strict=True):
        name = (
            kind
            if kinds.count(kind) == 1
            else f"{kind} {variable_names.get(id(model), '')}".strip()
        )
        alike = sum(other.partition(" #")[0] == name for other in names)
        names.append(f"{name} #{alike + 1}" if alike else name)
    return names


def _variable_names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Variable names of the models in the functions on the stack and in the attributes of their
    `self`. The outermost function decides: in inner functions every model is called `model`."""
    wanted = {id(model) for model in models}
    names: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_OF_THE_PROGRAM):
            variables = dict(frame.f_locals)
            owner = variables.pop("self", None)
            entries = (*variables.items(), *getattr(owner, "__dict__", {}).items())
            # The first name in each function wins.
            names |= {id(value): name for name, value in reversed(entries) if id(value) in wanted}
        frame = frame.f_back
    return names


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if calling the module runs code of torch.compile."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def any_compiled(models: Sequence[torch.nn.Module]) -> bool:
    return any(is_compiled(part) for model in models for part in model.modules())


class ModuleRanges:
    """Puts a range around every module call: `forward` around the outermost, module names inside.

    Modules inside compiled code are not hooked, since a hook would trigger recompilation. A
    compiled module gets one range around its call if it can be hooked from outside.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], called: Sequence[torch.nn.Module] | None = None
    ) -> None:
        self._models = models
        self._outermost = {id(module) for module in (models if called is None else called)}
        self._here = threading.local()
        self._calls: list[Counter[int]] = [Counter() for _ in models]
        self.evaluations = 0
        """Calls of a full model with gradients disabled."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, name in enumerate(model_names(self._models)):
                for handle in self._hook(index, name):
                    stack.callback(handle.remove)
            try:
                yield
            finally:
                while self._open():
                    self._leave()

    @property
    def forwards(self) -> int:
        """Calls with gradients enabled: the minimum over the models that were called. For a model
        whose parts are called but never the model itself, the minimum over these parts."""
        counts = (
            times.get(id(model)) or min(times.values(), default=0)
            for model, times in zip(self._models, self._calls, strict=True)
        )
        return min(filter(None, counts), default=0)

    def forget_calls(self) -> None:
        """Reset the counts of calls."""
        for times in self._calls:
            times.clear()

    def _hook(self, index: int, name: str) -> Iterator[Any]:
        model = self._models[index]
        for part, words in _hookable(model):
            own = ".".join(words)

            def enter(*_: Any, part: torch.nn.Module = part, own: str = own) -> None:
                outermost = id(part) in self._outermost and not self._open()
                # A module that runs inside the backward pass is being recomputed.
                if (outermost or part is model) and not _in_backward():
                    self._count(index, part)
                around = ("forward" if outermost else "", name if outermost or not own else "")
                self._enter([word for word in (*around, own) if word])

            yield from around_calls(part, enter, self._leave)

    def _count(self, index: int, part: torch.nn.Module) -> None:
        if torch.is_grad_enabled():
            self._calls[index][id(part)] += 1
        else:
            self.evaluations += 1

    def _enter(self, names: Sequence[str]) -> None:
        opened = [record_function(name) for name in names]
        for range_ in opened:
            range_.__enter__()  # type: ignore[no-untyped-call]
        self._open().append(opened)

    def _leave(self, *_: Any) -> None:
        for opened in reversed(self._open().pop() if self._open() else []):
            opened.__exit__(None, None, None)

    def _open(self) -> list[list[record_function]]:
        """Open ranges of this thread; a model may run in several threads."""
        ranges: list[list[record_function]] = self._here.__dict__.setdefault("open", [])
        return ranges


class OutermostCalls:
    """Finds the modules that a program calls directly, as opposed to those that a module calls: a
    model may be a container whose parts are called, or be called through another method.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._seen: dict[torch.nn.Module, None] = {}

    def of(self, models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Directly called modules of each model, or the model itself if no call was seen."""
        within = [[part for part in model.modules() if part in self._seen] for model in models]
        return [
            part for model, seen in zip(models, within, strict=True) for part in seen or [model]
        ]

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Record calls with gradients enabled."""
        parts = [part for model in self._models for part, _ in _hookable(model)]

        def note(part: torch.nn.Module) -> None:
            if torch.is_grad_enabled() and not _in_backward():
                self._seen.setdefault(part)

        with hooked_calls(parts, lambda part, *_: note(part), lambda *_: None):
            yield


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def _hookable(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, tuple[str, ...]]]:
    """Yield the model with an empty name and its submodules with their names, except modules that
    are compiled in place."""
    seen: set[int] = set()
    for part, words in ((model, ()), *_called_parts(model, ())):
        if id(part) not in seen and not _compiled_in_place(part):
            seen.add(id(part))
            yield part, words


def _called_parts(
    module: torch.nn.Module, words: tuple[str, ...]
) -> Iterator[tuple[torch.nn.Module, tuple[str, ...]]]:
    """Yield every submodule with its name relative to the enclosing module that is called.

    Containers are never called: their name becomes part of their children's names. The submodules
    of a compiled module are skipped.
    """
    if is_compiled(module):
        return
    for name, part in named_parts(module):
        if name in _WRAPPERS and not words:
            yield from _called_parts(part, ())
            continue
        if isinstance(part, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _called_parts(part, (*words, name))
            continue
        yield part, (*words, name)
        yield from _called_parts(part, ())


def named_parts(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the children with their names; the index in a Sequential of different classes is
    followed by the class name."""
    children = dict(module.named_children())
    mixed = isinstance(module, torch.nn.Sequential) and len(set(map(type, children.values()))) > 1
    for name, part in children.items():
        yield (f"{name} {type(part).__name__}" if mixed and name.isdigit() else name), part


def all_named_parts(
    module: torch.nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Like `Module.named_modules`, with the names of `named_parts`."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, part in named_parts(module):
        yield from all_named_parts(part, f"{path}.{name}" if path else name, seen)


def hooked_roots(models: Sequence[torch.nn.Module], enter: Any, leave: Any) -> ExitStack | None:
    """Call `enter` before and `leave` after each call of a model, until the stack is closed. Return
    None if a model is compiled in place and therefore calls no hooks."""
    if not models or any(_compiled_in_place(model) for model in models):
        return None
    return hooked_calls(models, enter, leave)


def before_calls(models: Sequence[torch.nn.Module], enter: Callable[..., None]) -> list[Any]:
    """Call `enter` before each call of a model that is not compiled code; return handles."""
    hooked = (model for model in models if not _compiled_in_place(model))
    return [model.register_forward_pre_hook(OptionalHook(enter), prepend=True) for model in hooked]


def hooked_calls(modules: Sequence[torch.nn.Module], enter: Any, leave: Any) -> ExitStack:
    """Call `enter` before and `leave` after the outermost calls of these modules, until the stack
    is closed."""
    here = threading.local()

    def enter_first(*given: Any) -> None:
        here.depth = getattr(here, "depth", 0) + 1
        if here.depth == 1:
            enter(*given)

    def leave_last(*given: Any) -> None:
        # The call may have begun before the hooks were registered.
        here.depth = max(0, getattr(here, "depth", 0) - 1)
        if here.depth == 0:
            leave(*given)

    stack = ExitStack()
    for module in modules:
        for handle in around_calls(module, enter_first, leave_last):
            stack.callback(handle.remove)
    return stack


def _compiled_in_place(module: torch.nn.Module) -> bool:
    """Return True if hooks are part of the compiled code; a new hook would recompile the module."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    for name in _WRAPPERS:
        inner = module._modules.get(name)
        if isinstance(inner, torch.nn.Module):
            return _unwrapped(inner)
    return module
