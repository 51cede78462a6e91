"""The pairs on a CPU: calls of NumPy and torch that differ in one property, on one core.

A cache line corresponds to a memory sector of a GPU, a vector register to a warp, and a chunk that
stays in the L2 cache to a tile in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepscope.measure.techniques.pair import (
    LINKS,
    KernelVariant,
    Pair,
    chain_gradient,
    matmul_pair,
    numbers,
)

Array = NDArray[np.float32]

CPU = torch.device("cpu")
LINE = 64
"""Bytes of a cache line."""
WORD = 4
FIELDS = LINE // WORD
CHUNK = 1 << 16
ROWS = 64
"""Rows of one matrix that share the loads of the other matrix."""
TERMS = 24
"""Terms of the polynomial on the long side of the branch."""
ONE_IN = 8
"""One in this many numbers takes the long side of the branch."""
_ONE, _TWO, _HALF = (np.float32(value) for value in (1.0, 2.0, 0.5))


def divergence(elements: int, rows: int) -> Pair:  # noqa: ARG001
    count = elements // 4
    x = numbers(count, CPU)
    long = torch.rand(count, generator=torch.Generator().manual_seed(1)) < 1 / ONE_IN
    order = torch.argsort(long.to(torch.int8), descending=True, stable=True)
    most = int(long.sum())
    mixed, choice, apart = x.numpy(), long.numpy(), x[order].numpy()
    y, sorted_y = np.empty_like(mixed), np.empty_like(mixed)

    def both_sides() -> None:
        # If neighbors differ, a vector unit computes both sides for all lanes and selects one.
        for part in _chunks(count):
            np.copyto(y[part], -mixed[part])
            np.copyto(y[part], _polynomial(mixed[part]), where=choice[part])

    def one_side() -> None:
        for part in _chunks(most):
            sorted_y[part] = _polynomial(apart[part])
        np.negative(apart[most:], out=sorted_y[most:])

    def truth() -> Tensor:
        exact = x.double().numpy()
        return torch.from_numpy(np.where(choice, _polynomial(exact), -exact))

    size = 2.0 * WORD * count
    return Pair(
        slow=KernelVariant(
            both_sides,
            lambda: torch.from_numpy(y),
            1e-5,
            moved=size + count,
            flops=2.0 * TERMS * count,
        ),
        fast=KernelVariant(
            one_side,
            lambda: torch.from_numpy(sorted_y)[torch.argsort(order)],
            1e-5,
            moved=size,
            flops=2.0 * TERMS * most,
        ),
        truth=truth,
        work=2.0 * TERMS * most,
        unit="FLOP",
    )


def _polynomial(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Sum of (x/2)**k."""
    half = x * x.dtype.type(0.5)
    total = np.ones_like(x)
    for _ in range(TERMS):
        np.multiply(total, half, out=total)
        np.add(total, x.dtype.type(1.0), out=total)
    return total


def precision(elements: int, rows: int) -> Pair:  # noqa: ARG001
    def variant(a: Tensor, b: Tensor, tolerance: float) -> KernelVariant:
        c = torch.empty_like(a)
        # A float64 occupies two float32 lanes of a vector register.
        flops = 2.0 * rows**3 * (a.element_size() / WORD)
        return _on_one_core(
            lambda: torch.mm(a, b, out=c), c, tolerance, moved=3.0 * c.nbytes, flops=flops
        )

    return matmul_pair(
        CPU,
        rows,
        slow=lambda a, b: variant(a.double(), b.double(), 1e-12),
        fast=lambda a, b: variant(a, b, 1e-5),
    )


def tiling(elements: int, rows: int) -> Pair:  # noqa: ARG001
    def variant(a: Tensor, b: Tensor, at_once: int) -> KernelVariant:
        c = torch.empty_like(a)

        def run() -> None:
            for at in range(0, rows, at_once):
                part = slice(at, at + at_once)
                torch.mm(a[part], b, out=c[part])

        loaded = b.nbytes * -(-rows // at_once)
        return _on_one_core(
            run, c, 1e-5, moved=float(loaded + a.nbytes + c.nbytes), flops=2.0 * rows**3
        )

    return matmul_pair(
        CPU, rows, slow=lambda a, b: variant(a, b, 1), fast=lambda a, b: variant(a, b, ROWS)
    )


def _on_one_core(
    work: Callable[[], object], output: Tensor, tolerance: float, *, moved: float, flops: float
) -> KernelVariant:
    def run() -> None:
        with _one_thread():
            work()

    return KernelVariant(run, lambda: output, tolerance, moved=moved, flops=flops)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fusion(elements: int, rows: int) -> Pair:  # noqa: ARG001
    x = 4.0 * numbers(elements, CPU)
    one_by_one, at_once = torch.empty_like(x), torch.empty_like(x)

    def four_calls() -> None:
        torch.add(x, 3.0, out=one_by_one)
        one_by_one.clamp_(0.0, 6.0)
        one_by_one.mul_(x)
        one_by_one.mul_(1 / 6)

    def one_call() -> None:
        torch.ops.aten.hardswish.out(x, out=at_once)

    def truth() -> Tensor:
        exact = x.double()
        return exact * (exact + 3.0).clamp(0.0, 6.0) / 6.0

    size, flops = float(x.nbytes), 4.0 * elements
    return Pair(
        slow=_on_one_core(four_calls, one_by_one, 1e-6, moved=9.0 * size, flops=flops),
        fast=_on_one_core(one_call, at_once, 1e-6, moved=2.0 * size, flops=flops),
        truth=truth,
        work=2.0 * size,
        unit="B",
    )


def recomputation(elements: int, rows: int) -> Pair:  # noqa: ARG001
    x, grad = numbers(elements, CPU), numbers(elements, CPU, seed=1)
    read, incoming = x.numpy(), grad.numpy()
    # A chunk and the results of its links stay in the cache together.
    chunk = CHUNK // LINKS

    def variant(save: bool) -> KernelVariant:
        y, out = np.empty_like(read), np.empty_like(read)
        saved = np.empty((LINKS - 1, elements if save else chunk), dtype=np.float32)

        def rows_of(part: slice) -> Array:
            return saved[:, part] if save else saved[:, : part.stop - part.start]

        def run() -> None:
            for part in _chunks(elements, chunk):
                _link(_links(read[part], rows_of(part)), y[part])
            for part in _chunks(elements, chunk):
                if not save:
                    _links(read[part], rows_of(part))
                np.multiply(incoming[part], read[part], out=out[part])
                for result in rows_of(part):
                    np.multiply(out[part], result, out=out[part])

        passes = 5.0 + (2.0 * (LINKS - 1) if save else 0.0)
        again = 0.0 if save else 3.0 * (LINKS - 1)
        return KernelVariant(
            run,
            lambda: torch.from_numpy(out),
            1e-5,
            moved=passes * read.nbytes,
            flops=(4.0 * LINKS + again) * elements,
            kept=float(read.nbytes + (saved.nbytes if save else 0)),
        )

    return Pair(
        slow=variant(True),
        fast=variant(False),
        truth=lambda: grad.double() * chain_gradient(x.double()),
        work=5.0 * read.nbytes,
        unit="B",
    )


def _link(read: Array, written: Array) -> None:
    np.square(read, out=written)
    np.subtract(written, _ONE, out=written)
    np.multiply(written, _HALF, out=written)


def _links(x: Array, results: Array) -> Array:
    """Compute all links of a chain except the last, one per row; return the last row."""
    read = x
    for result in results:
        _link(read, result)
        read = result
    return read


def coalescing(elements: int, rows: int) -> Pair:  # noqa: ARG001
    by_record = numbers(elements, CPU).view(-1, FIELDS)
    by_field = by_record.t().contiguous()

    def variant(x: Array, read: int) -> KernelVariant:
        y = np.empty((FIELDS, x.shape[1]), dtype=np.float32)

        def run() -> None:
            for field in range(FIELDS):
                np.multiply(x[field], _TWO, out=y[field])

        return KernelVariant(
            run,
            lambda: torch.from_numpy(y),
            tolerance=0.0,
            moved=float(read + WORD) * elements,
            flops=float(elements),
        )

    return Pair(
        slow=variant(by_record.numpy().T, LINE),
        fast=variant(by_field.numpy(), WORD),
        truth=lambda: 2.0 * by_field.double(),
        work=2.0 * WORD * elements,
        unit="B",
    )


def _chunks(count: int, length: int = CHUNK) -> Iterator[slice]:
    return (slice(at, min(at + length, count)) for at in range(0, count, length))


PAIRS: Mapping[str, Callable[[int, int], Pair]] = {
    "divergence": divergence,
    "precision": precision,
    "fusion": fusion,
    "recomputation": recomputation,
    "coalescing": coalescing,
    "tiling": tiling,
}
