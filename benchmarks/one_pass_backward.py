"""Does a backward of attention with five products beat ours with seven?

    python benchmarks/one_pass_backward.py --screen
    python benchmarks/one_pass_backward.py --shape 4,25,2048,64 4,32,2048,80

Ours walks twice, once for dQ and once for dK and dV, and makes scores and their gradients both
times: 3 + 4 products, no atomics, the same bits every time. Here one walk makes all three: a
program has a tile of keys and adds its part of dQ to memory, through the GPU's copy engine, in
float32; one kernel before it sets dQ to zero and makes delta, one after it rounds dQ. The order of
these sums is not fixed, so neither are the last bits.

--screen compiles every tile for a Hopper GPU that need not be here and says what it takes.
Otherwise the tiles that fit run in turns with our two kernels and with cuDNN, and each is held
against cuDNN's gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.attention import attention, triton_launch
from stepscope.attention.tiles import columns
from stepscope.attention.triton_memory import (
    add_product,
    load_tile,
    outer_product,
    place,
    store_tile,
    zeros,
)
from stepscope.attention.triton_softmax import probabilities
from stepscope.measure.device import pick_device
from stepscope.measure.turns import time_in_turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from screen_tiles import HOPPER, SHARED_LIMIT, resources

CLOSE = 2e-2
"""Of a gradient's norm, in bfloat16."""


@triton.jit
def _rows_of(H, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of a program: batch, head, its rows and columns, what of them is there, rows before it."""
    bh = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_D)[None, :]
    inside = (i < M)[:, None] & (j < D)
    return (bh // H).to(tl.int64), (bh % H).to(tl.int64), i, j, inside, bh.to(tl.int64) * M


@triton.jit
def prepare_kernel(
    o, grad, delta, total, o_b, o_h, o_m, g_b, g_h, g_m, H, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta of each row, and zeros where dQ is added up."""
    batch, head, i, j, inside, before = _rows_of(H, M, D, BLOCK_M, BLOCK_D)
    rows = i.to(tl.int64)[:, None]
    made = tl.load(o + batch * o_b + head * o_h + rows * o_m + j, mask=inside, other=0.0)
    g = tl.load(grad + batch * g_b + head * g_h + rows * g_m + j, mask=inside, other=0.0)
    tl.store(delta + before + i, tl.sum(made.to(tl.float32) * g.to(tl.float32), 1), mask=i < M)
    zero = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tl.store(total + (before + rows) * D + j, zero, mask=inside)


@triton.jit
def finish_kernel(
    total, dq, scale, dq_b, dq_h, dq_m, H, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    batch, head, i, j, inside, before = _rows_of(H, M, D, BLOCK_M, BLOCK_D)
    rows = i.to(tl.int64)[:, None]
    made = tl.load(total + (before + rows) * D + j, mask=inside, other=0.0) * scale
    to = dq + batch * dq_b + head * dq_h + rows * dq_m + j
    tl.store(to, made.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _add_to_query(
    total, total_e, grad_s, key, batch, head, m, bh, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    narrow = grad_s.to(key[0].dtype).T
    part = tl.dot(narrow, key[0])
    if TMA:
        total.atomic_add([batch, head, m, 0], part.reshape([1, 1, BLOCK_M, BLOCK_D]))
        if BLOCK_E > 0:
            part_e = tl.dot(narrow, key[3]).reshape([1, 1, BLOCK_M, BLOCK_E])
            total_e.atomic_add([batch, head, m, BLOCK_D], part_e)
    else:
        i = m + tl.arange(0, BLOCK_M)
        at = total + (bh.to(tl.int64) * M + i)[:, None] * D
        j = tl.arange(0, BLOCK_D)
        inside = (i < M)[:, None] & (j < D)[None, :]
        tl.atomic_add(at + j[None, :], part, mask=inside, sem="relaxed")
        if BLOCK_E > 0:
            j = BLOCK_D + tl.arange(0, BLOCK_E)
            inside = (i < M)[:, None] & (j < D)[None, :]
            tl.atomic_add(at + j[None, :], tl.dot(narrow, key[3]), mask=inside, sem="relaxed")


@triton.jit
def _walk_queries(
    grad_k, grad_k_e, grad_v, grad_v_e, key, value, q, q_e, grad, grad_e, total, total_e,
    lse, delta, q_strides, g_strides, batch, head, bh, col, start, stop, scale, B, M, D,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    for m in tl.range(start, stop, BLOCK_M):
        i = m + tl.arange(0, BLOCK_M)
        query = load_tile(
            q, q_e, q_strides, batch, head, m, M, D, B, BLOCK_M, BLOCK_D, BLOCK_E, 1, True, TMA
        )
        level = tl.load(lse + i, mask=i < M, other=0.0)
        scores = outer_product(key, query, BLOCK_E, 1, "tf32")
        p = probabilities(scores, level[None, :], scale, False)
        if MASKED:
            j = col + tl.arange(0, BLOCK_N)
            p = tl.where(j[:, None] <= i[None, :], p, 0.0)
        g = load_tile(
            grad, grad_e, g_strides, batch, head, m, M, D, B,
            BLOCK_M, BLOCK_D, BLOCK_E, 1, True, TMA,
        )  # fmt: skip
        grad_p = outer_product(value, g, BLOCK_E, 1, "tf32")
        grad_v, grad_v_e = add_product(grad_v, grad_v_e, p, g, BLOCK_E, 1, "tf32")
        drop = tl.load(delta + i, mask=i < M, other=0.0)
        grad_s = p * (grad_p - drop[None, :])
        grad_k, grad_k_e = add_product(grad_k, grad_k_e, grad_s, query, BLOCK_E, 1, "tf32")
        _add_to_query(
            total, total_e, grad_s, key, batch, head, m, bh, M, D, BLOCK_M, BLOCK_D, BLOCK_E, TMA
        )
    return grad_k, grad_k_e, grad_v, grad_v_e


@triton.jit
def one_pass_kernel(
    q, k, v, grad, total, q_e, k_e, v_e, grad_e, total_e, lse, delta, dk, dv, scale,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n,
    v_stride_b, v_stride_h, v_stride_n, g_stride_b, g_stride_h, g_stride_m,
    dk_stride_b, dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n,
    B, H, M, D, n_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Causal, as many keys as queries, a key head for each query head."""
    tile, bh = place(n_tiles, GROUP, False)
    batch, head = bh // H, bh % H
    col = tile * BLOCK_N
    q_strides = (q_stride_b, q_stride_h, q_stride_m)
    g_strides = (g_stride_b, g_stride_h, g_stride_m)
    key = load_tile(
        k, k_e, (k_stride_b, k_stride_h, k_stride_n), batch, head, col, M, D, B,
        BLOCK_N, BLOCK_D, BLOCK_E, 1, True, TMA,
    )  # fmt: skip
    value = load_tile(
        v, v_e, (v_stride_b, v_stride_h, v_stride_n), batch, head, col, M, D, B,
        BLOCK_N, BLOCK_D, BLOCK_E, 1, True, TMA,
    )  # fmt: skip
    grad_k, grad_k_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    grad_v, grad_v_e = zeros(BLOCK_N, BLOCK_D, BLOCK_E)
    rows_before = bh.to(tl.int64) * M
    start = col // BLOCK_M * BLOCK_M
    full = (col + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    grad_k, grad_k_e, grad_v, grad_v_e = _walk_queries(
        grad_k, grad_k_e, grad_v, grad_v_e, key, value, q, q_e, grad, grad_e, total, total_e,
        lse + rows_before, delta + rows_before, q_strides, g_strides, batch, head, bh, col,
        full, M, scale, B, M, D, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, False, TMA,
    )  # fmt: skip
    grad_k, grad_k_e, grad_v, grad_v_e = _walk_queries(
        grad_k, grad_k_e, grad_v, grad_v_e, key, value, q, q_e, grad, grad_e, total, total_e,
        lse + rows_before, delta + rows_before, q_strides, g_strides, batch, head, bh, col,
        start, tl.minimum(full, M), scale, B, M, D,
        BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_E, True, TMA,
    )  # fmt: skip
    store_tile(
        dk, grad_k * scale, grad_k_e * scale, (dk_stride_b, dk_stride_h, dk_stride_n),
        batch, head, col, M, D, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    store_tile(
        dv, grad_v, grad_v_e, (dv_stride_b, dv_stride_h, dv_stride_n),
        batch, head, col, M, D, BLOCK_N, BLOCK_D, BLOCK_E,
    )  # fmt: skip


class Tile(NamedTuple):
    m: int
    n: int
    warps: int
    stages: int
    group: int = 4
    tma: bool = True


TILES = tuple(
    Tile(m, n, warps, stages)
    for m in (32, 64)
    for n, warps in ((64, 4), (128, 8))
    for stages in (1, 2, 3)
)
"""Larger ones spill."""


class Backward:
    """One shape: what it reads, and room for what it makes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        self.q, self.k, self.v, self.scale = q, k, v, scale
        self.out, self.lse = triton_launch.forward(q, k, v, scale=scale, causal=True, shift=0)
        self.grad = torch.randn_like(q)
        self.total = torch.empty(q.shape, device=q.device, dtype=torch.float32)
        self.delta = torch.empty_like(self.lse)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (q, k, v))

    def one_pass(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, rows, d = self.q.shape
        wide = triton.next_power_of_2(d)
        by_rows = (triton.cdiv(rows, 64), batch * heads)
        prepare_kernel[by_rows](
            self.out, self.grad, self.delta, self.total,
            *self.out.stride()[:3], *self.grad.stride()[:3], heads, rows, d, 64, wide,
        )  # fmt: skip
        first, second = columns(d)
        read = (self.q, self.k, self.v, self.grad, self.total)
        sizes = (tile.m, tile.n, tile.n, tile.m, tile.m)
        sources: list[Any] = [*read, *(read if second else [None] * 5)]
        if tile.tma:
            sources = [
                TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, size, part])
                if part
                else None
                for part in (first, second)
                for x, size in zip(read, sizes, strict=True)
            ]
        n_tiles, group = triton.cdiv(rows, tile.n), tile.group
        while batch * heads % group:
            group //= 2
        one_pass_kernel[(n_tiles * batch * heads,)](
            *sources, self.lse, self.delta, self.dk, self.dv, self.scale,
            *[s for x in (*read[:4], self.dk, self.dv) for s in x.stride()[:3]],
            batch, heads, rows, d, n_tiles, tile.m, tile.n, first, second, group, tile.tma,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        finish_kernel[by_rows](
            self.total, self.dq, self.scale, *self.dq.stride()[:3], heads, rows, d, 64, wide
        )
        return self.dq, self.dk, self.dv

    def two_kernels(self) -> tuple[Tensor, Tensor, Tensor]:
        return triton_launch.backward(
            self.grad, self.q, self.k, self.v, self.out, self.lse,
            scale=self.scale, causal=True, shift=0,
        )  # fmt: skip


def screen(heads: Sequence[int]) -> None:
    """Registers, spills and shared memory of every tile on Hopper."""
    print("head  tile      warps stages  registers spills shared KiB  wgmma")
    for head in heads:
        for tile in TILES:
            how = f"{head:>4}  {tile.m:>3}×{tile.n:<5} {tile.warps:>4} {tile.stages:>6}"
            try:
                registers, spills, shared, products = _compiled(tile, head)
            except Exception as error:
                print(f"{how}  does not compile: {str(error).splitlines()[0][:90]}")
                continue
            fits = "" if shared <= SHARED_LIMIT else "  too large"
            print(f"{how} {registers:>10} {spills:>6} {shared / 1024:>10.1f} {products:>6}{fits}")


def _compiled(tile: Tile, head: int) -> tuple[int, int, int, int]:
    first, second = columns(head)
    constants: dict[str, Any] = {
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_D": first, "BLOCK_E": second,
        "GROUP": tile.group, "TMA": tile.tma,
    }  # fmt: skip
    rows = {"q": tile.m, "k": tile.n, "v": tile.n, "grad": tile.m, "total": tile.m}
    signature = {}
    for name in one_pass_kernel.arg_names:
        whole = name.removesuffix("_e")
        if name in constants:
            signature[name] = "constexpr"
        elif whole in rows:
            wide = first if name == whole else second
            if wide:
                kind = "fp32" if whole == "total" else "bf16"
                signature[name] = f"tensordesc<{kind}[1, 1, {rows[whole]}, {wide}]>"
            else:
                constants[name], signature[name] = None, "constexpr"
        elif name in ("dk", "dv"):
            signature[name] = "*bf16"
        elif name in ("lse", "delta"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(one_pass_kernel.arg_names)
        if signature[name].startswith("*") or "stride" in name or (name == "D" and head % 16 == 0)
    }
    source = ASTSource(one_pass_kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=HOPPER, options=options)
    return *resources(made.asm["cubin"]), made.metadata.shared, made.asm["ptx"].count("wgmma.mma")


def compare(shape: Sequence[int], rounds: int) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(tuple(shape), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    held = Backward(q.detach(), k.detach(), v.detach(), shape[-1] ** -0.5)
    out = attention(q, k, v, is_causal=True, impl="sdpa_cudnn")
    expected = torch.autograd.grad(out, (q, k, v), held.grad, retain_graph=True)

    def theirs() -> object:
        return torch.autograd.grad(out, (q, k, v), held.grad, retain_graph=True)

    calls: dict[str, Callable[[], object]] = {"cuDNN": theirs, "two kernels": held.two_kernels}
    for tile in TILES:
        try:
            made = held.one_pass(tile)
            torch.cuda.synchronize()
        except (OutOfResources, RuntimeError) as error:
            print(f"{tuple(tile)}: {str(error).splitlines()[0][:90]}")
            continue
        off = max(
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(made, expected, strict=True)
        )
        if off < CLOSE:
            calls[f"one pass {tuple(tile)}"] = lambda tile=tile: held.one_pass(tile)
        else:
            print(f"{tuple(tile)}: wrong by {off:.1e}")
    timing = time_in_turns(calls, pick_device("cuda"), rounds=rounds, host_ahead=True)
    times = {
        series.name: statistics.median(series.values)
        for series in timing.series
        if series.clock == "device"
    }
    print(f"\n{tuple(shape)}, backward")
    for name, ms in sorted(times.items(), key=lambda row: row[1]):
        print(f"  {name:<44} {ms:.4f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["4,25,2048,64", "4,32,2048,80"],
                        help="B,H,S,D")  # fmt: skip
    parser.add_argument("--screen", action="store_true", help="compile for Hopper, run nothing")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split(","))) for text in options.shape]
    if options.screen:
        screen(sorted({shape[-1] for shape in shapes}))
        return 0
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU; --screen does not")
        return 1
    for shape in shapes:
        compare(shape, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
