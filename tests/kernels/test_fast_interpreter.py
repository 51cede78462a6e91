"""The interpreter of the tests computes what Triton specifies: types, broadcasting, reductions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the tests run compiled kernels"
)
ROWS, COLUMNS = 4, 8


@triton.jit
def arithmetic_kernel(x, out, scale, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    places = rows * COLUMNS + columns
    block = tl.load(x + places)
    row = tl.load(x + tl.arange(0, COLUMNS))
    column = tl.load(x + rows * COLUMNS)
    results = (
        block + 1, 1 - block, 2.5 * block, block - row, column * block, block + scale,
        scale * 2 - block, tl.where(block > 0, 3.0, block), tl.where(column < row, row, 0.0),
        tl.maximum(block, 0.5), tl.clamp(block, -0.5, 0.5), tl.fma(column, row, block), -block,
        tl.where((block >= 0.0) & (block != row), block, -1.0),
        tl.sum(column + row, 1)[:, None] + row,
        tl.max(row * column, 0)[None, :] + column, block / 3, 1 / (block * block + 1),
    )  # fmt: skip
    for number in tl.static_range(18):
        tl.store(out + number * ROWS * COLUMNS + places, results[number])


def test_arithmetic_and_broadcasting() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS)
    out = torch.empty(18, ROWS, COLUMNS)
    arithmetic_kernel[(1,)](x, out, 0.75, COLUMNS=COLUMNS, ROWS=ROWS)
    row, column = x[0], x[:, :1]
    expected = (
        x + 1, 1 - x, 2.5 * x, x - row, column * x, x + 0.75, 1.5 - x,
        torch.where(x > 0, 3.0, x), torch.where(column < row, row, 0.0), x.clamp(min=0.5),
        x.clamp(-0.5, 0.5), column * row + x, -x, torch.where((x >= 0) & (x != row), x, -1.0),
        (column + row).sum(1, keepdim=True) + row, (row * column).amax(0) + column, x / 3,
        1 / (x * x + 1),
    )  # fmt: skip
    for number, value in enumerate(expected):
        torch.testing.assert_close(out[number], value.expand(ROWS, COLUMNS), msg=str(number))


@triton.jit
def types_kernel(half, whole, bits, out, N: tl.constexpr):
    places = tl.arange(0, N)
    narrow, integers = tl.load(half + places), tl.load(whole + places)
    unsigned = tl.load(bits + places)
    # A number does not widen a tensor of its kind; a tensor does.
    tl.static_assert((narrow + 1.0).dtype == tl.float16)
    tl.static_assert((2 * narrow).dtype == tl.float16)
    tl.static_assert((narrow + tl.full((N,), 1.0, tl.float32)).dtype == tl.float32)
    tl.static_assert((integers + 1).dtype == tl.int64)
    tl.static_assert((integers * 0.5).dtype == tl.float32)
    tl.static_assert((integers + places).dtype == tl.int64)
    tl.static_assert((unsigned ^ 1).dtype == tl.uint8)
    tl.static_assert((integers < places).dtype == tl.int1)
    tl.store(out + places, narrow + 1e-4)
    tl.store(out + N + places, integers + places)
    tl.store(out + 2 * N + places, (unsigned >> 1) + 250)
    tl.store(out + 3 * N + places, (integers < places).to(tl.int32) + (places == 0))
    tl.store(out + 4 * N + places, places % 3 - places // 3)


def test_types_of_results() -> None:
    places = torch.arange(8)
    half = torch.linspace(1, 2, 8, dtype=torch.float16)
    bits = (places * 31).to(torch.uint8)
    out = torch.empty(5, 8)
    types_kernel[(1,)](half, places - 4, bits, out, N=8)
    assert torch.equal(out[0], (half + 1e-4).float())
    assert torch.equal(out[1], (2 * places - 4).float())
    assert torch.equal(out[2], ((bits >> 1) + 250).float())
    assert torch.equal(out[3], 1.0 + (places == 0))
    assert torch.equal(out[4], (places % 3 - places // 3).float())


@triton.jit
def loop_kernel(x, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    count = 0
    for start in range(0, n, BLOCK):
        places = start + tl.arange(0, BLOCK)
        total += tl.load(x + places, mask=places < n, other=0.0)
        count += 1
    tl.store(out, tl.sum(total) / count)
    tl.store(out + 1, tl.sum(total, 0) * (count > 2))


@pytest.mark.parametrize("n", [5, 9, 16])
def test_numbers_of_a_loop(n: int) -> None:
    x, out = torch.arange(1.0, n + 1), torch.empty(2)
    loop_kernel[(1,)](x, out, n, BLOCK=4)
    blocks = -(-n // 4)
    assert out.tolist() == [x.sum().item() / blocks, x.sum().item() * (blocks > 2)]
