"""A function that runs a training step, as CUDA graphs.

The first calls with new shapes run eagerly and are real steps. Then the step is captured, which
executes nothing, and replayed from there on. The Python code of the function does not run in a
replay: what it decides, prints or counts stays as it was in the capture.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.graphs.arguments import (
    Call,
    NotCapturableError,
    StaticInputs,
    describe,
    fresh,
    refuse_result,
    with_tensors,
)
from stepscope.acceleration.graphs.casts import Casts, WrittenCasts
from stepscope.acceleration.graphs.cuda import Backend, CudaGraphs, Cut, Replayable
from stepscope.acceleration.graphs.discovery import find_objects
from stepscope.acceleration.graphs.groups import WARM_UP, in_group, why_not_captured
from stepscope.acceleration.graphs.optimizers import watched_steps
from stepscope.acceleration.graphs.state import (
    HostRandom,
    Snapshot,
    State,
    increment_versions,
)
from stepscope.errors import StepscopeError, first_cause
from stepscope.torch_tools.capturing import is_capturing

_IDLE_CALLS = 100
"""Calls without use after which a graph makes room for another."""
_MAX_CAPTURES = 5
"""Captures of one key after which it stays eager: what it depends on keeps changing."""
_MAX_KEYS = 256
_UNSTABLE_CALLS = 20
"""Eager calls beyond the warm-up after which the reason is reported: something keeps changing."""


class NotCapturedWarning(UserWarning):
    """A captured function runs eagerly; the message says why."""


@dataclass
class Statistics:
    """Counts of the calls of a captured function, by how they ran."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0

    @property
    def calls(self) -> int:
        return self.eager + self.replayed


class _Graph(NamedTuple):
    """A captured step with everything that it reads."""

    graph: Replayable
    inputs: StaticInputs
    result: Any
    exit_gradients: list[Tensor | None]
    written: list[Tensor]
    """Parameters that it updates."""
    recopies: bool
    """True if it repeats all casts of weights, so that a write by hand is honored."""
    casts: WrittenCasts
    """Casts of weights that it reads and its update writes."""
    generation: int


@dataclass
class _Entry:
    """State of the calls with one key."""

    calls: int = 0
    last_used: int = 0
    captures: int = 0
    graph: _Graph | None = None
    snapshot: Snapshot | None = None
    refused: str | None = None


class Captured:
    """A function as CUDA graphs; made by `stepscope.capture`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        warmup: int = 3,
        max_graphs: int = 8,
        pool_bytes: int | None = None,
        modules: Iterable[nn.Module] | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        parameters: Callable[[], list[Tensor]] = list,
        written_between: bool = False,
        required: bool = False,
        on_failure: Callable[[], None] | None = None,
        backend: Backend | None = None,
        in_groups: bool = True,
    ) -> None:
        if warmup < 1:
            raise ValueError("warmup must be at least 1: the first step creates optimizer state")
        if max_graphs < 1:
            raise ValueError("max_graphs must be at least 1")
        functools.update_wrapper(self, function)
        self._function = function
        self._warmup, self._max_graphs, self._pool_bytes = warmup, max_graphs, pool_bytes
        self._modules = None if modules is None else list(modules)
        self._optimizers = _listed(optimizer)
        self._parameters = parameters
        self._required, self._on_failure, self._in_groups = required, on_failure, in_groups
        self._backend, self._given_backend = backend, backend is not None
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._found: list[Optimizer] = []
        self._state = State((), ())
        self._casts = Casts(())
        self._versions: list[int] = []
        self._reads_gradients: bool | None = None
        self._written_by_hand = written_between
        self._warmed_up = False
        """Whether the last call ran on the stream of the captures."""
        self.statistics = Statistics()
        self.reasons: list[str] = []
        """Reasons why calls ran eagerly, each once."""

    @property
    def graphs(self) -> int:
        """Number of graphs in memory."""
        return sum(entry.graph is not None for entry in self._entries.values())

    def held_bytes(self) -> int:
        """Return the bytes that the graphs hold."""
        return 0 if self._backend is None else self._backend.pool_bytes()

    def explain(self) -> str:
        """Say how the calls ran, and why some were not captured."""
        counts = self.statistics
        text = (
            f"{self.graphs} CUDA graph{'s' * (self.graphs != 1)}; {counts.replayed} calls replayed,"
            f" {counts.eager} eager"
        )
        reasons = list(self.reasons)
        if counts.eager and self._backend is None and not reasons:
            reasons.append("no tensor is on a CUDA device")
        elif not (reasons or self.graphs) and counts.eager >= self._warmup + _UNSTABLE_CALLS:
            reasons.append("no key was seen often enough: each call has new arguments or gradients")
        return "; ".join([text, *reasons])

    __str__ = explain

    def reset(self) -> None:
        """Drop all graphs and their memory. The next calls are warm-up again."""
        self._entries.clear()
        if not self._given_backend:
            self._backend = None

    def leave_stream(self) -> None:
        """Let the next eager step create nodes of autograd on the current stream. Those of the
        warm-up, which reference cycles of compiled code keep alive, have another one: it would hand
        over every gradient, in as much time as the step takes."""
        if self._warmed_up:
            gc.collect()
        self._warmed_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded_by_another():
            return self._function(*args, **kwargs)
        try:
            call = describe(args, kwargs)
            self._update_state(call)
            backend = self._backend_for(call)
        except NotCapturableError as error:
            return self._refuse(str(error), args, kwargs)
        if backend is None:
            return self._eager(args, kwargs)
        return self._call(backend, self._entry(call), call, args, kwargs)

    def _call(
        self,
        backend: Backend,
        entry: _Entry,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if entry.refused is not None:
            return self._refuse(entry.refused, args, kwargs)
        change = self._changed(entry, backend)
        if entry.graph is not None and change is None:
            return self._replay(entry, call)
        if entry.graph is not None:
            # One eager step creates what the change needs, such as optimizer state.
            entry.graph, entry.calls = None, self._warmup - 1
        if change is not None and not self._state.is_complete():
            self._replace_state(self._state.now())
            entry = self._entry(call)
        if entry.calls >= self._warmup and change is None and self._knows_gradients():
            why = self._capture(backend, entry, call, args, kwargs)
            if why is None:
                return self._replay(entry, call)
            return self._refuse(why, args, kwargs)
        if change is not None and entry.calls >= self._warmup + _UNSTABLE_CALLS:
            return self._refuse(change, args, kwargs)
        return self._warm_up(backend, entry, args, kwargs)

    # State

    def _update_state(self, call: Call) -> None:
        modules, optimizers = self._modules, self._optimizers
        if modules is None or optimizers is None:
            found_modules, found_optimizers = find_objects(self._function)
            modules = found_modules if modules is None else modules
            optimizers = found_optimizers if optimizers is None else optimizers
        modules = [*modules, *(one for one in call.objects if isinstance(one, nn.Module))]
        optimizers = [*optimizers, *(one for one in call.objects if isinstance(one, Optimizer))]
        optimizers += [one for one in self._found if not any(one is other for other in optimizers)]
        parameters = self._parameters()
        if not self._state.has(modules, optimizers, parameters):
            self._replace_state(State(modules, optimizers, parameters))

    def _replace_state(self, state: State) -> None:
        self._state = state
        self._casts = Casts(state.optimizers)
        self._versions = state.versions()
        # Graphs and snapshots belong to the former objects.
        self._entries.clear()

    def _backend_for(self, call: Call) -> Backend | None:
        """Return what captures this call; None if everything is on the host."""
        if self._given_backend:
            return self._backend
        devices = {tensor.device for tensor in call.tensors} | self._state.devices()
        if all(device.type != "cuda" for device in devices):
            if self._required:
                raise NotCapturableError("there is no tensor on a CUDA device")
            return None
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise NotCapturableError(f"its tensors are on several devices: {names}")
        if reason := why_not_captured(self._state.roots, asked_for=self._in_groups):
            raise NotCapturableError(reason)
        if self._backend is None:
            if in_group():
                self._warmup = max(self._warmup, WARM_UP)
            self._backend = CudaGraphs(devices.pop())
        return self._backend

    def _entry(self, call: Call) -> _Entry:
        # A graph that adds to gradients does so at their addresses.
        gradients = _addresses(self._state.gradients()) if self._reads_gradients else []
        key = (call.key, self._state.modes(), tuple(gradients))
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MAX_KEYS:
                self._drop_one_key()
            entry = self._entries[key] = _Entry()
        self._entries.move_to_end(key)
        entry.last_used = self.statistics.calls
        return entry

    def _drop_one_key(self) -> None:
        keys = (key for key, entry in self._entries.items() if entry.graph is None)
        del self._entries[next(keys, next(iter(self._entries)))]

    def _changed(self, entry: _Entry, backend: Backend) -> str | None:
        """Say what has changed since the last call with this key; None if a graph is still valid,
        or can be captured."""
        change = None if entry.snapshot is None else entry.snapshot.difference()
        graph = entry.graph
        if graph is None or change is not None:
            return change
        if graph.generation != backend.generation:
            return "the random number generator was replaced"
        if not self._knows_gradients():
            return "there are gradients at the start of the step for the first time"
        changed = self._state.versions() != self._versions
        if not graph.recopies and (changed or graph.casts.were_stale):
            self._written_by_hand = True
            return "weights were written between steps for the first time"
        return None

    def _knows_gradients(self) -> bool:
        """Return whether it is known if the step uses the gradients that are there now."""
        return self._reads_gradients is not None or not any(
            gradient is not None for gradient in self._state.gradients()
        )

    # Eager calls

    def _refuse(self, why: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run eagerly and say why, once."""
        if self._required:
            raise StepscopeError(f"{self._name()} cannot be captured: {why}")
        self._say(why)
        return self._eager(args, kwargs)

    def _say(self, why: str) -> None:
        if why not in self.reasons:
            self.reasons.append(why)
            message = f"{self._name()} runs eagerly, not as a CUDA graph: {why}"
            warnings.warn(message, NotCapturedWarning, stacklevel=2)

    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))

    def _eager(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, warmup: bool = False
    ) -> Any:
        if not warmup:
            self.leave_stream()
        before = self._state.versions()
        keeps = (warmup or self.graphs > 0) and not self._written_by_hand
        self.statistics.eager += 1
        try:
            # Graphs read the casts that an update in this call would otherwise leave behind.
            with self._casts.kept(read=False) if keeps else nullcontext():
                result = self._function(*args, **kwargs)
        except Exception as error:
            if self._state.versions() != before:
                error.add_note("Parameters were updated before this error in a captured step.")
            raise
        finally:
            self._versions = self._state.versions()
        return fresh(result)

    def _warm_up(
        self, backend: Backend, entry: _Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a real step eagerly, and learn what a capture has to know."""
        usage = _GradientUsage(self._state)
        numbers, rates = HostRandom(), self._state.learning_rates()

        def on_step(optimizer: Optimizer) -> None:
            usage.look()
            known = [*self._state.optimizers, *self._found]
            if not any(optimizer is one for one in known):
                self._found.append(optimizer)

        with watched_steps(self._state.optimizers, on_step), backend.on_side_stream():
            result = self._eager(args, kwargs, warmup=True)
        self._warmed_up = True
        entry.calls += 1
        self._learn(usage)
        if numbers.was_used():
            entry.refused = "it draws random numbers on the host, which a graph would repeat"
        elif rates != self._state.learning_rates():
            entry.refused = (
                "it changes the learning rate: a scheduler's step() belongs after the function"
            )
        try:
            refuse_result(result)
        except NotCapturableError as error:
            entry.refused = str(error)
        entry.snapshot = Snapshot(self._state)
        return result

    def _learn(self, usage: _GradientUsage) -> None:
        used = usage.end()
        if used is None or used == self._reads_gradients:
            return
        if used and not self._reads_gradients:
            # Keys have the gradients' presence from here on.
            self._entries.clear()
        self._reads_gradients = used or bool(self._reads_gradients)

    # Graphs

    def _capture(
        self,
        backend: Backend,
        entry: _Entry,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> str | None:
        """Capture the step, which executes nothing; return why that was not possible."""
        if entry.captures >= _MAX_CAPTURES:
            entry.refused = f"what it uses changed after each of {_MAX_CAPTURES} captures"
            return entry.refused
        if self.graphs >= self._max_graphs and not self._evicted():
            return f"there are {self._max_graphs} graphs already (max_graphs)"
        entry.captures += 1
        try:
            entry.graph = self._record(backend, args, kwargs, call)
        except Exception as error:
            entry.refused = f"the capture failed: {first_cause(error)}"
            return entry.refused
        entry.snapshot = Snapshot(self._state)
        if self._pool_bytes is not None and backend.pool_bytes() > self._pool_bytes:
            entry.graph = None
            entry.refused = f"its graph would exceed pool_bytes={self._pool_bytes}"
            return entry.refused
        self.statistics.captured += 1
        return None

    def _evicted(self) -> bool:
        """Drop the least recently used graph if it is idle."""
        oldest = next(entry for entry in self._entries.values() if entry.graph is not None)
        if self.statistics.calls - oldest.last_used <= _IDLE_CALLS:
            return False
        oldest.graph, oldest.calls = None, 0
        return True

    def _record(
        self, backend: Backend, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call
    ) -> _Graph:
        state = self._state
        if self._written_by_hand:
            # Every copy of a weight is out of date, so that the graph includes its refresh.
            increment_versions(state.parameters)
        else:
            self._casts.refresh()
        if not self._reads_gradients:
            # The step replaces them: their memory is free for the graph.
            state.set_gradients([None] * len(state.parameters))
        gradients = state.gradients()
        inputs, before = StaticInputs(args, kwargs, call), state.versions()
        try:
            for control in state.controls:
                control.begin()
            with state.kept_optimizer_state():
                graph, result = backend.capture(lambda cut: self._run_captured(inputs, cut))
        except BaseException:
            self._recover(gradients)
            raise
        self._versions = after = state.versions()
        # What the captured update has marked: a replay writes it.
        casts = WrittenCasts(()) if self._written_by_hand else self._casts.written()
        return _Graph(
            graph,
            inputs,
            result,
            state.gradients(),
            [p for p, a, b in zip(state.parameters, before, after, strict=True) if a != b],
            self._written_by_hand,
            casts,
            backend.generation,
        )

    def _run_captured(self, inputs: StaticInputs, cut: Cut) -> Any:
        controls = {id(control.optimizer): control for control in self._state.controls}

        def on_step(optimizer: Optimizer) -> None:
            control = controls.get(id(optimizer))
            if control is not None and control.prepares:
                # The addresses of the gradients are known from here on.
                cut(control.prepare)

        # Casts of weights that were cached before would be stale in every replay.
        torch.clear_autocast_cache()
        try:
            kept = nullcontext() if self._written_by_hand else self._casts.kept(read=True)
            with kept, self._state.captured(), watched_steps(self._state.optimizers, on_step):
                result = self._function(*inputs.args, **inputs.kwargs)
        finally:
            torch.clear_autocast_cache()
        refuse_result(result)
        return with_tensors(result, lambda tensor: tensor.detach())

    def _recover(self, gradients: list[Tensor | None]) -> None:
        """Restore what a failed capture changed on the host."""
        self._state.set_gradients(gradients)
        for control in self._state.controls:
            control.revert()
            control.abandon()
        if self._on_failure is not None:
            self._on_failure()
        self._versions = self._state.versions()

    def _replay(self, entry: _Entry, call: Call) -> Any:
        captured = entry.graph
        assert captured is not None
        captured.inputs.fill(call.tensors)
        for control in self._state.controls:
            control.refresh()
        captured.casts.refresh()
        captured.graph.replay()
        self.statistics.replayed += 1
        # torch does not see the writes of a replay; a copy of a weight must.
        increment_versions(captured.written)
        self._versions = self._state.versions()
        self._state.set_gradients(captured.exit_gradients)
        return fresh(captured.result)


class _GradientUsage:
    """Return True if a step uses gradients that were there when it began.

    It does if one of them is still there in an optimizer's step, or at the end. Gradients that the
    step sets to None first are not used.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._present = {id(one): one for one in state.gradients() if one is not None}
        self._used = False

    def look(self) -> None:
        if self._present and not self._used:
            self._used = any(id(one) in self._present for one in self._state.gradients())

    def end(self) -> bool | None:
        """Return whether gradients were used; None if there were none."""
        self.look()
        return self._used if self._present else None


def capture(
    fn: Callable[..., Any] | None = None,
    *,
    warmup: int = 3,
    max_graphs: int = 8,
    pool_bytes: int | None = None,
    modules: Iterable[nn.Module] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Any:
    """Run a training step as CUDA graphs: one for each combination of shapes, dtypes, other
    arguments, train or eval mode, and autocast.

        @stepscope.capture
        def step(tokens, targets):
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

    The first `warmup` calls of a combination run eagerly and are real steps. At most `max_graphs`
    graphs in at most `pool_bytes` of memory are kept. Results are new tensors without autograd
    history. Modules and optimizers are found in the function's closure, globals and instance;
    `modules` and `optimizer` name them explicitly. What cannot be captured runs eagerly, with one
    warning per reason. On a CPU the function is called as it is.

    Called with keyword arguments only, it returns a decorator.
    """
    make = functools.partial(
        Captured,
        warmup=warmup,
        max_graphs=max_graphs,
        pool_bytes=pool_bytes,
        modules=modules,
        optimizer=optimizer,
    )
    return make if fn is None else make(fn)


def _listed(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer] | None:
    if optimizer is None:
        return None
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _is_recorded_by_another() -> bool:
    return torch.compiler.is_compiling() or is_capturing()


def _addresses(gradients: list[Tensor | None]) -> list[int | None]:
    return [None if gradient is None else gradient.data_ptr() for gradient in gradients]
