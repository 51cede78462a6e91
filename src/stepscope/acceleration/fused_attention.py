"""Fused attention in a model, and nothing else: what a trial times as a change of its own.

The modules whose calls multiply batches of matrices twice, as attention does, and return no weights
are found in one call of the model. Each is traced by Dynamo and runs eagerly, with the call of SDPA
in place of naive attention; the rest of the model runs as it is, with its hooks and checkpointed
segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.nn.modules import module as of_torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.acceleration import torch_internals
from stepscope.acceleration.forward_registry import Layer, add_layer, own_forward, run_own
from stepscope.acceleration.passes.matching import Applied, Left, Outcome
from stepscope.acceleration.passes.sdpa import call_sdpa
from stepscope.acceleration.repeated_parts import retraced
from stepscope.errors import one_line

aten = torch.ops.aten
_BATCHED = (aten.bmm.default, aten.baddbmm.default)
_PLAIN = (bool, int, float, str, type(None))
"""Types of attributes for whose values Dynamo traces a module again, such as the number of a layer.
"""
_NOT_FOUND = "no module has a softmax between two batched matmuls without returning its output"


class FusedAttention:
    """The attention of one model, or of several."""

    def __init__(self) -> None:
        self.applied = 0
        """Naive attention that was replaced, in the graphs so far."""
        self._left: dict[str, None] = {}
        self._found: dict[nn.Module, None] = {}
        self._kinds: dict[object, _Kind] = {}
        self._layers: dict[nn.Module, tuple[_Kind, Layer | None]] = {}
        """The modules that are traced; None: what is added to them is taken back."""
        self._is_on = True
        self._known_breaks = len(torch_internals.graph_breaks())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find the modules that compute attention in the calls within this."""
        with _Watch() as watch:
            yield
        self._found |= watch.found

    def replace(self, others: Collection[nn.Module] = ()) -> None:
        """Let the modules that were found call fused attention from their next call on, but for
        `others`. Call it again after that: those without naive attention run as they are then."""
        for module in self._found.keys() - self._layers.keys() - {*others}:
            key = type(module).forward, own_forward(module), _form(module)
            if key not in self._kinds:
                self._kinds[key] = _Kind(self._note)
            self._layers[module] = self._kinds[key], None
        self.switch(self._is_on)

    def switch(self, on: bool) -> None:
        """Take it back in all modules, or apply it again."""
        self._is_on = on
        for module, (kind, layer) in self._layers.items():
            wanted = on and not kind.is_idle
            if layer is not None and not wanted:
                layer.remove()
                self._layers[module] = kind, None
            elif layer is None and wanted:
                # Below what recomputes activations: both times the same tensors are saved.
                self._layers[module] = kind, add_layer(module, kind.run, self, lowest=True)

    def backend(self, how: str) -> Callable[..., Any]:
        """Return the graph backend with the pass for attention alone, for a compiled model."""
        from stepscope.acceleration.backend import Graphs

        compiler = "inductor-cudagraphs" if how == "graphs" else "inductor"
        graphs = Graphs(passes=("attention",), regions=False, compiler=compiler)

        def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Any:
            compiled = graphs(module, inputs)
            self._note(graphs.reports[-1].outcomes)
            return compiled

        return compile_graph

    def of_function(
        self, function: Callable[..., Any], inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        """Return a function of tensors with its attention fused, for inputs of these shapes; also
        under `vmap`. None if it has none, or cannot be traced."""
        outcomes: list[Outcome] = []
        try:
            with _saved_apart():
                traced = torch_internals.traced_apart(
                    function, inputs, lambda graph: outcomes.extend(call_sdpa(graph))
                )
        except Exception as error:
            # What cannot be traced stays as it is.
            self._left[one_line(error)] = None
            return None
        self._note(outcomes)
        return traced if any(isinstance(one, Applied) for one in outcomes) else None

    def why_not(self) -> str | None:
        """Return why nothing was replaced; None if something was."""
        if self.applied:
            return None
        breaks = torch_internals.graph_breaks()[self._known_breaks :]
        untraced = [f"Dynamo cannot trace {x.line or 'it'}: {x.reason}" for x in breaks]
        return "; ".join([*self._left, *dict.fromkeys(untraced)]) or _NOT_FOUND

    def _note(self, outcomes: Sequence[Outcome] | str) -> None:
        if isinstance(outcomes, str):
            self._left[outcomes] = None
            return
        self.applied += sum(isinstance(one, Applied) for one in outcomes)
        for one in outcomes:
            if isinstance(one, Left):
                self._left[f"{one.line}: {one.reason}" if one.line else one.reason] = None


class _Kind:
    """Modules of one class and equal shapes, which share their graphs."""

    def __init__(self, note: Callable[[Sequence[Outcome] | str], None]) -> None:
        self._note = note
        self._graphs = self._applied = 0
        self._forward = torch_internals.compiled_apart(run_own, self._backend)

    @property
    def is_idle(self) -> bool:
        """True if there was nothing to replace."""
        return bool(self._graphs) and not self._applied

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._forward(module, *args, **kwargs)

    def _backend(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._graphs += 1
        if (why := torch_internals.why_not_retraced(module)) is not None:
            self._note(why)
            return module.forward
        try:
            with _saved_apart():
                fakes = torch_internals.fake_inputs(module, inputs)
                traced = retraced(module, fakes)
                outcomes = call_sdpa(traced)
        except torch_internals.RestartAnalysis:
            raise
        except Exception as error:
            # What cannot be traced again or rewritten runs as Dynamo gave it.
            self._note(one_line(error))
            return module.forward
        self._note(outcomes)
        applied = sum(isinstance(one, Applied) for one in outcomes)
        self._applied += applied
        return traced.forward if applied else module.forward


def _saved_apart() -> saved_tensors_hooks:
    """Keep a trace from a checkpointed segment around it, which counts what is saved within it."""
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def _form(module: nn.Module) -> str:
    """Return what modules have in common that share their graphs."""
    attributes = [
        (name, sorted((key, x) for key, x in vars(part).items() if isinstance(x, _PLAIN)))
        for name, part in module.named_modules()
    ]
    return repr((attributes, [parameter.shape for parameter in module.parameters()]))


class _Call(NamedTuple):
    """What the call of a module has computed so far."""

    matmuls: list[int]
    """One number: of batched matmuls that belong to no attention yet."""
    weights: set[tuple[int, int]]
    """Elements and columns of the outputs of each softmax."""


class _Watch(TorchDispatchMode):
    """Finds the innermost modules with two batched matmuls in a call, which may be in children of
    their own, and without the weights between them in what they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[nn.Module, None] = {}
        self._calls = [_Call([0], set())]
        """Of the modules that run, from the outermost."""

    def __enter__(self) -> _Watch:
        self._hooks = [
            of_torch.register_module_forward_pre_hook(self._begin),
            of_torch.register_module_forward_hook(self._end, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        out = function(*args, **(kwargs or {}))
        self._calls[-1].matmuls[0] += function in _BATCHED
        if function is aten._softmax.default:
            self._calls[-1].weights.add((out.numel(), out.shape[-1]))
        return out

    def _begin(self, *_: Any) -> None:
        self._calls.append(_Call([0], set()))

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        if len(self._calls) == 1:
            return
        call, around = self._calls.pop(), self._calls[-1]
        returned = {(x.numel(), x.shape[-1]) for x in tree_leaves(output) if _is_matrix(x)}
        if call.matmuls[0] > 1 and not call.weights & returned:
            self.found[module] = None
        else:
            around.matmuls[0] += call.matmuls[0]
            around.weights.update(call.weights)


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 2
