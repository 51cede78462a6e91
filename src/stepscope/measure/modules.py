"""Which models a program trains, and named ranges around their parts while it is recorded."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from stepscope.measure.hooks import around_calls

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")
"""Attributes by which torch.compile, DDP and FSDP hold the module that they wrap."""
_NO_BACKWARD = -1
_NOT_OF_THE_PROGRAM = ("stepscope.", "torch.")


def trained_models(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The outermost modules alive that hold one of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    # `isinstance` would ask objects for their class, and lazy ones answer with a warning.
    alive = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
    holding = [m for m in alive if _holds(m, wanted)]
    inside = {id(part) for module in holding for part in module.modules() if part is not module}
    return [module for module in holding if id(module) not in inside]


def _holds(module: torch.nn.Module, wanted: set[int]) -> bool:
    try:
        return any(id(parameter) in wanted for parameter in module.parameters())
    except Exception:
        # Made halfway, or with `parameters` of its own: then it is not what is trained.
        return False


def model_names(models: Sequence[torch.nn.Module]) -> list[str]:
    """Words that tell models apart: none for one alone, or their classes. Where several have the
    same class, what the program calls them as well, or their number."""
    if len(models) < 2:
        return [""] * len(models)
    kinds = [type(_unwrapped(model)).__name__ for model in models]
    called = _called(models)
    names: list[str] = []
    for model, kind in zip(models, kinds, strict=True):
        name = kind if kinds.count(kind) == 1 else f"{kind} {called.get(id(model), '')}".strip()
        alike = sum(other.partition(" #")[0] == name for other in names)
        names.append(f"{name} #{alike + 1}" if alike else name)
    return names


def _called(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Their variables in the functions that are under way, and attributes of what these are
    methods of. The outermost function decides: further in, all are called `model`."""
    wanted = {id(model) for model in models}
    found: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_NOT_OF_THE_PROGRAM):
            variables = dict(frame.f_locals)
            owner = variables.pop("self", None)
            held = (*variables.items(), *getattr(owner, "__dict__", {}).items())
            # In each the name that came first.
            found |= {id(value): name for name, value in reversed(held) if id(value) in wanted}
        frame = frame.f_back
    return found


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling it runs what torch.compile made of it."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def any_compiled(models: Sequence[torch.nn.Module]) -> bool:
    return any(is_compiled(part) for model in models for part in model.modules())


class ModuleRanges:
    """A range around every call of a module: `forward` around the outermost, names within it.

    What torch.compile runs is left alone, so that nothing is compiled again: a compiled module as a
    whole has a range where it can have one from outside.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], called: Sequence[torch.nn.Module] | None = None
    ) -> None:
        self._models = models
        self._outermost = {id(module) for module in (models if called is None else called)}
        self._here = threading.local()
        self._called: list[Counter[int]] = [Counter() for _ in models]
        self.evaluations = 0
        """Calls of a whole model with gradients off."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name in enumerate(model_names(self._models)):
                for handle in self._hook(place, name):
                    stack.callback(handle.remove)
            try:
                yield
            finally:
                while self._open():
                    self._leave()

    @property
    def forwards(self) -> int:
        """Calls with gradients on: as many as every model had that had any. Where the program
        calls parts of a model and never the whole, as many as each of these parts had."""
        found = (
            times.get(id(model)) or min(times.values(), default=0)
            for model, times in zip(self._models, self._called, strict=True)
        )
        return min(filter(None, found), default=0)

    def forget_calls(self) -> None:
        """Calls are counted from here on."""
        for times in self._called:
            times.clear()

    def _hook(self, place: int, name: str) -> Iterator[Any]:
        model = self._models[place]
        for part, words in _hookable(model):
            own = ".".join(words)

            def enter(*_: Any, part: torch.nn.Module = part, own: str = own) -> None:
                outermost = id(part) in self._outermost and not self._open()
                # One that runs within the backward is recomputed.
                if (outermost or part is model) and not _in_backward():
                    self._count(place, part)
                around = ("forward" if outermost else "", name if outermost or not own else "")
                self._enter([word for word in (*around, own) if word])

            yield from around_calls(part, enter, self._leave)

    def _count(self, place: int, part: torch.nn.Module) -> None:
        if torch.is_grad_enabled():
            self._called[place][id(part)] += 1
        else:
            self.evaluations += 1

    def _enter(self, names: Sequence[str]) -> None:
        opened = [record_function(name) for name in names]
        for one in opened:
            one.__enter__()  # type: ignore[no-untyped-call]
        self._open().append(opened)

    def _leave(self, *_: Any) -> None:
        for opened in reversed(self._open().pop() if self._open() else []):
            opened.__exit__(None, None, None)

    def _open(self) -> list[list[record_function]]:
        """Ranges of the calls under way on this thread: a model may run in several."""
        held: list[list[record_function]] = self._here.__dict__.setdefault("open", [])
        return held


class OutermostCalls:
    """Finds the modules that a program calls itself, as opposed to those that a module calls: a
    model may be a mere container whose parts are called, or be called by a method of another name.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._seen: dict[torch.nn.Module, None] = {}

    def of(self, models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Those within each model, or the model itself where no call was seen."""
        within = [[part for part in model.modules() if part in self._seen] for model in models]
        return [
            part for model, seen in zip(models, within, strict=True) for part in seen or [model]
        ]

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Calls with gradients on are seen inside."""
        parts = [part for model in self._models for part, _ in _hookable(model)]

        def note(part: torch.nn.Module) -> None:
            if torch.is_grad_enabled() and not _in_backward():
                self._seen.setdefault(part)

        with hooked_calls(parts, lambda part, *_: note(part), lambda *_: None):
            yield


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def _hookable(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, tuple[str, ...]]]:
    """The model, without a name, and its parts with theirs, except what is compiled in place."""
    seen: set[int] = set()
    for part, words in ((model, ()), *_called_parts(model, ())):
        if id(part) not in seen and not _compiled_in_place(part):
            seen.add(id(part))
            yield part, words


def _called_parts(
    module: torch.nn.Module, words: tuple[str, ...]
) -> Iterator[tuple[torch.nn.Module, tuple[str, ...]]]:
    """Every part below a module, with its name as seen from the called module around it.

    Containers are never called: their name becomes part of their children's. Nothing below a
    compiled module is entered.
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
    """Its children. Numbers in a row of layers come with the class, unless all are alike."""
    children = dict(module.named_children())
    mixed = isinstance(module, torch.nn.Sequential) and len(set(map(type, children.values()))) > 1
    for name, part in children.items():
        yield (f"{name} {type(part).__name__}" if mixed and name.isdigit() else name), part


def all_named_parts(
    module: torch.nn.Module, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, torch.nn.Module]]:
    """As `named_modules`, with these names."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, part in named_parts(module):
        yield from all_named_parts(part, f"{path}.{name}" if path else name, seen)


def hooked_roots(models: Sequence[torch.nn.Module], enter: Any, leave: Any) -> ExitStack | None:
    """`enter` before and `leave` after each call of a whole model, until it is closed; None where
    one of them is compiled in place, and calls no hooks."""
    if not models or any(_compiled_in_place(model) for model in models):
        return None
    return hooked_calls(models, enter, leave)


def hooked_calls(modules: Sequence[torch.nn.Module], enter: Any, leave: Any) -> ExitStack:
    """`enter` before and `leave` after calls of these modules that none of them makes itself, until
    it is closed."""
    here = threading.local()

    def enter_first(*given: Any) -> None:
        here.depth = getattr(here, "depth", 0) + 1
        if here.depth == 1:
            enter(*given)

    def leave_last(*given: Any) -> None:
        # It may have been called before it was hooked.
        here.depth = max(0, getattr(here, "depth", 0) - 1)
        if here.depth == 0:
            leave(*given)

    stack = ExitStack()
    for module in modules:
        for handle in around_calls(module, enter_first, leave_last):
            stack.callback(handle.remove)
    return stack


def _compiled_in_place(module: torch.nn.Module) -> bool:
    """Its hooks are part of what was compiled: a new one would compile it again."""
    return getattr(module, "_compiled_call_impl", None) is not None


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    for name in _WRAPPERS:
        inner = module._modules.get(name)
        if isinstance(inner, torch.nn.Module):
            return _unwrapped(inner)
    return module
