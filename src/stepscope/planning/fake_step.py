"""Models, optimizers and batches as fake tensors: shapes and dtypes without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from stepscope.errors import UsageError, one_line
from stepscope.planning.known_values import KnownValues

_DEVICE = torch.device("cpu")


class Fakes:
    """A context in which tensors are created as fake ones."""

    def __init__(self, line_of_code: Callable[[], str]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = KnownValues(self._mode, line_of_code)

    @contextmanager
    def active(self) -> Iterator[None]:
        # Libraries take other paths for what they recognize as a fake tensor, such as a mask that a
        # real run does not need.
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch._subclasses, "FakeTensor", _NotATensor))
            # Fake parameters have weak references, with which they cannot be swapped.
            stack.enter_context(patch.object(torch.utils, "swap_tensors", _assign))
            stack.enter_context(self._mode)
            stack.enter_context(self.values)
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
        return tree_map(lambda leaf: self.tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)

    def tensor(self, real: Tensor) -> Tensor:
        """A fake tensor, whose value is known if it is small and the real one has data."""
        fake = self._like(real).requires_grad_(real.requires_grad)
        if real.device.type != "meta" and not real.requires_grad:
            with _disable_current_modes():
                # The step may write to it.
                self.values.know(fake, real.detach().to(_DEVICE, copy=True))
        return fake

    def _like(self, real: Tensor) -> Tensor:
        with self._mode:
            size, stride = real.size(), real.stride()
            return torch.empty_strided(size, stride, dtype=real.dtype, device=_DEVICE)


class _NotATensor:
    """Shown as the class of fake tensors to programs that look for one."""


def _assign(parameter: Tensor, converted: Tensor) -> None:
    """Convert a parameter in place, as `nn.Module.to` does with real ones."""
    parameter.data = converted
