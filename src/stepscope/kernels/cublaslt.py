"""The part of cuBLASLt's C interface that GEMMs of 16-bit matrices need.

torch uses the first algorithm of cuBLAS's heuristic for a GEMM. Here all of them can be listed and
launched. cuBLAS is column-major: a row-major matrix is its transpose, so this computes
outᵀ = bᵀ aᵀ.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_ALGORITHMS = 32
"""Maximum number of algorithms to request; the heuristic returns about eight."""
WORKSPACE = 32 << 20
"""Maximum workspace of a kernel in bytes."""
ALIGNMENT = 256
"""Alignment of every address in bytes that cuBLAS assumes by default."""
_MAPS = Path("/proc/self/maps")
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_SUMS_IN_FLOAT32 = 68
_TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _MAX_WORKSPACE = 3, 4, 1


class Matrix(NamedTuple):
    """A column-major matrix."""

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int
    """Elements from one column to the next."""
    transposed: bool = False
    """The GEMM reads its transpose."""


class Matmul(NamedTuple):
    """out = left right, or out += left right."""

    left: Matrix
    right: Matrix
    out: Matrix
    accumulate: bool

    @property
    def flops(self) -> int:
        inner = self.left.rows if self.left.transposed else self.left.columns
        return 2 * self.out.rows * self.out.columns * inner

    @classmethod
    def of(cls, a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> Matmul | None:
        """Express the row-major out = a b for cuBLAS; None if it does not support the layout."""
        left, right, target = _by_columns(b), _by_columns(a), _by_columns(out)
        if left is None or right is None or target is None or target.transposed:
            return None
        return cls(left, right, target, accumulate)


def _by_columns(x: Tensor) -> Matrix | None:
    """Return the transpose of x as a column-major matrix; None if the layout is not supported."""
    rows, columns = x.shape
    if x.dtype not in _TYPES or min(rows, columns) < 2:
        return None
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return Matrix(x.dtype, columns, rows, x.stride(0))
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return Matrix(x.dtype, rows, columns, x.stride(1), transposed=True)
    return None


class Kernel(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, opaque except for its workspace size."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Plan:
    """A GEMM on one device. Its cuBLAS descriptors live as long as the process."""

    def __init__(self, matmul: Matmul, device: torch.device) -> None:
        self._library = _library()
        self._handle = _handle(device)
        self._device = device
        self._factors = ctypes.c_float(1.0), ctypes.c_float(float(matmul.accumulate))
        self._descriptor = self._create("cublasLtMatmulDescCreate", _SUMS_IN_FLOAT32, 0)
        for attribute, matrix in ((_TRANSPOSE_LEFT, matmul.left), (_TRANSPOSE_RIGHT, matmul.right)):
            transposed = ctypes.c_int32(matrix.transposed)
            self._check_call(
                "cublasLtMatmulDescSetAttribute", self._descriptor, attribute, *_value(transposed)
            )
        self._layouts = [self._layout(m) for m in (matmul.left, matmul.right, matmul.out)]

    def kernels(self) -> list[Kernel]:
        """Return the algorithms of cuBLAS's heuristic; the first is the one that torch uses."""
        preference = self._create("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE)
        self._check_call(
            "cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, *_value(limit)
        )
        left, right, out = self._layouts
        results, count = (Kernel * MAX_ALGORITHMS)(), ctypes.c_int()
        self._check_call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._descriptor,
            left,
            right,
            out,
            out,
            preference,
            MAX_ALGORITHMS,
            results,
            ctypes.byref(count),
        )
        return [kernel for kernel in results[: count.value] if kernel.state == 0]

    def launch(self, kernel: Kernel, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Launch on the current stream. The workspace returns to torch's allocator immediately: its
        next user runs later on the same stream."""
        workspace = torch.empty(kernel.workspace, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        left, right, out_layout = self._layouts
        out_ptr = ctypes.c_void_p(out.data_ptr())
        alpha, beta = self._factors
        self._check_call(
            "cublasLtMatmul",
            self._handle,
            self._descriptor,
            ctypes.byref(alpha),
            ctypes.c_void_p(b.data_ptr()),
            left,
            ctypes.c_void_p(a.data_ptr()),
            right,
            ctypes.byref(beta),
            out_ptr,
            out_layout,
            out_ptr,
            out_layout,
            ctypes.byref(kernel.algorithm),
            ctypes.c_void_p(workspace.data_ptr()),
            ctypes.c_size_t(kernel.workspace),
            ctypes.c_void_p(stream),
        )

    def _layout(self, matrix: Matrix) -> ctypes.c_void_p:
        return self._create(
            "cublasLtMatrixLayoutCreate",
            _TYPES[matrix.dtype],
            ctypes.c_uint64(matrix.rows),
            ctypes.c_uint64(matrix.columns),
            ctypes.c_int64(matrix.stride),
        )

    def _create(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        created = ctypes.c_void_p()
        self._check_call(name, ctypes.byref(created), *arguments)
        return created

    def _check_call(self, name: str, *arguments: Any) -> None:
        _check_status(name, getattr(self._library, name)(*arguments))


def _value(x: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(x), ctypes.c_size_t(ctypes.sizeof(x))


def _check_status(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} returned status {status}")


@cache
def _library() -> ctypes.CDLL:
    """Return the cuBLASLt library that torch has loaded."""
    for line in _MAPS.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libcublasLt.so" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("torch has not loaded cuBLASLt in this process")


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check_status("cublasLtCreate", _library().cublasLtCreate(ctypes.byref(handle)))
    return handle
