"""Attention kernels that record how they are launched, so that launch caches run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.attention.triton import launch as triton_launch

B, H, S, D = 2, 4, 32, 64
DEVICE = "cpu"


def specialization(value: Any, dtype: torch.dtype) -> Any:
    """Return all properties of an argument that a compiled kernel depends on, with strides."""
    if isinstance(value, TensorDescriptor):
        value = value.base
    if isinstance(value, Tensor):
        # Tensors that stay in registers are compiled as int16 bits, and launched unchanged.
        kind = dtype if value.dtype == torch.int16 else value.dtype
        aligned = value.data_ptr() % 16 == 0
        return value.device, tuple(value.shape), value.stride(), kind, aligned
    return type(value), value


def specializations(arguments: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The first float is the scale, the one argument that may change in a replay."""
    known = [specialization(x, dtype) for x in arguments]
    scale = next((n for n, x in enumerate(arguments) if isinstance(x, float)), None)
    if scale is not None:
        known[scale] = "any float"
    return known


class Recorder:
    """Replaces every kernel; checks each replay against the arguments of the compilation."""

    def __init__(self) -> None:
        self.compiled = 0
        self.replayed = 0
        self.dtype = torch.float32

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: int) -> Any:
            del options
            self.compiled += 1
            known = specializations(arguments, self.dtype)
            return SimpleNamespace(
                run=self.replay(grid[0], known),
                function=None,
                packed_metadata=None,
                metadata=SimpleNamespace(tensordesc_meta=None),
            )

        return launch

    def replay(self, programs: int, known: list[Any]) -> Callable[..., None]:
        def run(*launched: Any) -> None:
            self.replayed += 1
            assert launched[0] == programs
            assert specializations(launched[9:], self.dtype) == known

        return run


def recording(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replace the attention kernels by a recorder, in empty caches."""
    fake = Recorder()
    kernels = {k: v._replace(function=fake) for k, v in triton_launch._KERNELS.items()}
    for name, value in {
        "_KERNELS": kernels, "split_kernel": fake, "INTERPRETED": False,
        "_capability": lambda _: (9, 0), "_PREPARED": {}, "_SPLITTERS": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(triton_launch, name, value)
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda _: 0, raising=False)
    return fake


def dense(
    layout: str = "", dtype: torch.dtype = torch.float32, device: str = DEVICE, **size: int
) -> Tensor:
    b, h, s, d = size.get("b", B), size.get("h", H), size.get("s", S), size.get("d", D)
    if layout == "unaligned":
        return torch.empty(b * h * s * d + 1, dtype=dtype, device=device)[1:].view(b, h, s, d)
    if layout == "transposed":
        return torch.empty(b, s, h, d, dtype=dtype, device=device).transpose(1, 2)
    return torch.empty(b, h, s, d, dtype=dtype, device=device)
