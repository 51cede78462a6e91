"""Observe where a script makes its optimizer, loaders and model calls. Runs in its process."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from stepscope.advisor.patch.libraries import OF_LIBRARIES
from stepscope.advisor.patch.sites import SITES, Place, Site, Sites
from stepscope.advisor.scope.torch_import import when_imported
from stepscope.advisor.trial.following import NO_BACKWARD, ModelFollower
from stepscope.analysis.advice.rules.pinned import goes_to_gpu
from stepscope.measure.modules import is_compiled

_STEPS = 5
"""Steps that are observed: models are known after the first, and called submodules after the
third."""
_NOT_OF_THE_USER = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        # Libraries may be installed elsewhere, as with `pip install --target`.
        *(one for one in sys.path if any(Path(one).glob("*.dist-info"))),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[2]),
    )
)
_LIBRARY_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_INITS = ("__init__", "__post_init__")
_SCALARS = (bool, int, float, str, tuple, list, type(None))


class SiteObserver(ModelFollower):
    """Records the places of calls until the steps are over; then it ends the script."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / SITES
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._frames: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        """Values of the variables on the stack of a site in which models are looked for."""
        self._autocasts: list[Any] = []
        self._own: dict[int, tuple[Any, ...]] = {}
        """Sites at which objects were made, by the object's id."""
        self._used: list[Any] = []
        """Loaders that were iterated; a library may have made them for the data of another one."""
        self._kept: list[Any] = []

    def attach(self) -> None:
        self.follow()
        self._around_init(torch.optim.Optimizer, self._optimizer_made)
        self._around_init(DataLoader, self._loader_made)
        self._before(DataLoader, "__iter__", self._used.append)
        self._around_init(torch.autocast, self._autocast_made)
        self._before(torch.autocast, "__enter__", self._autocasts.append)
        self._before(torch.autocast, "__exit__", lambda *_: self._autocasts.pop())
        for class_ in (torch.optim.Optimizer, torch.nn.Module):
            self._before(class_, "zero_grad", self._gradients_cleared)
        utils = torch.nn.utils
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._before(utils, name, self._clipped(name))
            setattr(utils.clip_grad, name, getattr(utils, name))
        for name in ("to", "cuda"):
            self._before(torch.Tensor, name, self._copied)
        self._before(torch.Tensor, "item", self._read_back)
        for owner in (torch, torch.nn.functional, torch.Tensor):
            self._before(owner, "softmax", lambda x, *_, **__: x.dim() > 2 and self._add("softmax"))
        for kind, (module, class_name) in OF_LIBRARIES.items():
            when_imported(module, self._watch_class(kind, module, class_name))

    # Events.

    def _optimizer_made(self, optimizer: Any, *_: Any, **__: Any) -> None:
        kind = type(optimizer)
        first = next((p for g in optimizer.param_groups for p in g["params"]), None)
        groups = {name: optimizer.param_groups[0].get(name) for name in optimizer.defaults}
        self._add(
            "optimizer",
            maker=optimizer,
            **{f"default.{n}": repr(v) for n, v in groups.items() if isinstance(v, _SCALARS)},
            name=kind.__name__,
            of_torch=str(kind.__module__.startswith("torch.optim")),
            device="" if first is None else first.device.type,
        )

    def _loader_made(self, loader: Any, *_: Any, **__: Any) -> None:
        self._add("loader", maker=loader, workers=str(loader.num_workers))

    def _autocast_made(self, autocast: Any, *_: Any, **__: Any) -> None:
        enabled = str(bool(autocast._enabled))
        key = self._add("autocast", enabled=enabled, dtype=str(autocast.fast_dtype))
        if key is not None:
            self._own[id(autocast)] = key
            self._kept.append(autocast)

    def _gradients_cleared(self, _owner: Any, set_to_none: bool = True) -> None:
        self._add("zero_grad", set_to_none=str(bool(set_to_none)))

    def _clipped(self, name: str) -> Callable[..., None]:
        def clip(_parameters: Any, largest: Any = 0.0, norm_type: Any = 2.0, *_: Any, **k: Any):  # type: ignore[no-untyped-def]
            largest = k.get("max_norm", largest)
            order = float(k.get("norm_type", norm_type)) if "norm" in name else 0.0
            self._add("clip", name=name, largest=repr(float(largest)), order=repr(order))

        return clip

    def _copied(self, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter):
            target = arguments or keywords or ("cuda",)
            if target == ("cuda",) or goes_to_gpu(arguments, keywords):
                self._add("copy", pinned=str(tensor.is_pinned()))

    def _read_back(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cuda":
            self._add("item")

    def _watch_class(self, kind: str, module: str, name: str) -> Callable[[], None]:
        def watch() -> None:
            class_ = getattr(sys.modules[module], name, None)
            if class_ is not None:
                self._around_init(class_, lambda made, *_, **__: self._add(kind, maker=made))

        return watch

    def on_call(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == NO_BACKWARD:
            module: Any = getattr(call, "args", (None,))[0]
            off = [self._own.get(id(one)) for one in self._autocasts if not one._enabled]
            site = self._sites[off[-1]] if off and off[-1] in self._sites else None
            place = None if site is None or not site.direct else site.place
            about = {} if place is None else {"autocast": msgspec.json.encode(place).decode()}
            self._add(
                "call",
                autocast_on=str(torch.is_autocast_enabled(self._device())),
                compiled=str(is_compiled(module)),
                **about,
            )
        return call(*arguments, **keywords)

    def on_optimizer(self, optimizer: Any) -> None:  # noqa: ARG002
        self._add("step")

    def on_backward(self, roots: Any) -> None:  # noqa: ARG002
        self._add("backward")

    # The end of a step.

    def on_step(self) -> None:
        if self._steps < _STEPS:
            self._find_models()
        if self._steps == 1:
            # The places of a first step may be those of a set-up.
            for kind in ("backward", "step", "zero_grad", "clip", "item", "copy", "softmax"):
                self._sites = {k: s for k, s in self._sites.items() if s.kind != kind}
        elif self._steps < _STEPS:
            for calls in self._calls:
                calls.settle()
        else:
            self._exit()

    def write(self) -> None:
        """Write what was observed; the models are known now."""
        if not self._is_own:
            return
        called = [part for calls in self._calls for part in calls.called]
        for calls in self._calls:
            calls.release()
        targets = [
            part for part in (called or self._models) if any(True for _ in part.parameters())
        ]
        sites = [
            msgspec.structs.replace(site, models=tuple(self._named(key, targets)))
            for key, site in self._sites.items()
        ]
        data = {id(loader.dataset) for loader in self._used}
        used = {self._own.get(id(o)) for o in self._kept if id(getattr(o, "dataset", 0)) in data}
        sites = [
            msgspec.structs.replace(site, about=site.about | {"used": str(key in used)})
            for key, site in zip(self._sites, sites, strict=True)
        ]
        found = Sites(
            sites=tuple(sites),
            device=self._device(),
            steps=self._steps,
            blocks=next(filter(None, map(_blocks, targets)), ""),
        )
        self._file.write_bytes(msgspec.json.encode(found))

    def _device(self) -> str:
        parameters = self._finder.parameters
        return parameters[0].device.type if parameters else "cpu"

    def _named(
        self, key: tuple[Any, ...], targets: list[torch.nn.Module]
    ) -> Iterator[dict[str, str]]:
        """For each place of a site's stack: expressions for the called modules, by number."""
        for variables in self._frames.get(key, ()):
            names: dict[str, str] = {}
            for number, target in enumerate(targets):
                for name, value in variables.items():
                    path = _path(value, target)
                    if path is not None and str(number) not in names:
                        names[str(number)] = name + path
            yield names

    # Recording.

    def _add(self, kind: str, *, maker: Any = None, **about: str) -> tuple[Any, ...] | None:
        """Record the place of the call that is executing; once for each place."""
        if not self._is_own:
            return None
        frames, direct = _user_frames(sys._getframe(1), maker)
        places = tuple(map(_place, frames))
        key = (kind, places)
        if key not in self._sites:
            self._sites[key] = Site(kind=kind, stack=places, direct=direct, about=about)
            self._frames[key] = [_modules_in(frame) for frame in frames]
            if kind == "call":
                batches = tuple(tuple(_batches_in(frame)) for frame in frames)
                self._sites[key] = msgspec.structs.replace(self._sites[key], batches=batches)
        if maker is not None:
            self._own[id(maker)] = key
            self._kept.append(maker)
        return key

    def _around_init(self, class_: type, then: Callable[..., Any]) -> None:
        """Call `then` for each object of a class, also of a data class derived from it."""
        name = "__post_init__" if hasattr(class_, "__post_init__") else "__init__"
        plain = getattr(class_, name)

        def init(made: Any, *arguments: Any, **keywords: Any) -> None:
            plain(made, *arguments, **keywords)
            then(made, *arguments, **keywords)

        setattr(class_, name, init)

    def _before(self, owner: Any, name: str, then: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            then(*arguments, **keywords)
            return plain(*arguments, **keywords)

        setattr(owner, name, call)


def _is_of_user(file: str) -> bool:
    if not file.endswith(".py") or any(folder in file for folder in _LIBRARY_FOLDERS):
        return False
    return not str(Path(file).resolve()).startswith(_NOT_OF_THE_USER)


def _user_frames(frame: FrameType | None, maker: Any) -> tuple[list[FrameType], bool]:
    """Return the user's frames, outermost first, and whether the innermost of them makes the call
    itself. Constructors of the object that is being made do not count."""
    frames: list[FrameType] = []
    libraries = 0
    while frame is not None:
        code = frame.f_code
        within = maker is not None and frame.f_locals.get("self") is maker
        if _is_of_user(code.co_filename) and not (within and code.co_name in _INITS):
            frames.append(frame)
        elif not frames and not within and not code.co_filename.startswith(_NOT_OF_THE_USER[-2:]):
            # Frames of torch and of Stepscope's hooks are between a call and its effect.
            libraries += "dataclass" not in code.co_filename and code.co_filename != "<string>"
        frame = frame.f_back
    return frames[::-1], not libraries


def _place(frame: FrameType) -> Place:
    code = frame.f_code
    positions = itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
    line, end_line, column, end_column = next(positions, (None,) * 4)
    return Place(
        file=str(Path(code.co_filename).absolute()),
        function=code.co_name,
        first_line=code.co_firstlineno,
        line=line or frame.f_lineno,
        end_line=end_line or frame.f_lineno,
        column=column or 0,
        end_column=end_column or 0,
    )


def _modules_in(frame: FrameType) -> dict[str, Any]:
    """Variables of a function, and attributes of its `self`, that are modules."""
    variables = dict(frame.f_locals)
    owner = variables.get("self")
    attributes = {} if owner is None else getattr(owner, "__dict__", {})
    found = {name: value for name, value in variables.items() if _is_module(value)}
    return found | {f"self.{n}": v for n, v in attributes.items() if _is_module(v)}


def _is_module(value: Any) -> bool:
    return issubclass(type(value), torch.nn.Module)


def _path(root: torch.nn.Module, target: torch.nn.Module) -> str | None:
    """Return the attribute path from one module to another; None if it is not in it."""
    for name, module in root.named_modules():
        if module is target:
            parts = name.split(".") if name else []
            return "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in parts)
    return None


def _blocks(model: torch.nn.Module) -> str:
    """Return the path of the model's only list of blocks; empty if it has none, or several."""
    lists = {id(one): one for one in model.modules() if isinstance(one, torch.nn.ModuleList)}
    inner = {id(part) for one in lists.values() for part in one.modules() if part is not one}
    outer = [one for number, one in lists.items() if number not in inner]
    return (_path(model, outer[0]) or "") if len(outer) == 1 else ""


def _batches_in(frame: FrameType) -> list[str]:
    """Variables of a function that are tensors, or structures of nothing but tensors."""

    def is_batch(value: Any) -> bool:
        if not isinstance(value, torch.Tensor | dict | tuple | list):
            return False
        leaves = tree_leaves(value)
        return bool(leaves) and all(isinstance(leaf, torch.Tensor) for leaf in leaves)

    return [name for name, value in frame.f_locals.items() if is_batch(value)]
