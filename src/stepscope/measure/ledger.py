"""Memory ledger of a step: every live storage on exactly one line, at the peak of each phase.

Storages are counted at the dispatcher. Autograd's saved-tensor hooks report what is saved for
backward, with the module, the operator and the line of code that saved it. On CUDA the allocator is
read around every operator, so that temporary memory inside operators and the rounding of blocks are
measured too; the rest is unattributed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.overrides import resolve_name
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.measure.allocator import Statistics
from stepscope.measure.dispatch import FunctionMode
from stepscope.measure.hooks import after_gradient, around_calls
from stepscope.measure.memory_timeline import MemoryTimeline
from stepscope.measure.modules import all_named_parts, model_names
from stepscope.measure.tensors import LiveStorage, TensorBytes
from stepscope.records.memory import (
    GRADIENTS,
    INPUTS,
    KEPT_INPUT,
    LIBRARIES,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED,
    ROUNDING,
    TEMPORARIES,
    WEIGHT_COPIES,
    WITHIN_OPERATORS,
    GradientMoment,
    PhasePeak,
    SavedTensor,
    kind_of,
    saved_line,
)

_NOT_OF_THE_PROGRAM = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        *(Path(__file__).parents[1] / package for package in ("measure", "advisor", "planning")),
    )
)
"""Full paths of torch and of the instruments: the user's program may have folders of these names.
"""


class StorageLedger(TensorBytes):  # type: ignore[no-untyped-call]
    """Attributes all live storages while a step runs inside `watching`; `begin` starts a phase."""

    def __init__(
        self, device: torch.device, allocator: Statistics | None, library_bytes: int = 0
    ) -> None:
        super().__init__(device)
        self.saved: list[SavedTensor] = []
        self.largest: tuple[int, str, str] = (0, "", "")
        """Bytes of the largest new storage, its operator, and the line of code."""
        self.library_bytes = library_bytes
        """Workspace of libraries in the allocator; may be measured afterwards."""
        self.gradients: list[GradientMoment] = []
        """Moments of the gradients, in the order in which the backward pass completed them."""
        self._names: dict[int, str] = {}
        self._allocator = allocator
        self._lines: dict[str, int] = {}
        self._current = ""
        self._best = PhasePeak(phase="", allocated=0, lines={}, operator="")
        self._peaks: dict[str, PhasePeak] = {}
        self._ends: dict[str, PhasePeak] = {}
        self.course = MemoryTimeline()
        """Bytes of each kind of line in the course of the step."""
        self._kinds: dict[str, int] = {}
        self._modules: list[str] = []
        self._functions: list[str] = []

    @property
    def peaks(self) -> list[PhasePeak]:
        """The peak of each phase so far, in the order in which the phases began."""
        return [self._with_libraries(peak) for peak in self._peaks.values()]

    @property
    def ends(self) -> list[PhasePeak]:
        """Live bytes at the end of each phase and at the named moments."""
        return [self._with_libraries(end) for end in self._ends.values()]

    @contextmanager
    def watching(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        with self.watching_all((model,), (optimizer,)):
            yield

    @contextmanager
    def watching_all(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterator[None]:
        """Attribute all existing tensors, and hook the modules to follow the current module."""
        self.aside(self.count_existing, models, optimizers)
        with ExitStack() as stack:
            for model, root in zip(models, model_names(models), strict=True):
                for name, module in all_named_parts(model):
                    for handle in self._hook(f"{root}/{name}".strip("/"), module):
                        stack.callback(handle.remove)
                for name, parameter in model.named_parameters():
                    self._names[id(parameter)] = f"{root}/{name}".strip("/")
                    if parameter.requires_grad:
                        stack.callback(after_gradient(parameter, self._attribute_gradient).remove)
            stack.enter_context(self.seeing_saved(self._pack))
            stack.enter_context(FunctionNames(self._functions))
            stack.enter_context(self)
            yield

    def seeing_saved(
        self, pack: Callable[[torch.Tensor], torch.Tensor]
    ) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)

    def count_existing(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        for model in models:
            self.count(model.parameters(), PARAMETERS)
            self.count(model.buffers(), INPUTS)
            gradients = (p.grad for p in model.parameters() if p.grad is not None)
            self.count(gradients, GRADIENTS)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                self.count((v for v in state.values() if isinstance(v, torch.Tensor)), OPTIMIZER)

    def phase(self, name: str, run: Callable[[], object]) -> None:
        """Run a phase and record its peak."""
        self.begin(name)
        run()
        self.end()

    def begin(self, name: str) -> None:
        """Begin a phase; the previous phase ends."""
        self.end()
        self._current = name
        self._best = self._lines_at(name, self._allocated(), "")

    def end(self) -> None:
        if not self._current:
            return
        known = self._peaks.get(self._current)
        if known is None or self._best.allocated > known.allocated:
            self._peaks[self._current] = self._best
        self.moment(self._current)
        self._current = ""

    def moment(self, name: str) -> None:
        """Record the live bytes now under that name."""
        self._ends[name] = self._lines_at(name, self._allocated(), "")

    def made(self, size: int, operator: str) -> LiveStorage:
        # A module that runs inside the backward pass is being recomputed.
        again = self._current == "backward" and self._modules
        line = RECOMPUTED if again else TEMPORARIES
        self._add(line, size)
        if operator and size > self.largest[0]:
            self.largest = (size, operator, line_of_code())
        return LiveStorage(size, operator, line)

    def freed(self, storage: LiveStorage) -> None:
        self._add(storage.line, -storage.bytes)

    def move(self, storage: LiveStorage, line: str) -> None:
        self._add(storage.line, -storage.bytes)
        self._add(line, storage.bytes)
        storage.line = line

    def _add(self, line: str, size: int) -> None:
        self._lines[line] = self._lines.get(line, 0) + size
        kind = kind_of(line)
        self._kinds[kind] = self._kinds.get(kind, 0) + size

    def before(self) -> None:
        if self._allocator is not None:
            self._allocator.reset_peak()

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        super().after(function, arguments, keywords, result)
        if function is torch.ops.aten._to_copy.default:
            self._mark_weight_copy(arguments[0], result)
        reached = self.now if self._allocator is None else self._allocator.peak()
        if self._current:
            self.course.add(self._current, self._kinds)
        if reached > self._best.allocated:
            self._best = self._lines_at(self._current, reached, str(function))

    def _allocated(self) -> int:
        return self.now if self._allocator is None else self._allocator.allocated()

    def _lines_at(self, phase: str, reached: int, operator: str) -> PhasePeak:
        lines = {line: size for line, size in self._lines.items() if size}
        if self._allocator is not None:
            allocated = self._allocator.allocated()
            lines[WITHIN_OPERATORS] = reached - allocated
            lines[ROUNDING] = allocated - self._allocator.requested()
        return PhasePeak(phase=phase, allocated=reached, lines=lines, operator=operator)

    def _with_libraries(self, peak: PhasePeak) -> PhasePeak:
        if self._allocator is None:
            return peak
        lines = peak.lines | {LIBRARIES: self.library_bytes}
        return msgspec.structs.replace(peak, lines=lines)

    def _mark_weight_copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        if any(original.line == PARAMETERS for original in self.storages_of(source)):
            for storage in self.storages_of(copy):
                self.move(storage, WEIGHT_COPIES)

    def _attribute_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.aside(self.count, (parameter.grad,), GRADIENTS)
            # A sparse gradient has no `nbytes`: its parts are counted as other tensors are.
            dense = parameter.grad.layout is torch.strided
            name, size = self._names.get(id(parameter), ""), parameter.grad.nbytes if dense else 0
            self.gradients.append(GradientMoment(parameter=name, bytes=size, live=self.now))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.aside(self._note_saved, tensor)
        # An autograd node that saves its own output is a reference cycle that no collector breaks.
        with _disable_current_modes():
            return tensor.detach()

    def _note_saved(self, tensor: torch.Tensor) -> None:
        storages = [storage for storage in self.storages_of(tensor) if storage.line == TEMPORARIES]
        if not storages:
            return
        module = self._modules[-1] if self._modules else "loss"
        operator = self._functions[-1] if self._functions else storages[0].operator
        if not self._functions and _called_by("/torch/utils/checkpoint.py"):
            module, operator = KEPT_INPUT.split(", ")
        for storage in storages:
            self.move(storage, saved_line(module, operator))
        self.saved.append(
            SavedTensor(
                module=module,
                operator=operator,
                shape=_known_sizes(tensor),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=sum(storage.bytes for storage in storages),
                code=line_of_code(),
            )
        )

    def _hook(self, name: str, module: torch.nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._modules.append(name)

        def leave(*_: Any) -> None:
            self._modules.pop()

        return around_calls(module, enter, leave)


class FunctionNames(FunctionMode):
    """Tracks the names of the torch functions that are currently being called."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        name = resolve_name(function) or getattr(function, "__name__", "")
        self._names.append(name.rpartition(".")[2].strip("_"))
        try:
            return function(*arguments, **keywords)
        finally:
            self._names.pop()


def _known_sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's shape, with -1 for ragged dimensions."""
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def _called_by(file: str) -> bool:
    """Return True if one of the six nearest callers is in that file."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(6):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def line_of_code() -> str:
    """The innermost line outside of torch and of the instruments. Autograd runs the backward pass
    on a GPU in a separate thread without Python frames; then it is the line where the main thread
    waits.
    """
    own = _outside_of_torch(sys._getframe(1))
    return own or _outside_of_torch(sys._current_frames().get(threading.main_thread().ident or 0))


def _outside_of_torch(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_OF_THE_PROGRAM, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
