"""The parts of a step as CUDA graphs, and their energy by the device's counter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from energy_parts import accounts

from stepscope.measure.device import CudaDevice
from stepscope.model.config import ModelConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import energy_by_part
from step_parts import Setting

SMALL = ModelConfig(d_model=256, d_ff=512, n_layers=2, n_heads=4, vocab=1000, context=128)


@pytest.mark.parametrize("part", energy_by_part.PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("policy", ["all", "norms", "gates"])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
def test_every_part_is_captured_and_replayed(
    part: energy_by_part.Part, policy: str, gradients: torch.dtype, device: CudaDevice
) -> None:
    setting = Setting(SMALL, 4, device.torch_device, activation_policy=policy, gradients=gradients)
    replay = energy_by_part.repeated(part.make(setting), device)
    for _ in range(3):
        replay()
    device.synchronize()


def test_an_energy_ledger_of_a_small_step(device: CudaDevice) -> None:
    if device.energy_j() is None:
        pytest.skip(device.energy_missing)
    racer = energy_by_part.our_racer("small-512", layers=2)
    before = _allocated_bytes(device)
    lines = list(energy_by_part.lines_of("small-512", racer, device))
    (ledger,) = accounts(lines)
    assert ledger.lost == {}
    assert all(row.joules > 0 and row.ms > 0 for row in ledger.taken.values())
    assert ledger.all_parts is not None
    assert _allocated_bytes(device) - before < 1 << 24


def _allocated_bytes(device: CudaDevice) -> int:
    """Return the allocated bytes without the cuBLAS workspaces of every stream."""
    torch._C._cuda_clearCublasWorkspaces()
    return device.allocated_bytes() or 0
