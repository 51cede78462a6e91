"""How a product by rows is put to cuBLAS, which reads by columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepscope.kernels import autotune as search
from stepscope.kernels.autotune import autotuned_matmuls, autotuned_matmul_into, autotuning
from stepscope.kernels.cublaslt import Kernel, Matmul, Matrix
from stepscope.kernels.matmul import matmul_to_dtype


def read(matrix: Matrix, memory: Tensor) -> Tensor:
    """What cuBLAS finds there."""
    found = memory.as_strided((matrix.rows, matrix.columns), (1, matrix.stride))
    return found.T if matrix.transposed else found


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
    product = Matmul.of(a, b, out)
    assert product is not None
    target = out.as_strided((product.out.rows, product.out.columns), (1, product.out.stride))
    target.copy_(read(product.left, b).float() @ read(product.right, a).float())
    torch.testing.assert_close(out, a.float() @ b.float())
    assert product.flops == 2 * 5 * 7 * 4
    assert (product.out.dtype, product.left.dtype) == (torch.float32, torch.float16)


def test_what_cublas_cannot_read_is_left_to_torch() -> None:
    a, b, out = torch.zeros(6, 8), torch.zeros(8, 4), torch.zeros(6, 4)
    assert Matmul.of(a, b, out) is not None
    assert Matmul.of(a[:, ::2], b[::2], out) is None
    assert Matmul.of(a, b, out.T.contiguous().T) is None
    assert Matmul.of(a.double(), b.double(), out.double()) is None
    assert Matmul.of(a[:1], b, out[:1]) is None


def test_on_a_cpu_nothing_is_searched() -> None:
    a, b = torch.randn(4, 6, dtype=torch.float16), torch.randn(6, 3, dtype=torch.float16)
    assert not autotuning()
    with autotuned_matmuls():
        assert autotuning()
        assert not autotuned_matmul_into(torch.empty(4, 3, dtype=torch.float16), a, b)
        torch.testing.assert_close(matmul_to_dtype(a, b, torch.float16), a @ b)
    assert not autotuning()


class NamedKernels:
    """A plan whose kernels take what `took` says, in a burst and for long."""

    def __init__(self, took: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.named = [Kernel(waves=number) for number in range(len(took))]
        self.sustained: set[int] = set()

        def timed(kernel: Kernel, _: object, launches: int) -> float:
            burst, long = took[int(kernel.waves)]
            if launches <= search.MOST_LAUNCHES:
                return burst
            self.sustained.add(int(kernel.waves))
            return long

        monkeypatch.setattr(search, "_timed", timed)
        monkeypatch.setattr(search, "Plan", lambda *_: self)

    def kernels(self) -> list[Kernel]:
        return self.named


@pytest.mark.parametrize(
    ("took", "side", "expected", "sustained"),
    [
        ([(1.0, 1.0), (0.9, 0.9), (0.8, 0.8)], 64, 2, set()),
        ([(1.0, 1.0), (0.99, 0.99)], 64, None, set()),
        ([(1.0, 1.0)], 64, None, set()),
        ([(1.0, 1.2), (0.9, 1.3), (0.95, 1.1), (1.4, 0.5)], 2048, 2, {0, 1, 2}),
        ([(1.0, 1.2), (0.8, 1.3)], 2048, None, {0, 1}),
    ],
    ids=["the fastest", "torch's is as fast", "one kernel", "for long", "a burst does not count"],
)
def test_the_kernel_that_is_taken(
    took: list[tuple[float, float]],
    side: int,
    expected: int | None,
    sustained: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = NamedKernels(took, monkeypatch)
    a, b, out = (torch.empty(side, side, dtype=torch.float16) for _ in range(3))
    product = Matmul.of(a, b, out)
    assert product is not None
    found = search._autotune(product, a, b, out)
    assert found == (None if expected is None else (plan, plan.named[expected]))
    assert plan.sustained == sustained


def test_a_product_that_cublas_does_not_make_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = NamedKernels([(1.0, 1.0), (0.5, 0.5)], monkeypatch)

    def fails(*_: object) -> float:
        raise RuntimeError("cublasLtMatmul answers with status 15")

    monkeypatch.setattr(search, "_timed", fails)
    a, b, out = (torch.empty(8, 8, dtype=torch.float16) for _ in range(3))
    product = Matmul.of(a, b, out)
    assert product is not None
    assert search._autotune(product, a, b, out) is None
    assert plan.named
