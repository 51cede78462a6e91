"""Autotuned GEMMs: row-major matmuls expressed for column-major cuBLAS, and the kernel choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stepscope.kernels import autotune
from stepscope.kernels.autotune import autotuned_matmul_into, autotuned_matmuls, autotuning
from stepscope.kernels.cublaslt import Kernel, Matmul, Matrix
from stepscope.kernels.matmul import matmul_to_dtype


def read(matrix: Matrix, memory: Tensor) -> Tensor:
    """Return the matrix that cuBLAS reads."""
    view = memory.as_strided((matrix.rows, matrix.columns), (1, matrix.stride))
    return view.T if matrix.transposed else view


def random_matrix(rows: int, columns: int, transposed: bool, padding: int) -> Tensor:
    shape = (columns, rows + padding) if transposed else (rows, columns + padding)
    padded = torch.randn(shape, dtype=torch.float16)
    return padded[:, :rows].T if transposed else padded[:, :columns]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("transposed_b", [False, True])
@pytest.mark.parametrize("transposed_a", [False, True])
def test_column_major_matmul_is_equivalent(
    transposed_a: bool, transposed_b: bool, padding: int
) -> None:
    a = random_matrix(5, 7, transposed_a, padding)
    b = random_matrix(7, 4, transposed_b, padding)
    out = torch.zeros(5, 4 + padding)[:, :4]
    matmul = Matmul.of(a, b, out)
    assert matmul is not None
    target = out.as_strided((matmul.out.rows, matmul.out.columns), (1, matmul.out.stride))
    target.copy_(read(matmul.left, b).float() @ read(matmul.right, a).float())
    torch.testing.assert_close(out, a.float() @ b.float())
    assert matmul.flops == 2 * 5 * 7 * 4
    assert (matmul.out.dtype, matmul.left.dtype) == (torch.float32, torch.float16)


def test_unsupported_layouts_are_left_to_torch() -> None:
    a, b, out = torch.zeros(6, 8), torch.zeros(8, 4), torch.zeros(6, 4)
    assert Matmul.of(a, b, out) is not None
    assert Matmul.of(a[:, ::2], b[::2], out) is None
    assert Matmul.of(a, b, out.T.contiguous().T) is None
    assert Matmul.of(a.double(), b.double(), out.double()) is None
    assert Matmul.of(a[:1], b, out[:1]) is None


def test_nothing_is_autotuned_on_a_cpu() -> None:
    a, b = torch.randn(4, 6, dtype=torch.float16), torch.randn(6, 3, dtype=torch.float16)
    assert not autotuning()
    with autotuned_matmuls():
        assert autotuning()
        assert not autotuned_matmul_into(torch.empty(4, 3, dtype=torch.float16), a, b)
        torch.testing.assert_close(matmul_to_dtype(a, b, torch.float16), a @ b)
    assert not autotuning()


class FakePlan:
    """A plan whose kernels have the given times, in a burst and under sustained load."""

    def __init__(self, times: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.algorithms = [Kernel(waves=number) for number in range(len(times))]
        self.sustained: set[int] = set()

        def timed(kernel: Kernel, _: object, launches: int) -> float:
            burst, long = times[int(kernel.waves)]
            if launches <= autotune.MAX_LAUNCHES:
                return burst
            self.sustained.add(int(kernel.waves))
            return long

        monkeypatch.setattr(autotune, "_timed", timed)
        monkeypatch.setattr(autotune, "Plan", lambda *_: self)

    def kernels(self) -> list[Kernel]:
        return self.algorithms


@pytest.mark.parametrize(
    ("times", "side", "expected", "sustained"),
    [
        ([(1.0, 1.0), (0.9, 0.9), (0.8, 0.8)], 64, 2, set()),
        ([(1.0, 1.0), (0.99, 0.99)], 64, None, set()),
        ([(1.0, 1.0)], 64, None, set()),
        ([(1.0, 1.2), (0.9, 1.3), (0.95, 1.1), (1.4, 0.5)], 2048, 2, {0, 1, 2}),
        ([(1.0, 1.2), (0.8, 1.3)], 2048, None, {0, 1}),
    ],
    ids=["fastest", "torch's is as fast", "one kernel", "sustained", "a burst does not count"],
)
def test_the_chosen_kernel(
    times: list[tuple[float, float]],
    side: int,
    expected: int | None,
    sustained: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = FakePlan(times, monkeypatch)
    a, b, out = (torch.empty(side, side, dtype=torch.float16) for _ in range(3))
    matmul = Matmul.of(a, b, out)
    assert matmul is not None
    choice = autotune._autotune(matmul, a, b, out)
    assert choice == (None if expected is None else (plan, plan.algorithms[expected]))
    assert plan.sustained == sustained


def test_a_matmul_that_cublas_rejects_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FakePlan([(1.0, 1.0), (0.5, 0.5)], monkeypatch)

    def fails(*_: object) -> float:
        raise RuntimeError("cublasLtMatmul returned status 15")

    monkeypatch.setattr(autotune, "_timed", fails)
    a, b, out = (torch.empty(8, 8, dtype=torch.float16) for _ in range(3))
    matmul = Matmul.of(a, b, out)
    assert matmul is not None
    assert autotune._autotune(matmul, a, b, out) is None
    assert plan.algorithms
