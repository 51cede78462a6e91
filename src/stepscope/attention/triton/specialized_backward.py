"""FlashAttention backward for Hopper in Gluon, warp-specialized, in one pass; bits repeat.

A program owns 128 keys of one key head and visits the query blocks from the last to the first. One
warp loads Q, dO and the row statistics of a block into a ring. Two warpgroups, 64 keys each,
compute Sᵀ and dPᵀ and add to dK and dV in registers. Both write dSᵀ to shared memory and compute
one half of the columns of dQ = dS K. One more warp adds dQ to memory in float32 through TMA.

The additions to a query block are in the order of the key tiles, so that the bits of dQ repeat:
`turns` counts them. A key tile waits only for those before it, which belong to programs with
smaller numbers: these were started before, so they make progress. The first key tile stores instead
of adding, and every query row sees the first key: nothing has to be zeroed.

Sizes as in `specialized_forward.py`. Barriers, modeled in `benchmarks/gluon_protocol.py`:

- kv_full: K and V have arrived;
- full[s], empty[s]: the ring of query blocks (one arrival by TMA, one for the statistics; one per
  warpgroup);
- ds_full[b]: both warpgroups have written dSᵀ. Two buffers suffice: a warpgroup writes block n + 2
  after it has seen dSᵀ of block n + 1, which the other one writes after its reads of block n;
- dq_full[b], dq_empty[b]: dQ is complete; it has left shared memory.
"""

from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from stepscope.attention.specialized import BackwardVariant
from stepscope.attention.triton.specialized_forward import LOG2_E, block_of, mma_layout

KEYS = 64
"""Keys of a warpgroup."""
GROUPS = 2
QUERIES = 64
"""Queries of a block."""


@builtin
def add_to_global(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to one in global memory through TMA."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def wait_for_turn(turn, number):
    """Wait until that many additions to the query block are visible."""
    while gl.load(turn, volatile=True) < number:
        pass
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; fence.proxy.async; mov.u32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_turn(turn, number, LATER: gl.constexpr):
    """Wait until all additions but the LATER last ones are visible, and say so."""
    WAIT: gl.constexpr = "cp.async.bulk.wait_group 1;" if LATER else "cp.async.bulk.wait_group 0;"
    gl.inline_asm_elementwise(
        WAIT + " fence.proxy.async; bar.warp.sync 0xffffffff;"
        " fence.acq_rel.gpu; st.release.gpu.global.u32 [$1], $2; mov.u32 $0, $2;",
        "=r,l,r",
        [turn.to(gl.int64, bitcast=True), number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@aggregate
class Blocks:
    """Ring of query blocks."""

    q: gl.shared_memory_descriptor  # (S, 1, 1, QUERIES, D)
    grad: gl.shared_memory_descriptor  # (S, 1, 1, QUERIES, D)
    lse: gl.shared_memory_descriptor  # (S, QUERIES)
    delta: gl.shared_memory_descriptor  # (S, QUERIES)
    full: gl.shared_memory_descriptor  # (S, 1)
    empty: gl.shared_memory_descriptor  # (S, 1)

    @gluon.constexpr_function
    def __init__(self, q, grad, lse, delta, full, empty):
        self.q = q
        self.grad = grad
        self.lse = lse
        self.delta = delta
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait(self, n):
        mbarrier.wait(self.full.index(n % self.q.shape[0]), (n // self.q.shape[0]) & 1)

    @gluon.jit
    def release(self, n):
        mbarrier.arrive(self.empty.index(n % self.q.shape[0]))


@aggregate
class Gradients:
    """Buffers that the warpgroups share: dSᵀ, and dQ on its way to memory."""

    ds: gl.shared_memory_descriptor  # (2 · 2, KEYS, QUERIES)
    ds_full: gl.shared_memory_descriptor  # (2, 1)
    dq: gl.shared_memory_descriptor  # (S, QUERIES, D)
    dq_full: gl.shared_memory_descriptor  # (S, 1)
    dq_empty: gl.shared_memory_descriptor  # (S, 1)

    @gluon.constexpr_function
    def __init__(self, ds, ds_full, dq, dq_full, dq_empty):
        self.ds = ds
        self.ds_full = ds_full
        self.dq = dq
        self.dq_full = dq_full
        self.dq_empty = dq_empty


@aggregate
class Task:
    """The key tile of a program, and the query blocks that it visits, from `last` down."""

    batch: gl.tensor
    key_head: gl.tensor
    tile: gl.tensor
    H: gl.tensor
    G: gl.tensor
    N: gl.tensor
    shift: gl.tensor
    n_blocks: gl.tensor
    CAUSAL: gl.constexpr
    BLOCK_N: gl.constexpr
    BLOCK_M: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, batch, key_head, tile, H, G, N, shift, n_blocks, CAUSAL, BLOCK_N, BLOCK_M):
        self.batch = batch
        self.key_head = key_head
        self.tile = tile
        self.H = H
        self.G = G
        self.N = N
        self.shift = shift
        self.n_blocks = n_blocks
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.BLOCK_M = gl.constexpr(BLOCK_M)

    @gluon.jit
    def query_blocks(self):
        """Return (first, full): blocks before `first` see no key of the tile, those from `full` on
        see all."""
        first = self.n_blocks * 0
        full = first
        start_n = self.tile * self.BLOCK_N
        if self.CAUSAL:
            first = gl.minimum(gl.maximum(start_n - self.shift, 0) // self.BLOCK_M, self.n_blocks)
            full = gl.maximum(start_n + self.BLOCK_N - 1 - self.shift, 0)
            full = (full + self.BLOCK_M - 1) // self.BLOCK_M
        full = gl.where(start_n + self.BLOCK_N > self.N, self.n_blocks, full)
        return first, gl.minimum(gl.maximum(full, first), self.n_blocks)


@gluon.jit
def load_blocks(
    task, q_desc, k_desc, v_desc, grad_desc, lse, delta, blocks, k_smem, v_smem, kv_full
):
    """Producer: copy K and V, then the query blocks."""
    BLOCK_M: gl.constexpr = task.BLOCK_M
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        row = task.tile * task.BLOCK_N + w * k_desc.block_type.shape[2]
        at = [task.batch, task.key_head, row, 0]
        tma.async_copy_global_to_shared(k_desc, at, kv_full, k_smem.index(w))
        tma.async_copy_global_to_shared(v_desc, at, kv_full, v_smem.index(w))
    first, _ = task.query_blocks()
    n = 0
    for member in range(task.G):
        head = task.key_head * task.G + member
        rows = (task.batch * task.H + head).to(gl.int64) * task.n_blocks * BLOCK_M
        offsets = rows + gl.arange(0, BLOCK_M, layout=LAYOUT)
        for t in range(task.n_blocks - first):
            block = task.n_blocks - 1 - t
            slot = n % blocks.q.shape[0]
            b_lse = gl.load(lse + offsets + block * BLOCK_M)
            b_delta = gl.load(delta + offsets + block * BLOCK_M)
            mbarrier.wait(blocks.empty.index(slot), ((n // blocks.q.shape[0]) & 1) ^ 1)
            full = blocks.full.index(slot)
            mbarrier.expect(full, q_desc.block_type.nbytes + grad_desc.block_type.nbytes)
            at = [task.batch, head, block * BLOCK_M, 0]
            tma.async_copy_global_to_shared(q_desc, at, full, blocks.q.index(slot))
            tma.async_copy_global_to_shared(grad_desc, at, full, blocks.grad.index(slot))
            blocks.lse.index(slot).store(b_lse)
            blocks.delta.index(slot).store(b_delta)
            mbarrier.arrive(full)
            n += 1


@gluon.jit
def add_dq(task, dq_desc, turns, gradients, LATER: gl.constexpr):
    """Add dQ of each block to memory, in turn. With LATER, the end of a turn is awaited after the
    next addition has been issued."""
    SLOTS: gl.constexpr = gradients.dq.shape[0]
    last = turns
    first, _ = task.query_blocks()
    n = 0
    for member in range(task.G):
        head = task.batch * task.H + task.key_head * task.G + member
        for t in range(task.n_blocks - first):
            block = head * task.n_blocks + task.n_blocks - 1 - t
            slot = n % SLOTS
            mbarrier.wait(gradients.dq_full.index(slot), (n // SLOTS) & 1)
            at = [block * task.BLOCK_M, 0]
            if task.tile == 0:
                tma.async_copy_shared_to_global(dq_desc, at, gradients.dq.index(slot))
            else:
                wait_for_turn(turns + block, task.tile)
                add_to_global(dq_desc, at, gradients.dq.index(slot))
            tma.store_wait(0)
            mbarrier.arrive(gradients.dq_empty.index(slot))
            if LATER:
                if n > 0:
                    end_turn(last, task.tile + 1, 1)
                last = turns + block
            else:
                end_turn(turns + block, task.tile + 1, 0)
            n += 1
    if LATER:  # noqa: SIM102 - a constant and a run-time value
        if n > 0:
            end_turn(last, task.tile + 1, 0)


@gluon.jit
def hand_over(dq, n, gradients, W: gl.constexpr):
    """Give this warpgroup's half of dQ of the n-th block to the warp that adds it to memory."""
    SLOTS: gl.constexpr = gradients.dq.shape[0]
    HALF: gl.constexpr = dq.shape[1]
    slot = n % SLOTS
    mbarrier.wait(gradients.dq_empty.index(slot), ((n // SLOTS) & 1) ^ 1)
    gradients.dq.index(slot).slice(W * HALF, HALF, dim=1).store(dq)
    fence_async_shared()
    mbarrier.arrive(gradients.dq_full.index(slot))


@gluon.jit
def visit_queries(
    dk, dv, dq, n, start, count, firsts, factor, task, blocks, gradients, k_smem, v,
    W: gl.constexpr, S_LAYOUT: gl.constexpr, KV_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
    OVERLAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Visit `count` query blocks from `start` down, the first of which is the n-th of this program.
    `firsts` are the first queries that see each key. With OVERLAP, `dq` of the block before is
    handed over while Sᵀ is computed."""
    SLOTS: gl.constexpr = blocks.q.shape[0]
    BLOCK_M: gl.constexpr = task.BLOCK_M
    D: gl.constexpr = blocks.q.shape[4]
    HALF: gl.constexpr = D // 2
    ROWS: gl.constexpr = k_smem.shape[3]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KV_LAYOUT, 2)
    k = k_smem.index(W).reshape([ROWS, D])
    for t in range(count):
        slot = n % SLOTS
        blocks.wait(n)
        q = blocks.q.index(slot).reshape([BLOCK_M, D])
        grad = blocks.grad.index(slot).reshape([BLOCK_M, D])
        zero = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, S_LAYOUT)
        s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        if OVERLAP:  # noqa: SIM102 - a constant and a run-time value
            if n > 0:
                hand_over(dq, n - 1, gradients, W)
        dp = warpgroup_mma(v, grad.permute([1, 0]), zero, use_acc=False, is_async=True)
        lse = blocks.lse.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
        s = warpgroup_mma_wait(1, deps=(s,))
        p = gl.exp2(s * factor - lse[None, :])
        if MASKED:
            queries = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
            shown = queries[None, :] >= (firsts - (start - t) * BLOCK_M)[:, None]
            p = gl.where(shown, p, 0.0)
        delta = blocks.delta.index(slot).load(gl.SliceLayout(0, S_LAYOUT))
        p_operand = gl.convert_layout(p.to(q.dtype), OPERAND)
        dp, p_operand = warpgroup_mma_wait(0, deps=(dp, p_operand))
        dv = warpgroup_mma(p_operand, grad, dv, is_async=True)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        pair = n % 2 * 2
        gradients.ds.index(pair + W).store(ds)
        fence_async_shared()
        mbarrier.arrive(gradients.ds_full.index(n % 2))
        ds_operand = gl.convert_layout(ds, OPERAND)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        mbarrier.wait(gradients.ds_full.index(n % 2), (n // 2) & 1)
        dq = gl.full([BLOCK_M, HALF], 0.0, gl.float32, DQ_LAYOUT)
        for w in gl.static_range(2):
            columns = k_smem.index(w).reshape([ROWS, D]).slice(W * HALF, HALF, dim=1)
            ds_w = gradients.ds.index(pair + w).permute([1, 0])
            dq = warpgroup_mma(ds_w, columns, dq, use_acc=w > 0, is_async=True)
        dq, dk, dv, p_operand, ds_operand = warpgroup_mma_wait(
            0, deps=(dq, dk, dv, p_operand, ds_operand)
        )
        blocks.release(n)
        if not OVERLAP:
            hand_over(dq, n, gradients, W)
        n += 1
    return dk, dv, dq, n


@gluon.jit
def store_rows(x, pointer, offs_n, N, stride, LAYOUT: gl.constexpr):
    """Store rows of dK or dV."""
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    offsets = offs_n.to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=(offs_n < N)[:, None])


@gluon.jit
def differentiate(
    task, dk_ptr, dv_ptr, dk_stride, dv_stride, scale, blocks, gradients, k_smem, v_smem, kv_full,
    W: gl.constexpr, OVERLAP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Consumer: the warpgroup of keys W · 64 to W · 64 + 63 of the tile."""
    ROWS: gl.constexpr = k_smem.shape[3]
    D: gl.constexpr = k_smem.shape[4]
    S_LAYOUT: gl.constexpr = mma_layout(task.BLOCK_M)
    KV_LAYOUT: gl.constexpr = mma_layout(D)
    DQ_LAYOUT: gl.constexpr = mma_layout(D // 2)
    factor = scale * LOG2_E
    start_n = task.tile * task.BLOCK_N + W * ROWS
    offs_n = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    firsts = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S_LAYOUT))
    if task.CAUSAL:
        firsts = offs_n - task.shift
    firsts = gl.where(offs_n < task.N, firsts, 2147483647 - 65536)
    first, full = task.query_blocks()
    dk = gl.full([ROWS, D], 0.0, gl.float32, KV_LAYOUT)
    dv = gl.full([ROWS, D], 0.0, gl.float32, KV_LAYOUT)
    dq = gl.full([task.BLOCK_M, D // 2], 0.0, gl.float32, DQ_LAYOUT)
    v = v_smem.index(W).reshape([ROWS, D])
    mbarrier.wait(kv_full, 0)
    n = 0
    for _ in range(task.G):
        dk, dv, dq, n = visit_queries(
            dk, dv, dq, n, task.n_blocks - 1, task.n_blocks - full, firsts, factor, task, blocks,
            gradients, k_smem, v, W, S_LAYOUT, KV_LAYOUT, DQ_LAYOUT, OVERLAP, False,
        )  # fmt: skip
        if MASKED:
            dk, dv, dq, n = visit_queries(
                dk, dv, dq, n, full - 1, full - first, firsts, factor, task, blocks, gradients,
                k_smem, v, W, S_LAYOUT, KV_LAYOUT, DQ_LAYOUT, OVERLAP, True,
            )  # fmt: skip
    if OVERLAP:  # noqa: SIM102
        if n > 0:
            hand_over(dq, n - 1, gradients, W)
    rows = start_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, KV_LAYOUT))
    store_rows(dk * scale, dk_ptr, rows, task.N, dk_stride, KV_LAYOUT)
    store_rows(dv, dv_ptr, rows, task.N, dv_stride, KV_LAYOUT)


@gluon.jit(do_not_specialize=["H", "G", "N", "shift", "n_blocks", "n_tiles", "together"])
def specialized_backward_kernel(
    q_desc, k_desc, v_desc, grad_desc, dq_desc, lse, delta, turns, dk, dv, scale, dk_stride_b,
    dk_stride_h, dk_stride_n, dv_stride_b, dv_stride_h, dv_stride_n, H, G, N, shift, n_blocks,
    n_tiles, together, STAGES: gl.constexpr, DQ_STAGES: gl.constexpr, LATER: gl.constexpr,
    OVERLAP: gl.constexpr, REGISTERS: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile; adds its part of dQ (rows, D) in float32. `together` heads are
    scheduled together."""
    D: gl.constexpr = q_desc.block_type.shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    ROWS: gl.constexpr = k_desc.block_type.shape[2]
    pid = gl.program_id(0)
    per_group = n_tiles * together
    head = pid // per_group * together + pid % together
    key_heads = H // G
    batch = head // key_heads
    key_head = head % key_heads
    task = Task(
        batch,
        key_head,
        pid % per_group // together,
        gl.to_tensor(H),
        gl.to_tensor(G),
        gl.to_tensor(N),
        gl.to_tensor(shift),
        gl.to_tensor(n_blocks),
        CAUSAL,
        2 * ROWS,
        BLOCK_M,
    )
    dk += batch.to(gl.int64) * dk_stride_b + key_head.to(gl.int64) * dk_stride_h
    dv += batch.to(gl.int64) * dv_stride_b + key_head.to(gl.int64) * dv_stride_h
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    statistics: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    blocks = Blocks(
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], grad_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    gradients = Gradients(
        gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, BLOCK_M], ds_layout),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.float32, [DQ_STAGES, BLOCK_M, D], dq_desc.layout),
        gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [DQ_STAGES, 1], barrier),
    )
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, ROWS, D], v_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(blocks.full.index(i), count=2)
        mbarrier.init(blocks.empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(gradients.ds_full.index(i), count=2)
    for i in gl.static_range(DQ_STAGES):
        mbarrier.init(gradients.dq_full.index(i), count=2)
        mbarrier.init(gradients.dq_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                differentiate,
                (
                    task, dk, dv, dk_stride_n, dv_stride_n, scale,
                    blocks, gradients, k_smem, v_smem, kv_full, 0, OVERLAP, MASKED,
                ),
            ),
            (
                differentiate,
                (
                    task, dk, dv, dk_stride_n, dv_stride_n, scale,
                    blocks, gradients, k_smem, v_smem, kv_full, 1, OVERLAP, MASKED,
                ),
            ),
            (
                load_blocks,
                (
                    task, q_desc, k_desc, v_desc, grad_desc, lse, delta,
                    blocks, k_smem, v_smem, kv_full,
                ),
            ),
            (add_dq, (task, dq_desc, turns, gradients, LATER)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip


def dq_block(head: int) -> tuple[list[int], Any]:
    """Return shape and layout of a tile of dQ in float32."""
    block = [QUERIES, head]
    return block, gl.NVMMASharedLayout.get_default_for(block, gl.float32)


def describe_sums(sums: Tensor) -> Any:
    """Create the TMA descriptor of dQ in float32, (rows, D)."""
    block, layout = dq_block(sums.shape[-1])
    return TensorDescriptor(sums, list(sums.shape), list(sums.stride()), block, layout)


def constants(variant: BackwardVariant, *, causal: bool, masked: bool) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel, in the order of its signature."""
    return {
        "STAGES": variant.stages,
        "DQ_STAGES": variant.dq_stages,
        "LATER": variant.later,
        "OVERLAP": variant.overlap,
        "REGISTERS": variant.registers,
        "CAUSAL": causal,
        "MASKED": causal or masked,
    }


def compile_for_hopper(variant: BackwardVariant, head: int, *, causal: bool, masked: bool) -> Any:
    """Compile for compute capability 9.0 without such a GPU."""
    fixed = constants(variant, causal=causal, masked=masked)
    types = {"lse": "*fp32", "delta": "*fp32", "turns": "*i32", "dk": "*bf16", "dv": "*bf16"}
    types["scale"] = "fp32"
    for name, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS), ("grad", QUERIES)):
        block, layout = block_of(rows, head, gl.bfloat16)
        types[f"{name}_desc"] = f"tensordesc<bf16{block},{layout!r}>"
    block, layout = dq_block(head)
    types["dq_desc"] = f"tensordesc<fp32{block},{layout!r}>"
    kernel = specialized_backward_kernel
    signature = {
        name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names
    }
    source = GluonASTSource(kernel, signature, constexprs=fixed, attrs={})
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4})
