"""Runs the training calls of a model through the graph backend, if that is the same and faster.

    Dynamo + passes -> compared with the original -> timed against it in real steps -> kept or left

`Compilation` is what `accelerate(model, compile=True)` sets up: the forward of the model, and the
loss of a `TrainStep`, which is traced together with the model, are `CompiledFunction`s.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stepscope.acceleration.backend import GraphReport, Graphs
from stepscope.acceleration.checks import difference
from stepscope.acceleration.choice import (
    AS_IT_IS,
    PASSES,
    PLAIN,
    TO_BE_CHOSEN,
    Choice,
    clock_of,
    digest_of,
)
from stepscope.acceleration.comparison import FP8_TOLERANCE
from stepscope.acceleration.forward_registry import Layer, add_layer, layer_owners
from stepscope.acceleration.left import Left
from stepscope.acceleration.sharded.units import has_units
from stepscope.acceleration.torch_internals import (
    compiled_apart,
    graph_breaks,
    prepare_compiler,
    tracing_settings,
)
from stepscope.errors import UsageError
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.derivatives import transforms_active
from stepscope.torch_tools.module_hooks import has_global_hooks, hooks_of, modules_of
from stepscope.version import __version__

PIECE = "compile"
_MAX_COMPARISONS = 16
"""Comparisons of one function: lengths may change in every call."""
FORMS = (AS_IT_IS, PLAIN, PASSES)


def compilation_of(model: nn.Module) -> Compilation | None:
    """Return what `accelerate` set up for a model, if it was accelerated with `compile`."""
    found = (getattr(owner, "compilation", None) for owner in layer_owners(model))
    return next((one for one in found if one is not None and one.model is model), None)


class Sharded(Protocol):
    """What makes the functions of a model in FSDP2."""

    def function(
        self, compilation: Compilation, run: Callable[..., Any], graphs: Iterable[bool]
    ) -> CompiledFunction: ...

    def undo(self) -> None: ...


class Compilation:
    """A model whose training calls run through the graph backend, until `undo()`."""

    def __init__(
        self,
        model: nn.Module,
        owner: object,
        options: Mapping[str, Any],
        dtype: torch.dtype | None = None,
        exclude: Iterable[str | type[nn.Module]] = (),
        copies: WeightCopies | None = None,
        fp8: Fp8Layers | None = None,
        sharded: Callable[[Compilation], Sharded] | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.copies, self.fp8 = copies, fp8
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        patterns = tuple(exclude)
        self.fixed_form: str | None = options.get("form")
        """The form that was asked for: it is not chosen by time then."""
        if self.fixed_form not in (None, *FORMS):
            raise UsageError(f"form={self.fixed_form!r}", f"one of: {', '.join(FORMS)}")
        given = {name: x for name, x in options.items() if name != "form"}
        self.options = given | {"copies": copies, "fp8": fp8}
        self.passes = tuple(name for name in Graphs(**self.options).passes if name not in patterns)
        self.functions: list[CompiledFunction] = []
        self.owner, self._make_sharded = owner, sharded
        self._sharded: Sharded | None = None
        self._forward: CompiledFunction | None = None
        self.in_hooks: Callable[..., Any] | None = None
        """What the next call of the model runs in place of its forward, within its hooks."""
        self._suspended = False
        if self.fixed_form != AS_IT_IS:
            prepare_compiler(self.device)
        self._layers = [add_layer(model, self._call, owner)]
        self._layers += [
            _uncompiled(module, owner)
            for name, module in model.named_modules()
            if module is not model and _matches(name, type(module), patterns)
        ]

    def function(self, run: Callable[..., Any], graphs: Iterable[bool]) -> CompiledFunction:
        """Return a function that runs the model, to be compiled with it. `graphs` are the kinds of
        steps to choose from: with CUDA graphs or without."""
        if self._sharded is None and self._make_sharded is not None and has_units(self.model):
            self._sharded = self._make_sharded(self)
        make = CompiledFunction if self._sharded is None else self._sharded.function
        made = make(self, run, graphs)
        self.functions.append(made)
        return made

    def undo(self) -> None:
        if self._sharded is not None:
            self._sharded.undo()
        for layer in self._layers:
            layer.remove()
        self.functions.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run the forward as it is: a function that contains it is compiled, or runs as it is."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del module
        if self.in_hooks is not None:
            run, self.in_hooks = self.in_hooks, None
            return run(*args, **kwargs)
        if torch.compiler.is_compiling() or self._suspended:
            return self._layers[0].below(*args, **kwargs)
        with self.autocast():
            if not torch.is_grad_enabled():
                return self._layers[0].below(*args, **kwargs)
            if self._forward is None:
                # The model may have been sharded in the meantime.
                self._forward = self.function(self._layers[0].below, (False,))
                self._forward.within_hooks = True
            if not is_capturing():
                self._forward.begin(args, kwargs)
            return self._forward(*args, **kwargs)

    @property
    def left(self) -> list[Left]:
        return list(dict.fromkeys(x for one in self.functions for x in one.left))

    def lines(self) -> list[str]:
        """Describe what runs, for the report."""
        used = [one for one in self.functions if one.is_used] or self.functions[:1]
        if not used:
            return [f"form of the step   {self.fixed_form or TO_BE_CHOSEN}"]
        return [line for one in used for line in one.lines()]


class CompiledFunction:
    """A function that calls the model, in the form that `begin` chose."""

    within_hooks = False
    """It is the forward of the model: hooks of the model run around it."""

    def __init__(
        self, compilation: Compilation, run: Callable[..., Any], graphs: Iterable[bool]
    ) -> None:
        self._owner, self._run, self._module = compilation, run, compilation.model
        self._passes = compilation.passes
        self._variants: dict[tuple[Any, ...], tuple[Callable[..., Any], Graphs]] = {}
        self._compared: set[object] = set()
        self._comparisons = 0
        self._seconds = 0.0
        self._hooks: dict[nn.Module, tuple[Any, ...]] = {}
        self._forwards: dict[type, Any] = {}
        self._left: list[Left] = []
        self._inputs: Any = ((), {})
        self.kind = compilation.fixed_form or AS_IT_IS
        self.refused = ""
        """Why the function runs as it is."""
        self.is_used = False
        self.choice = Choice(graphs, clock_of(compilation.device), self._key)

    def begin(self, *inputs: Any) -> bool:
        """Choose the form of the step that begins; return whether it may be a CUDA graph."""
        self.is_used = True
        if self._owner.fixed_form is not None:
            return True
        self._inputs = inputs
        form = self.choice.begin(sum(x.numel() for x in _tensors(inputs)))
        self._inputs = ()
        self.kind = form.kind
        return form.graph or len(self.choice.graphs) == 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == AS_IT_IS or self.refused or self._must_run_as_it_is():
            return self._as_it_is(*args, **kwargs)
        if not is_capturing() and self._is_new(args, kwargs):
            return self._first_call(args, kwargs)
        run, _ = self._variant()
        return run(*args, **kwargs)

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        """Compare a call with the original, and run it in the form that remains."""
        with _collecting_new_objects_only():
            same = self._compared_as_equal(args, kwargs)
            run = self._variant()[0] if same else self._as_it_is
            return run(*args, **kwargs)

    def _as_it_is(self, *args: Any, **kwargs: Any) -> Any:
        with self._within(compiled=False):
            return self._run(*args, **kwargs)

    @contextmanager
    def _within(self, *, compiled: bool) -> Iterator[None]:
        """Run the function within this."""
        with self._owner.suspended(), tracing_settings() if compiled else nullcontext():
            yield

    def _compiled_apart(self, graphs: Graphs) -> Callable[..., Any]:
        return compiled_apart(self._run, graphs)

    def _parts(self) -> list[nn.Module]:
        """Return the modules whose forwards it runs."""
        return modules_of(self._module)

    def _hooks_of(self, modules: Iterable[nn.Module]) -> tuple[int, ...]:
        """Return the keys of the hooks of these modules that compiled code must not leave out."""
        return tuple(key for one in modules for key in hooks_of(one))

    def _must_run_as_it_is(self) -> bool:
        """Return whether this call has what Dynamo's guards do not see: hooks that were added
        later, hooks of all modules, and classes whose forward was patched."""
        if has_global_hooks() or transforms_active():
            return True
        modules = self._parts()
        hooks = self._hooks_of(modules[1:] if self.within_hooks else modules)
        if self._module not in self._hooks:
            self._hooks[self._module] = hooks
            if hooks:
                self._refuse("modules have hooks, which the comparison would call")
                return True
        # Dynamo guards the class of each module: another one is compiled with its present forward.
        known = self._forwards
        forwards = {type(one): type(one).forward for one in modules}
        if hooks == self._hooks[self._module] and all(
            known.setdefault(kind, forward) is forward for kind, forward in forwards.items()
        ):
            return False
        self._leave(
            Left(PIECE, "", "hooks or forwards of classes changed after it was compiled; "
                 "calls with them run as it is")
        )  # fmt: skip
        return True

    def _variant(self, **options: Any) -> tuple[Callable[..., Any], Graphs]:
        """Return the compiled function with the present passes, compiled in its first call."""
        settings = self._settings(self.kind) | options
        key = _key_of(settings)
        if key not in self._variants:
            graphs = Graphs(**settings)
            self._variants[key] = self._compiled_apart(graphs), graphs
        compiled, graphs = self._variants[key]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._within(compiled=True):
                return compiled(*args, **kwargs)

        return run, graphs

    def _settings(self, kind: str) -> dict[str, Any]:
        """Return the options of the backend for a form."""
        passes = self._passes if kind == PASSES else ()
        return {"regions": kind == PASSES} | self._owner.options | {"passes": passes}

    # Comparison

    def _is_new(self, args: Any, kwargs: Any) -> bool:
        """Return whether the call is the first of its kind, or the first after a compilation."""
        kind = (self.kind, self._owner.model.training, *map(_bucket, tree_leaves((args, kwargs))))
        known = {kind, (self.kind, self._compilations())}
        is_new = not known <= self._compared
        self._compared |= known
        return is_new and self._comparisons < _MAX_COMPARISONS

    def _compilations(self) -> int:
        return sum(len(graphs.reports) for _, graphs in self._variants.values())

    def _compared_as_equal(self, args: Any, kwargs: Any) -> bool:
        """Compare with the original; take out the pass that makes it differ. Return whether what
        remains is equal."""
        began, known = time.perf_counter(), len(graph_breaks())
        self._comparisons += 1
        why = self._difference(args, kwargs)
        for one in graph_breaks()[known:]:
            self._leave(Left(PIECE, one.line, f"Dynamo cannot trace it: {one.reason}"))
        if not (why or self._compilations()):
            why = "Dynamo makes no graph of it"
        if why and self.kind == PASSES:
            self._take_out(why, args, kwargs)
        elif why:
            self._refuse(why)
        self._compared.add((self.kind, self._compilations()))
        # The call that follows casts its weights itself: selective checkpointing counts the casts.
        torch.clear_autocast_cache()
        if self._owner.device.type == "cuda":
            # Optimizer states and copies of weights, allocated next, would lie in the gaps of what
            # the comparison has freed, and keep all of it reserved.
            torch.cuda.empty_cache()
        self._seconds += time.perf_counter() - began
        return not self.refused

    def _take_out(self, why: str, args: Any, kwargs: Any) -> None:
        compiled = [graphs for _, graphs in self._variants.values()]
        applied = {x.name for one in compiled for report in one.reports for x in report.applied}
        present = self._passes
        suspects = [(name,) for name in present if name in applied]
        for suspect in [*suspects, present] if len(suspects) > 1 else suspects:
            self._passes = tuple(name for name in present if name not in suspect)
            if not self._difference(args, kwargs):
                for name in suspect:
                    self._leave(Left(name, "", why))
                return
        self._passes = present
        self._refuse(why)

    def _difference(self, args: Any, kwargs: Any) -> str:
        draws_numbers = False

        def original(*args: Any, **kwargs: Any) -> Any:
            nonlocal draws_numbers
            before = self._random_states()
            output = self._as_it_is(*args, **kwargs)
            after = self._random_states()
            draws_numbers = not all(map(torch.equal, before, after))
            return output

        found: list[str] = []

        def replaced(*args: Any, **kwargs: Any) -> Any:
            # Inductor draws other random numbers: its input is compared then.
            options = {"compiler": "aot_eager"} if draws_numbers else {}
            run, graphs = self._variant(**options)
            with graphs.compared() as differences:
                output = run(*args, **kwargs)
            found.extend(differences)
            return output

        try:
            why = difference(
                self._module,
                original,
                replaced,
                args,
                kwargs,
                self._tolerance(),
            )
        except torch.OutOfMemoryError:
            return "there is not enough memory to compare it with the original"
        return next(iter(found), why)

    def _tolerance(self) -> float:
        in_fp8 = self._owner.fp8 is not None and self.kind == PASSES
        return FP8_TOLERANCE if in_fp8 else 0.0

    def _random_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._owner.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._owner.device))
        return states

    def _refuse(self, why: str) -> None:
        self.refused = why
        self._leave(Left(PIECE, "", why))
        self._variants.clear()
        self._end_choice()

    def _end_choice(self) -> None:
        """Choose none of the compiled forms."""
        self.choice.leave_compiled()

    def _leave(self, left: Left) -> None:
        if left not in self._left:
            self._left.append(left)

    # Report

    @property
    def _reports(self) -> list[GraphReport]:
        """What became of the graphs that run with passes."""
        _, graphs = self._variants.get(_key_of(self._settings(PASSES)), (None, None))
        return [] if graphs is None else graphs.reports

    @property
    def left(self) -> list[Left]:
        found = list(self._left)
        for report in self._reports:
            found += [Left(x.name, x.line, x.reason) for x in report.left]
            if report.failure is not None:
                found.append(Left(PIECE, "", f"compiled without passes: {report.failure}"))
        return found

    def __str__(self) -> str:
        """Return the form in which it runs, with the times by which it was chosen."""
        if self.refused:
            return AS_IT_IS
        return self._owner.fixed_form or str(self.choice)

    @property
    def applied(self) -> Counter[tuple[str, str]]:
        """Number of operators that each pass has replaced in what runs, and by what."""
        reports = self._reports if self.kind == PASSES else ()
        return Counter((one.name, one.what) for report in reports for one in report.applied)

    def lines(self) -> list[str]:
        lines = [f"form of the step   {self}"]
        lines += [f"{name:<18} {count:>4} × {what}" for (name, what), count in self.applied.items()]
        if self._comparisons:
            seconds = f"{self._seconds:.1f} s with compilation"
            lines.append(f"compared           {self._comparisons} ×, {seconds}")
        return lines

    def _key(self) -> str:
        """Return the name of the stored choice: by model, batch, device and versions."""
        model, device = self._owner.model, self._owner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        kinds = [(name, type(x).__qualname__) for name, x in model.named_modules()]
        parameters = [
            (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()
        ]
        batch = [(tuple(x.shape), x.dtype) for x in _tensors(self._inputs)]
        autocast = torch.is_autocast_enabled(device.type), self._owner.dtype
        versions = torch.__version__, __version__
        fp8 = None if self._owner.fp8 is None else str(self._owner.fp8.recipe)
        passes = self._passes, self._owner.copies is not None, fp8
        return digest_of(
            name, kinds, parameters, batch, autocast, versions, passes, self.choice.graphs
        )


@contextmanager
def _collecting_new_objects_only() -> Iterator[None]:
    """Let the garbage collector pass over the objects that exist: a trace makes so many new ones
    that it would visit all several times, 0.3 s each where transformers is imported."""
    if gc.get_freeze_count():  # By the program, which may rely on it.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _key_of(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes the options of a model."""
    return tuple((name, x) for name, x in settings.items() if name not in ("copies", "fp8"))


def _bucket(leaf: Any) -> object:
    """Return what calls have in common that one comparison is for: lengths by powers of two."""
    if isinstance(leaf, Tensor):
        return (leaf.dtype, *(int(n).bit_length() for n in leaf.shape))
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _matches(name: str, kind: type, patterns: tuple[str | type[nn.Module], ...]) -> bool:
    return any(
        issubclass(kind, one) if isinstance(one, type) else fnmatchcase(name, one)
        for one in patterns
    )


def _uncompiled(module: nn.Module, owner: object) -> Layer:
    """Let a module run uncompiled."""

    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return layer.below(*args, **kwargs)

    disable: Any = torch.compiler.disable
    layer: Layer = add_layer(module, disable(run), owner)
    return layer
