"""A mode of the dispatcher that attributes each operator of a step to a line of the user's code.

It runs in two steps of the program that are not timed. The first one only notes values, so that the
second one shows which results are the same again.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import msgspec
import torch

from stepscope.advisor.lines.operators import (
    Operator,
    digest,
    operator_of,
    selects_by_mask,
    storage_of,
    tensors,
)
from stepscope.advisor.lines.places import Places
from stepscope.advisor.lines.stack import (
    Activation,
    LoopKey,
    Stack,
    calls_of,
    instruction,
    main_frame,
    source_of,
)
from stepscope.advisor.lines.unused import Results
from stepscope.analysis.lines.facts import Labels, Lines, Loop, Padding, Site
from stepscope.analysis.lines.observed import COPY, SAME, WAIT, Observed
from stepscope.errors import one_line
from stepscope.measure.dispatch import FunctionMode, Observer

_NO_BACKWARD = -1
_LOGITS_THROUGH = 8
"""Operators between a matmul and the loss through which logits are followed."""
_RANGES = "profiler::"
"""Operators that mark ranges for a profiler, which are ours, or of no cost without one."""
_SMALLEST_VOCABULARY = 64
"""Rows of an embedding below which it is not one of tokens, but of their types."""

Calls = tuple[tuple[CodeType, int], ...]


class _Key(NamedTuple):
    calls: Calls
    loops: tuple[LoopKey, ...]
    own: bool


class _Made(NamedTuple):
    """Where a storage was written last."""

    iterations: tuple[tuple[int, int], ...]
    """Numbers of the activations of the loops around it, and their iterations."""
    carried: frozenset[int]
    """Activations in which it depends on an earlier iteration."""
    constant: bool
    """It depends on no input and no parameter."""
    head: int = -1
    """Site of the matmul that its values come from."""
    distance: int = 0
    """Operators since then."""


class _Loop:
    """Counts of a loop."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.activations: dict[int, int] = {}
        """Iterations of each activation."""
        self.parameters: dict[int, tuple[int, int]] = {}
        """The iteration in which each parameter was read last."""
        self.updated: set[int] = set()
        self.gradients: set[int] = set()
        self.trains = False


class LineObserver(Observer):  # type: ignore[no-untyped-call]
    """Attributes operators to lines while it is active; `observing` makes it so for a step."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled, and is not looked into."""
        return True

    def __init__(self, parameters: Iterable[torch.Tensor], root: Path, most: int) -> None:
        super().__init__()
        self.operators = 0
        """Operators of the step so far."""
        self.failure = ""
        self._parameters = list(parameters)
        self._weights = {storage_of(one) for one in self._parameters} - {0}
        self._gradients: dict[int, torch.Tensor] = {}
        self._root = root
        self._most = most
        self._complete = False
        self._call = 0
        self._stacks: dict[int, Stack] = {}
        self._sites: dict[_Key, int] = {}
        self._counts: list[Counter[str]] = []
        self._loops: dict[LoopKey, _Loop] = {}
        self._made: dict[int, _Made] = {}
        self._creators: dict[int, dict[int, int]] = {}
        """Site of the operator that created each autograd node, by thread and number."""
        self._graph_task = _NO_BACKWARD
        self._names: dict[str, int] = {}
        self._columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        """Name, site and flags of each operator."""
        self._constants: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        """Digests of constants by name and site: the index of the operator, bytes and digest."""
        self._before: dict[tuple[int, int], list[int]] = {}
        """The digests of the first step."""
        self._labels: dict[int, Labels] = {}
        self._padding: dict[int, Padding] = {}
        self._results = Results()

    @property
    def too_many(self) -> bool:
        return self.operators > self._most

    @contextmanager
    def observing(self, *, complete: bool, functions: bool) -> Iterator[None]:
        """Observe a step, or note its values only. With `functions`, calls of torch functions are
        distinguished by a function mode, which compiled code does not allow."""
        self._complete, self.operators = complete, 0
        self._made.clear()
        self._results.clear()
        self._creators.clear()
        if not complete:
            self._before.clear()
        self._find_gradients()
        with ExitStack() as stack:
            if functions:
                stack.enter_context(_FunctionCalls(self._count_call))
            stack.enter_context(self)
            try:
                yield
            finally:
                for one in self._stacks.values():
                    one.clear()

    def _count_call(self) -> None:
        self._call += 1

    def aside(self, note: Callable[..., None], *given: Any) -> None:
        if self.failure or self.too_many:
            return
        try:
            note(*given)
        except Exception as error:
            self.failure = one_line(error)

    def before(self) -> None:
        """Read the stack, which also releases the frames of the previous operator."""
        self.operators += 1
        self._stack.read(sys._getframe(), self._call)

    @property
    def _stack(self) -> Stack:
        return self._stacks.setdefault(threading.get_ident(), Stack())

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        operator, stack = operator_of(function), self._stack
        if operator.name.startswith(_RANGES):
            return
        site, backward = self._site(stack)
        loops = stack.loops if not backward else []
        inputs = [*tensors(arguments), *tensors(tuple(keywords.values()))]
        outputs = list(tensors(result))
        flow = self._flow(operator, site, loops, inputs, outputs)
        # An upload may have the same values each time, whatever they depend on.
        source, target = _copied(operator, inputs, outputs)
        uploads = source is not None and target is not None and _is_upload(source, target)
        repeatable = not backward and (uploads or (flow.constant and operator.has_values))
        name = self._names.setdefault(operator.name, len(self._names))
        if not self._complete:
            if repeatable:
                self._before.setdefault((name, site), []).extend(filter(None, map(digest, outputs)))
            # The memory ledger of this step must not see frames, and their tensors, live longer.
            stack.clear()
            return
        counts = self._counts[site]
        if backward:
            counts["backward"] += 1
        else:
            counts["operators"] += 1
            counts["runs"] += stack.anew
            self._count_in_loops(operator, loops, flow, inputs, outputs)
        self._results.note(operator, -1 if backward else site, inputs, outputs)
        flags = self._effects(operator, counts, arguments, inputs, outputs, (source, target))
        index = len(self._columns[0])
        if repeatable:
            self._note_constant(name, site, index, outputs)
        for column, value in zip(self._columns, (name, site, flags), strict=True):
            column.append(value)
        if not _capturing(inputs):
            if operator.base in ("nll_loss_forward", "nll_loss2d_forward"):
                self._note_labels(site, arguments)
            elif operator.base == "embedding":
                self._note_padding(site, arguments)

    def _site(self, stack: Stack) -> tuple[int, bool]:
        """The line that the operator belongs to, and whether it is part of a backward pass."""
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._turn(task, stack)
        recomputes = stack.recomputes
        if task == _NO_BACKWARD or recomputes:
            key = _Key(stack.calls, tuple(one.key for one in stack.loops), stack.own)
            site = self._number(key)
            creators = self._creators.setdefault(threading.get_ident(), {})
            # An operator that creates no node comes after the one that created the last.
            creators.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
            return site, recomputes
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        own = self._creators.get(threading.get_ident(), {})
        for creators in (own, *self._creators.values()):
            if number in creators:
                return creators[number], True
        frame = main_frame()
        return self._number(_Key(stack.calls or calls_of(frame), (), False)), True

    def _number(self, key: _Key) -> int:
        site = self._sites.setdefault(key, len(self._sites))
        if site == len(self._counts):
            self._counts.append(Counter())
        return site

    def _turn(self, task: int, stack: Stack) -> None:
        """A backward pass begins or ends."""
        self._graph_task = task
        if task == _NO_BACKWARD:
            self._find_gradients()
            return
        for code, offset in stack.calls or calls_of(main_frame()):
            for key in instruction(code, offset).loops:
                self._loops.setdefault(key, _Loop()).trains = True

    def _find_gradients(self) -> None:
        with_gradient = ((one, one.grad) for one in self._parameters if one.grad is not None)
        self._gradients = {storage_of(gradient): one for one, gradient in with_gradient}

    def _gradients_among(self, storages: set[int]) -> set[int]:
        """The gradients among these storages; the memory of one may have been freed since."""
        known = ((key, self._gradients.get(key)) for key in storages)
        now = ((key, None if one is None else one.grad) for key, one in known)
        return {key for key, grad in now if grad is not None and storage_of(grad) == key}

    def _flow(
        self,
        operator: Operator,
        site: int,
        loops: Sequence[Activation],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> _Made:
        """Note where the results come from."""
        now = {one.number: one.iteration for one in loops}
        read = inputs[1:] if operator.overwrites else inputs
        carried: set[int] = set()
        constant = not operator.random
        head, distance = (site, 0) if operator.multiplies else (-1, 0)
        for tensor in read:
            made = self._made.get(storage_of(tensor))
            constant = constant and made is not None and made.constant
            if made is None:
                continue
            if head < 0 and made.distance < _LOGITS_THROUGH:
                head, distance = made.head, made.distance + 1
            for number, iteration in made.iterations:
                if number in now and (iteration < now[number] or number in made.carried):
                    carried.add(number)
        flow = _Made(tuple(now.items()), frozenset(carried), constant, head, distance)
        if not operator.view:
            for tensor in outputs:
                if key := storage_of(tensor):
                    self._made[key] = flow
        return flow

    def _count_in_loops(
        self,
        operator: Operator,
        loops: Sequence[Activation],
        flow: _Made,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        if not loops:
            return
        read = {storage_of(tensor) for tensor in inputs}
        weights, gradients = read & self._weights, self._gradients_among(read)
        written = {storage_of(one) for one in outputs} if operator.mutates else set()
        for one in loops:
            loop = self._loops.setdefault(one.key, _Loop())
            loop.activations[one.number] = one.iteration + 1
            if not operator.view:
                loop.counts["operators"] += 1
                loop.counts["carried"] += one.number in flow.carried
                loop.counts["matmuls"] += operator.multiplies
                loop.counts["softmaxes"] += "softmax" in operator.base
            at = one.number, one.iteration
            for weight in weights:
                if loop.parameters.get(weight) != at:
                    loop.parameters[weight] = at
                    loop.counts["reads"] += 1
            loop.gradients |= gradients
            loop.updated |= written & (self._weights | gradients)

    def _effects(
        self,
        operator: Operator,
        counts: Counter[str],
        arguments: tuple[Any, ...],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        copied: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> int:
        """Count copies, allocations and waits; return the flags of the operator."""
        flags = 0
        known = {storage_of(tensor) for tensor in inputs}
        new = [one for one in outputs if storage_of(one) not in known]
        counts["allocated"] += sum(one.untyped_storage().nbytes() for one in new)
        on_device = any(tensor.is_cuda for tensor in inputs)
        source, target = copied
        downloads = False
        if source is not None and target is not None:
            flags |= COPY
            counts["copied"] += target.numel() * target.element_size()
            downloads = source.device.type != "cpu" and target.device.type == "cpu"
            if source.device.type == target.device.type:
                counts["casts" if source.dtype != target.dtype else "layouts"] += 1
            counts["uploads"] += _is_upload(source, target)
        if downloads or operator.reads_values or selects_by_mask(operator, arguments):
            counts["reads"] += 1
            if on_device:
                counts["waits"] += 1
                flags |= WAIT
        return flags

    def _note_constant(
        self, name: int, site: int, index: int, outputs: Sequence[torch.Tensor]
    ) -> None:
        for tensor in outputs:
            if (value := digest(tensor)) is not None:
                size = tensor.numel() * tensor.element_size()
                self._constants.setdefault((name, site), []).append((index, size, value))

    def _note_labels(self, site: int, arguments: tuple[Any, ...]) -> None:
        logits, target, ignored = arguments[0], arguments[1], arguments[4]
        with torch.no_grad():
            skipped = int((target == ignored).sum())
        made = self._made.get(storage_of(logits))
        before = self._labels.get(site, Labels(site=site))
        self._labels[site] = msgspec.structs.replace(
            before,
            head=before.head if made is None else made.head,
            labels=before.labels + target.numel(),
            ignored=before.ignored + skipped,
        )

    def _note_padding(self, site: int, arguments: tuple[Any, ...]) -> None:
        table, tokens = arguments[0], arguments[1]
        padding = arguments[2] if len(arguments) > 2 else -1
        if tokens.dim() < 2 or table.shape[0] < _SMALLEST_VOCABULARY:
            return
        with torch.no_grad():
            padded = int((tokens == padding).sum()) if padding >= 0 else _repeated_ends(tokens)
        before = self._padding.get(site, Padding(site=site))
        self._padding[site] = msgspec.structs.replace(
            before, tokens=before.tokens + tokens.numel(), padding=before.padding + padded
        )

    def result(self, *, on_device: bool) -> Observed:
        """What was observed, without costs."""
        same: Counter[int] = Counter()
        same_bytes: Counter[int] = Counter()
        names, sites, flags = self._columns
        for key, first in self._constants.items():
            for (index, size, value), before in zip(first, self._before.get(key, []), strict=False):
                if value == before:
                    flags[index] |= SAME
                    same[sites[index]] += 1
                    same_bytes[sites[index]] += size
        computed, unused = self._results.computed(), self._results.unused()
        places = Places(self._root)
        loops = {key: number for number, key in enumerate(self._loops)}
        made = [
            Site(
                stack=tuple(places.number(*call) for call in key.calls),
                loops=tuple(loops[one] for one in key.loops if one in loops),
                own=key.own,
                call=instruction(*key.calls[-1]).call if key.calls else "",
                runs=counts["runs"],
                operators=counts["operators"],
                backward=counts["backward"],
                waits=counts["waits"],
                reads=counts["reads"],
                uploads=counts["uploads"],
                casts=counts["casts"],
                layouts=counts["layouts"],
                copied_bytes=counts["copied"],
                allocated_bytes=counts["allocated"],
                same=same[number],
                same_bytes=same_bytes[number],
                computed=computed[number],
                unused=unused[number],
            )
            for number, (key, counts) in enumerate(zip(self._sites, self._counts, strict=True))
        ]
        headers = tuple(_header(places, key, one) for key, one in self._loops.items())
        lines = Lines(
            on_device=on_device,
            places=tuple(places.all),
            loops=headers,
            sites=tuple(made),
            labels=tuple(one for one in self._labels.values() if one.ignored),
            padding=tuple(one for one in self._padding.values() if one.padding),
        )
        return Observed(lines=lines, names=tuple(self._names), name=names, site=sites, flags=flags)


def _copied(
    operator: Operator, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The source and the result of a copy; None for other operators."""
    if operator.base == "copy_" and len(inputs) > 1:
        return inputs[1], inputs[0]
    if operator.base in ("_to_copy", "clone", "contiguous") and inputs and outputs:
        return inputs[0], outputs[0]
    return None, None


def _is_upload(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.device.type == "cpu" and target.device.type != "cpu"


def _capturing(inputs: Sequence[torch.Tensor]) -> bool:
    """Return True if values cannot be read, because a CUDA graph is being captured."""
    on_gpu = any(tensor.is_cuda for tensor in inputs)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _repeated_ends(tokens: torch.Tensor) -> int:
    """Tokens after the second of a row's last ones that are equal, if several rows end in the same
    one: padding without an index for it."""
    last = tokens[..., -1:]
    equal = (tokens == last).flip(-1).to(torch.uint8).cumprod(-1).sum(-1)
    value = last.flatten().mode().values
    rows = (last.squeeze(-1) == value) & (equal > 1)
    return int(equal[rows].sum()) if int(rows.sum()) > 1 else 0


class _FunctionCalls(FunctionMode):
    """Calls back at each call of a torch function."""

    def __init__(self, called: Callable[[], None]) -> None:
        super().__init__()
        self._called = called

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._called()
        return function(*arguments, **keywords)


def _header(places: Places, key: LoopKey, counted: _Loop) -> Loop:
    code, index = key
    counts = counted.counts
    return Loop(
        place=places.line(code, source_of(code.co_filename).loops[index].line),
        entries=len(counted.activations),
        iterations=sum(counted.activations.values()),
        operators=counts["operators"],
        carried=counts["carried"],
        matmuls=counts["matmuls"],
        softmaxes=counts["softmaxes"],
        parameters=len(counted.parameters),
        parameter_reads=counts["reads"],
        updated=len(counted.updated),
        gradients=len(counted.gradients),
        trains=counted.trains,
    )
