"""Launch parameters of the memory-bound kernels fit on an SM, at every width."""

from __future__ import annotations

import pytest
import torch

from stepscope.kernels.norm import MAX_COLUMNS
from stepscope.kernels.triton import launches

REGISTERS, WARPS, PROGRAMS, SHARED = 65536, 64, 32, 99 << 10
"""Of an SM; shared memory that a program has on each GPU since Ampere."""


def all_rows() -> list[launches.Rows]:
    widths = [2**n + more for n in range(1, 20) for more in (0, 1) if 2**n + more <= MAX_COLUMNS]
    return [
        launches.activation_summed(),
        *(launches.norm_backward(width) for width in widths),
    ]


def test_all_programs_are_resident_at_once() -> None:
    for rows in all_rows():
        threads = rows.per_processor * rows.warps * 32
        assert rows.registers * threads <= REGISTERS
        assert 32 <= rows.registers <= 255
        assert rows.per_processor <= PROGRAMS
        assert rows.per_processor * rows.warps <= WARPS


def test_the_loads_ahead_fit_into_shared_memory() -> None:
    """Of three tensors of float32, besides the sums of the warps."""
    for rows in all_rows():
        assert (rows.stages - 1) * 3 * 4 * rows.block + 1024 <= SHARED


def test_a_block_covers_the_row_of_a_norm() -> None:
    for d in (1, 100, 768, 2560, MAX_COLUMNS):
        rows = launches.norm_backward(d)
        assert d <= rows.block < 2 * d


@pytest.mark.parametrize(
    ("width", "columns"), [(10_240, 2048), (3072, 1024), (100, 512), (1100, 512), (4864, 1024)]
)
def test_an_activation_has_the_widest_block_with_the_fewest_masked_columns(
    width: int, columns: int
) -> None:
    assert launches.activation(width).columns == columns


def test_the_interpreter_has_few_programs() -> None:
    assert launches.programs(torch.device("cpu"), 8) == 4
