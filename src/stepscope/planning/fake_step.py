"""Models, optimizers and batches as fake tensors: shapes and dtypes without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from stepscope.errors import UsageError, one_line
from stepscope.measure.dispatch import FunctionMode
from stepscope.planning.known_values import KnownValues

_DEVICE = torch.device("cpu")


class Fakes:
    """A context in which tensors are created as fake ones."""

    def __init__(self, line_of_code: Callable[[], str]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues(self._mode, line_of_code)
        self._converted = WeakIdKeyDictionary()

    @contextmanager
    def active(self) -> Iterator[None]:
        # Libraries take other paths for what they recognize as a fake tensor, such as a mask that a
        # real run does not need.
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch._subclasses, "FakeTensor", _NotATensor))
            # Fake parameters have weak references, with which they cannot be swapped.
            stack.enter_context(patch.object(torch.utils, "swap_tensors", _assign))
            stack.enter_context(patch.object(torch.autocast, "__init__", _autocast_on_cpu))
            stack.enter_context(patch.object(Tensor, "__deepcopy__", self._deep_copy))
            stack.enter_context(patch.dict(op_implementations_dict, _FAKE_FORMS))
            stack.enter_context(self._mode)
            stack.enter_context(self.values)
            stack.enter_context(_OnCpu())
            yield

    def copy(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        """Copies whose parameters, buffers and optimizer states are fake."""
        memo: dict[int, Any] = {}
        kept = []
        for parameter in model.parameters():
            fake = self._like(parameter)
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = self.tensor(buffer)
        for state in optimizer.state.values() if optimizer is not None else ():
            for value in state.values() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor) and value.dim():
                    kept.append(value)
                    memo[id(value)] = self._like(value)
        try:
            return copy.deepcopy((model, optimizer), memo)
        except Exception as error:
            raise UsageError(
                f"the model or its optimizer cannot be copied: {one_line(error)}",
                "predict it by a function that builds it: stepscope predict --model",
            ) from error

    def batch(self, batch: Any) -> Any:
        """A copy with fake tensors, one for each real one."""
        known: dict[int, Tensor] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in known:
                known[id(leaf)] = self.tensor(leaf)
            return known[id(leaf)]

        return tree_map(fake, batch)

    def replace(self, real: Tensor, fake: Tensor) -> None:
        """Let `converted` return this tensor."""
        self._converted[real] = fake

    def converted(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of a real one, always the same."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._converted:
            self._converted[tensor] = self.tensor(tensor)
        fake: Tensor = self._converted[tensor]
        return fake

    def tensor(self, real: Tensor) -> Tensor:
        """A fake tensor, whose value is known if it is small and the real one has data."""
        # A mode that converts tensors would see those of the calls here.
        with torch._C.DisableTorchFunction():
            fake = self._like(real).requires_grad_(real.requires_grad)
            has_data = real.device.type != "meta" and not isinstance(real, FakeTensor)
            if has_data and not real.requires_grad:
                with _disable_current_modes():
                    # The step may write to it.
                    self.values.know(fake, real.detach().to(_DEVICE, copy=True))
            return fake

    @property
    def _deep_copy(self) -> Callable[[Tensor, dict[int, Any]], Tensor]:
        def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = self.tensor(tensor)
            fake: Tensor = memo[id(tensor)]
            return fake

        return copied

    def _like(self, real: Tensor) -> Tensor:
        with self._mode:
            size, stride = real.size(), real.stride()
            return torch.empty_strided(size, stride, dtype=real.dtype, device=_DEVICE)


def _grouped_mm(
    mode: FakeTensorMode, _: Any, a: Tensor, b: Tensor, offs: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Products of the groups of a mixture of experts. torch knows their shape in bfloat16 only, and
    a GPU computes them in other dtypes too."""
    del bias
    if a.dtype is torch.bfloat16:
        return NotImplemented
    rows, columns = a.shape[-2], b.shape[-1]
    groups = [len(x) for x in (a, b) if x.dim() > _MATRIX]
    if not groups and offs is not None:
        groups = [len(offs), 0]
    shape = (rows, columns) if len(groups) == 1 else (groups[0], rows, columns)
    with mode:
        return a.new_empty(shape, dtype=out_dtype or a.dtype)


_MATRIX = 2
_FAKE_FORMS = {torch.ops.aten._grouped_mm.default: _grouped_mm}


class _NotATensor:
    """Shown as the class of fake tensors to programs that look for one."""


def _assign(parameter: Tensor, converted: Tensor) -> None:
    """Convert a parameter in place, as `nn.Module.to` does with real ones."""
    parameter.data = converted


class _OnCpu(FunctionMode):
    """Takes "cuda" as the CPU, on which the fake tensors are."""

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if function is Tensor.cuda:
            return arguments[0]
        if function is Tensor.to and len(arguments) > 1 and type(arguments[1]) is int:
            arguments = (arguments[0], _DEVICE, *arguments[2:])
        arguments, keywords = (
            tuple(map(_cpu_for, arguments)),
            {name: _cpu_for(value) for name, value in keywords.items()},
        )
        return function(*arguments, **keywords)


def _cpu_for(argument: Any) -> Any:
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return _DEVICE
    return _DEVICE if isinstance(argument, str) and argument.startswith("cuda") else argument


_plain_autocast: Any = torch.autocast.__init__


def _autocast_on_cpu(self: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
    _plain_autocast(self, "cpu" if device_type == "cuda" else device_type, *arguments, **keywords)
