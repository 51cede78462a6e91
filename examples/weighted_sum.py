"""A first Triton kernel: the weighted sum of each row, forward and backward, beside its naive form.

    python examples/weighted_sum.py                          # on a GPU
    TRITON_INTERPRET=1 python examples/weighted_sum.py       # on a CPU, in Triton's interpreter

For rows x of length D and a weight w of length D, the forward pass computes y = Σ_d x[:, d]·w[d].
Its gradients are dx = dy ⊗ w, and dw = Σ_rows dy·x. A program of a kernel computes a tile of rows;
no two programs write to the same address, so there are no atomics: for dw every program writes its
partial sum, and those are added up afterwards, in a fixed order.
"""

from __future__ import annotations

import argparse
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 16, 64
"""Shape of a tile. A GPU is fastest with powers of two; the last tiles may be cut."""


def naive_weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """The same in plain PyTorch: it writes the product to memory before the sum reads it."""
    return (weight * x).sum(dim=-1)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each program sums a tile of rows, one tile of columns after the other."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        # Entries outside are 0, which adds nothing.
        x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        total += tl.sum(x.to(tl.float32) * weight.to(tl.float32)[None, :], axis=1)
    tl.store(out_ptr + row, total, mask=row < rows)


@triton.jit
def backward_kernel(
    x_ptr,
    weight_ptr,
    grad_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program writes dx of its tile of rows, and their part of dw in a row of its own."""
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    grad = tl.load(grad_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        at = row[:, None] * columns + column[None, :]
        tl.store(grad_x_ptr + at, grad[:, None] * weight[None, :], mask=inside)
        partial = tl.sum(grad[:, None] * x.to(tl.float32), axis=0)
        tl.store(partial_ptr + tile * columns + column, partial, mask=column < columns)


class WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        # The kernels take any distance between rows, but neighboring columns.
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        out = torch.empty(len(rows), dtype=x.dtype, device=x.device)
        if len(rows):
            forward_kernel[(triton.cdiv(len(rows), ROWS),)](
                rows, weight.contiguous(), out, *rows.shape, rows.stride(0), ROWS, COLUMNS
            )
        return out.reshape(x.shape[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # noqa: ARG004
        # The inputs are all that the backward pass needs: nothing else is stored.
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        tiles = triton.cdiv(len(rows), ROWS)
        grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        partial = torch.zeros(tiles, rows.shape[1], dtype=torch.float32, device=x.device)
        if tiles:
            backward_kernel[(tiles,)](
                rows,
                weight.contiguous(),
                grad.reshape(-1).contiguous(),
                grad_x,
                partial,
                *rows.shape,
                rows.stride(0),
                ROWS,
                COLUMNS,
            )
        return grad_x.reshape(x.shape), partial.sum(dim=0).to(weight.dtype)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sum over the last dimension of x, weighted: shapes (…, D) and (D,) give (…)."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"x has rows of {x.shape[-1]}, weight has shape {tuple(weight.shape)}")
    return WeightedSum.apply(x, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--columns", type=int, default=150)
    flags = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("no GPU: set TRITON_INTERPRET=1 to run the kernels in the interpreter")
    torch.manual_seed(0)
    x = torch.randn(flags.rows, flags.columns, device=device, requires_grad=True)
    weight = torch.randn(flags.columns, device=device, requires_grad=True)
    grad = torch.randn(flags.rows, device=device)
    for name, function in (("naive", naive_weighted_sum), ("triton", weighted_sum)):
        out = function(x, weight)
        grads = torch.autograd.grad(out, (x, weight), grad)
        exact = naive_weighted_sum(x.double(), weight.double())
        off = (out - exact).abs().max().item()
        print(
            f"{name}: largest error {off:.1e}, dx {grads[0].norm():.4f}, dw {grads[1].norm():.4f}"
        )


if __name__ == "__main__":
    main()
