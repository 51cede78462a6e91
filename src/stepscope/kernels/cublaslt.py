"""cuBLASLt through its C interface, as far as products of 16-bit matrices need it.

torch takes the first kernel that cuBLAS's rules name for a product. Here all that they name can be
had, and each of them be launched. cuBLAS reads matrices by columns: what lies in memory by rows is
its transpose to it, so it is asked for outᵀ = bᵀ aᵀ.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_NAMED = 32
"""Kernels to ask for; it names about eight."""
WORKSPACE = 32 << 20
"""Bytes that a kernel may ask for."""
ALIGNMENT = 256
"""Of every address, in bytes: what cuBLAS expects where nothing is said of it."""
_MAPS = Path("/proc/self/maps")
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_SUMS_IN_FLOAT32 = 68
_TRANSPOSE_LEFT, _TRANSPOSE_RIGHT, _MOST_WORKSPACE = 3, 4, 1


class Matrix(NamedTuple):
    """By columns."""

    dtype: torch.dtype
    rows: int
    columns: int
    stride: int
    """From one column to the next."""
    turned: bool = False
    """Its transpose is what the product reads."""


class Matmul(NamedTuple):
    """out = left right, or out += left right."""

    left: Matrix
    right: Matrix
    out: Matrix
    adds: bool

    @property
    def flops(self) -> int:
        inner = self.left.rows if self.left.turned else self.left.columns
        return 2 * self.out.rows * self.out.columns * inner

    @classmethod
    def of(cls, a: Tensor, b: Tensor, out: Tensor, adds: bool = False) -> Matmul | None:
        """out = a b by rows, as cuBLAS sees it; None where it cannot."""
        left, right, target = _by_columns(b), _by_columns(a), _by_columns(out)
        if left is None or right is None or target is None or target.turned:
            return None
        return cls(left, right, target, adds)


def _by_columns(x: Tensor) -> Matrix | None:
    """The transpose of x."""
    rows, columns = x.shape
    if x.dtype not in _TYPES or min(rows, columns) < 2:
        return None
    if x.stride(1) == 1 and x.stride(0) >= columns:
        return Matrix(x.dtype, columns, rows, x.stride(0))
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return Matrix(x.dtype, rows, columns, x.stride(1), turned=True)
    return None


class Kernel(ctypes.Structure):
    """What cuBLAS names: opaque, but for the work space that it needs."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Plan:
    """A product on one device. What cuBLAS holds for it stays as long as the process."""

    def __init__(self, product: Matmul, device: torch.device) -> None:
        self._library = _library()
        self._handle = _handle(device)
        self._device = device
        self._factors = ctypes.c_float(1.0), ctypes.c_float(float(product.adds))
        self._form = self._made("cublasLtMatmulDescCreate", _SUMS_IN_FLOAT32, 0)
        for number, matrix in ((_TRANSPOSE_LEFT, product.left), (_TRANSPOSE_RIGHT, product.right)):
            turned = ctypes.c_int32(matrix.turned)
            self._call("cublasLtMatmulDescSetAttribute", self._form, number, *_value(turned))
        self._layouts = [self._layout(m) for m in (product.left, product.right, product.out)]

    def kernels(self) -> list[Kernel]:
        """Those that cuBLAS names, first what torch takes."""
        wishes = self._made("cublasLtMatmulPreferenceCreate")
        most = ctypes.c_uint64(WORKSPACE)
        self._call("cublasLtMatmulPreferenceSetAttribute", wishes, _MOST_WORKSPACE, *_value(most))
        left, right, out = self._layouts
        named, count = (Kernel * MOST_NAMED)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, self._form, left, right, out, out,
            wishes, MOST_NAMED, named, ctypes.byref(count),
        )  # fmt: skip
        return [kernel for kernel in named[: count.value] if kernel.state == 0]

    def launch(self, kernel: Kernel, a: Tensor, b: Tensor, out: Tensor) -> None:
        """On the current stream. The work space goes back to torch's allocator at once: whoever
        gets it next comes later on the same stream."""
        space = torch.empty(kernel.workspace, dtype=torch.uint8, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        left, right, target = self._layouts
        into = ctypes.c_void_p(out.data_ptr())
        once, kept = self._factors
        self._call(
            "cublasLtMatmul", self._handle, self._form,
            ctypes.byref(once), ctypes.c_void_p(b.data_ptr()), left,
            ctypes.c_void_p(a.data_ptr()), right, ctypes.byref(kept), into, target, into, target,
            ctypes.byref(kernel.algorithm), ctypes.c_void_p(space.data_ptr()),
            ctypes.c_size_t(kernel.workspace), ctypes.c_void_p(stream),
        )  # fmt: skip

    def _layout(self, matrix: Matrix) -> ctypes.c_void_p:
        return self._made(
            "cublasLtMatrixLayoutCreate", _TYPES[matrix.dtype], ctypes.c_uint64(matrix.rows),
            ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.stride),
        )  # fmt: skip

    def _made(self, name: str, *given: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *given)
        return made

    def _call(self, name: str, *given: Any) -> None:
        _checked(name, getattr(self._library, name)(*given))


def _value(x: Any) -> tuple[Any, ctypes.c_size_t]:
    return ctypes.byref(x), ctypes.c_size_t(ctypes.sizeof(x))


def _checked(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} answers with status {status}")


@cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    for line in _MAPS.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libcublasLt.so" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("torch has loaded no cuBLASLt here")


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _checked("cublasLtCreate", _library().cublasLtCreate(ctypes.byref(made)))
    return made
