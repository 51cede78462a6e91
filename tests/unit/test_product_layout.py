"""How a product by rows is put to cuBLAS, which reads by columns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cublaslt import Matrix, Product


def read(matrix: Matrix, memory: Tensor) -> Tensor:
    """What cuBLAS finds there."""
    found = memory.as_strided((matrix.rows, matrix.columns), (1, matrix.stride))
    return found.T if matrix.turned else found


def drawn(rows: int, columns: int, turned: bool, room: int) -> Tensor:
    shape = (columns, rows + room) if turned else (rows, columns + room)
    made = torch.randn(shape, dtype=torch.float16)
    return made[:, :rows].T if turned else made[:, :columns]


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("turned_b", [False, True])
@pytest.mark.parametrize("turned_a", [False, True])
def test_by_columns_it_is_the_same_product(turned_a: bool, turned_b: bool, room: int) -> None:
    a, b = drawn(5, 7, turned_a, room), drawn(7, 4, turned_b, room)
    out = torch.zeros(5, 4 + room)[:, :4]
    product = Product.of(a, b, out)
    assert product is not None
    target = out.as_strided((product.out.rows, product.out.columns), (1, product.out.stride))
    target.copy_(read(product.left, b).float() @ read(product.right, a).float())
    torch.testing.assert_close(out, a.float() @ b.float())
    assert (product.out.dtype, product.left.dtype) == (torch.float32, torch.float16)


def test_what_cublas_cannot_read_is_left_to_torch() -> None:
    a, b, out = torch.zeros(6, 8), torch.zeros(8, 4), torch.zeros(6, 4)
    assert Product.of(a, b, out) is not None
    assert Product.of(a[:, ::2], b[::2], out) is None
    assert Product.of(a, b, out.T.contiguous().T) is None
    assert Product.of(a.double(), b.double(), out.double()) is None
    assert Product.of(a[:1], b, out[:1]) is None
