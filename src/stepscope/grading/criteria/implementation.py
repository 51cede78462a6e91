"""Load a user's implementation and call it through one interface for each kind."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.errors import UsageError, one_line
from stepscope.grading.check.cases import Checked
from stepscope.grading.check.kinds import ADAPTERS, Adapter

_SYNCHRONIZE = "finish_gradient_synchronization"
_GATHER = "gather_full_params"


class Implementation:
    """A user's class or function, imported in this process."""

    def __init__(self, case: Checked) -> None:
        self._case = case
        self.module = import_source(case.source)
        self.folder = str(import_root(Path(case.source))) if is_file(case.source) else ""
        target: Any = self.module
        for word in case.name.split("."):
            if not hasattr(target, word):
                raise UsageError(f"{case.source} has no {case.name}", "check the name")
            target = getattr(target, word)
        if not callable(target):
            raise UsageError(
                f"{case.name} is a {type(target).__name__}", "name a class or function"
            )
        self.target: Any = target
        self.adapter: Adapter | None = None
        if case.adapters:
            self.adapter = next(one for one in ADAPTERS if one.function == case.name)

    def imported_again(self) -> Implementation:
        for name, module in list(sys.modules.items()):
            if self._is_users(module):
                del sys.modules[name]
        return Implementation(self._case)

    def layers(self) -> dict[str, Any]:
        """The classes Linear and Embedding that the user's code knows, which an FSDP may look for;
        torch's where it has none."""
        classes: dict[str, Any] = {"Linear": nn.Linear, "Embedding": nn.Embedding}
        places = [self.module, sys.modules.get("cs336_basics.model")]
        if self.adapter is not None:
            # The adapter's module only imports the implementation.
            places += [m for m in list(sys.modules.values()) if self._is_users(m)]
        for name in classes:
            for place in places:
                found = vars(place).get(name) if place is not None else None
                if isinstance(found, type) and issubclass(found, nn.Module):
                    classes[name] = found
                    break
        return classes

    def _is_users(self, module: ModuleType) -> bool:
        return in_folder(getattr(module, "__file__", None) or "", self.folder)


def in_folder(file: str, folder: str) -> bool:
    """True for a user's file: their folder may contain the environment with everything else."""
    return bool(folder) and file.startswith(folder) and "site-packages" not in file


def is_file(source: str) -> bool:
    return source.endswith(".py")


def import_root(file: Path) -> Path:
    """The folder from which a file is imported: above the packages that it is in."""
    folder = file.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def import_source(source: str) -> ModuleType:
    """Import a file or a module, with its folder on the path of this process."""
    if not is_file(source):
        sys.path.insert(0, str(Path.cwd()))
        return _imported(source, lambda: importlib.import_module(source))
    file = Path(source).resolve()
    root = import_root(file)
    for folder in (file.parent, root):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    for known in (sys.modules.get(name), sys.modules.get(f"{name}_graded")):
        if known is not None and getattr(known, "__file__", None) == str(file):
            return known
    if "." in name:
        return _imported(source, lambda: importlib.import_module(name))

    def executed() -> ModuleType:
        # A file may have the name of a module that this process uses, such as attention.py.
        free = f"{name}_graded" if name in sys.modules else name
        spec = importlib.util.spec_from_file_location(free, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[free] = module
        spec.loader.exec_module(module)
        return module

    return _imported(source, executed)


def _imported(source: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{source} cannot be imported: {one_line(error)}", "fix it first"
        ) from error


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


class Operator(NamedTuple):
    """An implementation as a function of its tensors and one option: `is_causal`, or `eps`."""

    call: Callable[..., Tensor]
    fresh: Callable[[], Operator]
    """Import it again, without what earlier calls have left in its module."""
    is_function: bool = False
    """True for a torch.autograd.Function, which has to save the log-sum-exp."""
    eps: float | None = None
    """The only eps that it has; None if it takes any."""


def as_attention(made: Implementation) -> Operator:
    target = made.target() if made.adapter else made.target

    def fresh() -> Operator:
        return as_attention(made.imported_again())

    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return Operator(target.apply, fresh, is_function=True)
    if isinstance(target, type):
        target = target()
    names = parameters_of(target.forward if isinstance(target, nn.Module) else target)
    flag = next((name for name in ("is_causal", "causal") if name in names), None)
    if flag is not None:
        return Operator(lambda q, k, v, causal: target(q, k, v, **{flag: causal}), fresh)
    return Operator(target, fresh)


def as_norm(made: Implementation) -> Operator:
    target = made.target

    def fresh() -> Operator:
        return as_norm(made.imported_again())

    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        takes = len(parameters_of(target.forward)) > _NORM_ARGUMENTS
        return Operator(_with_eps(target.apply, takes, ""), fresh, eps=None if takes else EPS)
    name = _eps_name(target)
    is_module = isinstance(target, type) and issubclass(target, nn.Module)
    call = _module_norm(target) if is_module else _with_eps(target, bool(name), name)
    return Operator(call, fresh, eps=None if name else EPS)


EPS = 1e-5
_NORM_ARGUMENTS = 3
"""Arguments of the forward of an autograd.Function without eps: ctx, x, weight."""


def _eps_name(target: Any) -> str:
    return next((name for name in ("eps", "epsilon") if name in parameters_of(target)), "")


def _with_eps(function: Any, takes: bool, name: str) -> Callable[[Tensor, Tensor, float], Tensor]:
    if not takes:
        return lambda x, weight, _: function(x, weight)
    if name:
        return lambda x, weight, eps: function(x, weight, **{name: eps})
    return function  # type: ignore[no-any-return]


def _module_norm(made: Any) -> Callable[[Tensor, Tensor, float], Tensor]:
    name = _eps_name(made)

    def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        module = made(x.shape[-1], **({name: eps} if name else {})).to(x.device)
        (own,) = dict(module.named_parameters())
        # In place of the parameter, so that the gradient reaches the given weight.
        result: Tensor = torch.func.functional_call(module, {own: weight}, (x,))
        return result

    return call


class Wrapper:
    """A wrapped module, or a sharded optimizer, with the calls that belong to a step."""

    def __init__(self, made: Implementation, wrapped: Any) -> None:
        self._made = made
        self.wrapped = wrapped

    def before(self, optimizer: Any) -> None:
        if self._made.adapter and self._made.adapter.before:
            getattr(self._made.module, self._made.adapter.before)(self.wrapped, optimizer)

    def after(self, optimizer: Any) -> None:
        if self._made.adapter:
            if self._made.adapter.after:
                getattr(self._made.module, self._made.adapter.after)(self.wrapped, optimizer)
        elif (finish := getattr(self.wrapped, _SYNCHRONIZE, None)) is not None:
            # Without this method the implementation synchronizes by itself, like torch's.
            finish()

    def gather(self) -> dict[str, Tensor]:
        if self._made.adapter and self._made.adapter.gather:
            full = getattr(self._made.module, self._made.adapter.gather)(self.wrapped)
        elif (gather := getattr(self.wrapped, _GATHER, None)) is not None:
            full = gather()
        else:
            raise UsageError(
                f"{type(self.wrapped).__name__} has no {_GATHER}()",
                "define it: it returns the full parameters by name",
            )
        return {name.removeprefix("module."): value.detach() for name, value in full.items()}


def wrap(made: Implementation, module: nn.Module, *more: Any, **options: Any) -> Wrapper:
    return Wrapper(made, made.target(module, *more, **options))
