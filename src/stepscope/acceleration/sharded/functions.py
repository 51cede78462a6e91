"""A model in FSDP2 through the graph backend: a function for the model, and one for each kind of
unit within it.

    hooks of the model: gather embedding, norm, head
      compiled: embedding | hooks of a block: gather, compiled block, free | ... | head and loss
    hooks of the model: free

Each function runs within the hooks of its unit, where weights are whole tensors: nothing else of
FSDP changes, and what FSDP can do (both settings of `reshard_after_forward`, mixed precision,
accumulation, checkpointing, meshes of several dimensions) works as without it. Functions call the
units in them as single operators (`unit_calls`).

A comparison runs on each rank by itself, on its own batch. Ranks agree on the form, and on what
differs, in the first calls of each form: a pass that one rank takes out is taken out on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from stepscope.acceleration.backend import Graphs
from stepscope.acceleration.choice import AS_IT_IS, clock_of, digest_of
from stepscope.acceleration.compiled import Compilation, CompiledFunction
from stepscope.acceleration.forward_registry import (
    Layer,
    add_layer,
    has_own_forward,
    layer_owners,
)
from stepscope.acceleration.left import Left
from stepscope.acceleration.losses import without_cache
from stepscope.acceleration.sharded.choice import SharedChoice
from stepscope.acceleration.sharded.deferred import computed
from stepscope.acceleration.sharded.fp8_gathers import Fp8Gathers
from stepscope.acceleration.sharded.unit_calls import UnitCalls, bare, is_traced
from stepscope.acceleration.sharded.units import (
    agreed,
    device_of,
    hooks_of_fsdp,
    is_unit,
    mesh_groups,
    own_modules,
    policy_of,
    runs_forward,
    units_of,
    within_checkpoint,
)
from stepscope.acceleration.torch_internals import compiled_apart, in_backward, tracing_settings
from stepscope.torch_tools.capturing import is_capturing

_CALLS_COMPARED = 2
"""Calls in which everything is compared: the function in the first, the units in the second."""
_ELSEWHERE = "it differs from the original on another rank"


class ShardedFunctions:
    """The functions of a model with units, until `undo()`."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        model = compilation.model
        self.groups = mesh_groups(model)
        # Parameters may wait in host memory.
        compilation.device = device_of(model)
        self.leading: WholeFunction | None = None
        """The function of the model that has run last: the units run in its form."""
        self.kinds: dict[object, UnitFunction] = {}
        self._layers: dict[nn.Module, Layer] = {}
        for unit in list(model.modules()):
            # Modules in `exclude` have a layer that runs them uncompiled.
            is_excluded = compilation.owner in layer_owners(unit)
            if is_unit(unit) and unit is not model and not is_excluded:
                self._add(within_checkpoint(unit), policy_of(unit))

    def undo(self) -> None:
        for layer in self._layers.values():
            layer.remove()

    def function(
        self, compilation: Compilation, run: Callable[..., Any], graphs: Iterable[bool]
    ) -> WholeFunction:
        return WholeFunction(self, compilation, run, graphs)

    def _add(self, unit: nn.Module, policy: Any) -> None:
        key = unit if has_own_forward(unit) else (*_kind_of(unit), str(policy))

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            traced = torch.compiler.is_compiling() or is_traced(args, kwargs)
            if self.leading is None or not torch.is_grad_enabled() or traced:
                return self._layers[module].below(*args, **kwargs)
            form = AS_IT_IS if self.leading.is_recorded else self.leading.kind
            return self.kinds[key].call(form, module, *args, **kwargs)

        layer = self._layers[unit] = add_layer(unit, call, self.compilation.owner)
        if key not in self.kinds:
            run = _below(layer) if key is unit else _forward
            self.kinds[key] = UnitFunction(self.compilation, run)
            self.compilation.functions.append(self.kinds[key])
        self.kinds[key].count += 1

    def agree(self, leading: WholeFunction) -> None:
        """Take over what the comparisons of other ranks have shown."""
        functions = [leading, *self.kinds.values()]
        passes = leading.owner.passes
        flags = [flag for one in functions for flag in one.flags(passes)]
        found = agreed(flags, self.groups, self.compilation.device)
        size = 1 + len(passes)
        for at, one in enumerate(functions):
            one.adopt(found[at * size : (at + 1) * size], passes)
        if all(one.refused for one in functions):
            leading.choice.leave_compiled()


class _ShardedFunction(CompiledFunction):
    """A function within the hooks of a unit."""

    choice: SharedChoice
    is_recorded = False
    """It runs as it is, to be compared: units in it, too, which get other arguments later."""

    @property
    def owner(self) -> Compilation:
        return self._owner

    def _calls(self) -> UnitCalls:
        """Return the units that it calls."""
        raise NotImplementedError

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        calls = self._calls()
        if not calls:
            return super()._first_call(args, kwargs)
        with calls.recorded():
            self.is_recorded = True
            try:
                output = self._as_it_is(*args, **kwargs)
            finally:
                self.is_recorded = False
            with calls.replayed():
                self._compared_as_equal(args, kwargs)
        return output

    def _compiled_apart(self, graphs: Graphs) -> Callable[..., Any]:
        # In pieces, it would call the units in its own Python code.
        return compiled_apart(self._run, graphs, fullgraph=bool(self._calls()))

    def _parts(self) -> list[nn.Module]:
        return own_modules(self._module)

    def _hooks_of(self, modules: Iterable[nn.Module]) -> tuple[int, ...]:
        # No other of its modules is a unit.
        of_fsdp = hooks_of_fsdp(self._module)
        return tuple(hook for hook in super()._hooks_of(modules) if hook not in of_fsdp)

    def _end_choice(self) -> None:
        """The other functions may still run compiled: see `Sharded.agree`."""

    def flags(self, passes: Sequence[str]) -> list[int]:
        """Return what was refused: the function, and each of these passes."""
        return [int(bool(self.refused)), *(int(name not in self._passes) for name in passes)]

    def adopt(self, flags: Sequence[int], passes: Sequence[str]) -> None:
        """Refuse what some rank has refused."""
        refused, *out = flags
        if refused and not self.refused:
            self._refuse(_ELSEWHERE)
        kept = tuple(x for x, is_out in zip(passes, out, strict=True) if not is_out)
        for name in set(self._passes) - set(kept):
            self._leave(Left(name, "", _ELSEWHERE))
        self._passes = tuple(name for name in self._passes if name in kept)


class UnitFunction(_ShardedFunction):
    """The forward of units of one kind, within the hooks of each."""

    def __init__(self, compilation: Compilation, run: Callable[..., Any]) -> None:
        super().__init__(compilation, run, (False,))
        self.count = 0
        self._within_units: dict[nn.Module, UnitCalls] = {}
        self._ran_compiled = False
        self._used: dict[nn.Module, Callable[..., Any]] = {}
        """What has run in the last forward of each unit."""

    def call(self, kind: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of a unit in this form; a checkpointed segment runs again as it did."""
        self._module = module
        if in_backward() and module in self._used:
            return self._used[module](module, *args, **kwargs)
        self.kind, self.is_used = kind, True
        output = self(module, *args, **kwargs)
        self._used[module] = self._variant()[0] if self._ran_compiled else self._as_it_is
        return output

    def _calls(self) -> UnitCalls:
        if self._module not in self._within_units:
            units = units_of(self._module, itself=False)
            self._within_units[self._module] = UnitCalls(units)
        return self._within_units[self._module]

    def _settings(self, kind: str) -> dict[str, Any]:
        # Weights are gathered and gradients reduced for all of a unit.
        return super()._settings(kind) | {"regions": False}

    @contextmanager
    def _within(self, *, compiled: bool) -> Iterator[None]:
        calls = self._calls()
        self._ran_compiled = compiled
        if not (compiled and calls):
            # A compiled block is called as it is: the settings of the whole function last.
            yield
            return
        with calls.single():
            yield

    def lines(self) -> list[str]:
        form, *lines = super().lines()
        del form
        name = type(self._module).__name__.removeprefix("FSDP")
        return [f"units              {self.count:>4} × {name}", *(f"  {one}" for one in lines)]


class WholeFunction(_ShardedFunction):
    """A function that calls the model, within the hooks of the model."""

    def __init__(
        self,
        sharded: ShardedFunctions,
        compilation: Compilation,
        run: Callable[..., Any],
        graphs: Iterable[bool],
    ) -> None:
        super().__init__(compilation, run, graphs)
        self._sharded = sharded
        self._calls_in: Counter[str] = Counter()
        self._unit_calls = UnitCalls(units_of(self._module, itself=False))
        self.choice = SharedChoice(
            graphs, clock_of(compilation.device), self._key,
            groups=sharded.groups, device=compilation.device,
        )  # fmt: skip

    def _calls(self) -> UnitCalls:
        return self._unit_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._sharded.leading = self
        if isinstance(self._owner.copies, Fp8Gathers):
            self._owner.copies.require()
        if is_unit(self._module) and not runs_forward(self._module):
            return self._through_hooks(args, kwargs)
        # A unit cannot take it, and a training step does not read it.
        with without_cache(self._module):
            output = super().__call__(*args, **kwargs)
        if self.kind != AS_IT_IS and not is_capturing():
            self._calls_in[self.kind] += 1
            if self._calls_in[self.kind] == _CALLS_COMPARED:
                self._sharded.agree(self)
        return output

    def _through_hooks(self, args: Any, kwargs: Any) -> Any:
        """Run a loss function within the hooks of the model, where head and loss can be fused."""
        if self._hooks_of([self._module]):
            # They expect the inputs and the output of the model.
            return self._run(*args, **kwargs)
        self._owner.in_hooks = self
        try:
            return self._module(*args, **kwargs)
        finally:
            self._owner.in_hooks = None

    @contextmanager
    def _within(self, *, compiled: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._owner.suspended())
            stack.enter_context(tracing_settings(skip_fsdp_guards=False))
            if is_unit(self._module):
                stack.enter_context(bare(self._module))
            if compiled:
                stack.enter_context(self._unit_calls.single())
            yield

    def _key(self) -> str:
        policies = {str(policy_of(one)) for one in self._module.modules() if is_unit(one)}
        sizes = [torch.distributed.get_world_size(one) for one in self._sharded.groups]
        return digest_of(super()._key(), sorted(policies), sizes)


def _kind_of(unit: nn.Module) -> tuple[object, ...]:
    """Return what units have in common that run the same code."""
    parts = tuple((name, type(x)) for name, x in unit.named_modules())
    weights = tuple(
        (name, tuple(x.shape), x.dtype, x.requires_grad) for name, x in unit.named_parameters()
    )
    return type(unit), parts, weights


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = computed((args, kwargs))
    return type(module).forward(module, *args, **kwargs)


def _below(layer: Layer) -> Callable[..., Any]:
    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = computed((args, kwargs))
        return layer.below(*args, **kwargs)

    return run
