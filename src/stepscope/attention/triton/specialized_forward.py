"""FlashAttention forward for Hopper in Gluon, warp-specialized.

One warp loads tiles by TMA into a ring in shared memory. Each of `groups` warpgroups owns 64 query
rows and runs wgmma on the tiles in the ring. A warpgroup issues QKᵀ of the next key block and PV of
the last one before the softmax of the next, and warpgroups take turns in issuing, so that matrix
units work while others compute exponentials. The grid is persistent.

B batch, H query heads, G query heads per key head, M query rows, N key rows, D head dimension.
Row i sees key j iff j <= i + shift; the shift is a multiple of 64, so that of the key blocks that a
warpgroup visits only the last one has a mask. `order` is `tile_order` of `specialized.py`. Barriers
(see `benchmarks/gluon_protocol.py` for a model of them):

- q_full[i], k_full[s], v_full[s]: the copy of a tile has arrived (one arrival with its bytes);
- q_empty[i], k_empty[s], v_empty[s]: every warpgroup that reads the tile is done with it;
- turn[w]: warpgroup w may issue its matmuls.

A barrier's n-th phase has parity n % 2; waiting for the parity of the phase before the first one
returns at once, which is how the ring starts empty.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from stepscope.attention.specialized import ROWS, Variant

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def mma_layout(columns: int) -> Any:
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@aggregate
class Ring:
    """Buffers in shared memory, each with a barrier for its copy and one for its readers.

    The n-th use of a ring of S buffers is in buffer n % S; its barriers are then in phase n // S.
    """

    memory: gl.shared_memory_descriptor  # (S, 1, 1, rows, columns)
    full: gl.shared_memory_descriptor  # (S, 1)
    empty: gl.shared_memory_descriptor  # (S, 1)

    @gluon.constexpr_function
    def __init__(self, memory, full, empty):
        self.memory = memory
        self.full = full
        self.empty = empty

    @gluon.jit
    def load(self, n, desc, batch, head, row):
        """Producer: copy a tile as the n-th use, once the readers of the buffer are done."""
        buffer = n % self.memory.shape[0]
        parity = (n // self.memory.shape[0]) & 1
        mbarrier.wait(self.empty.index(buffer), parity ^ 1)
        mbarrier.expect(self.full.index(buffer), desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            desc, [batch, head, row, 0], self.full.index(buffer), self.memory.index(buffer)
        )

    @gluon.jit
    def wait(self, n):
        """Consumer: wait until the tile of the n-th use has arrived."""
        buffer = n % self.memory.shape[0]
        mbarrier.wait(self.full.index(buffer), (n // self.memory.shape[0]) & 1)

    @gluon.jit
    def tile(self, n):
        """Return the buffer of the n-th use as (rows, columns)."""
        buffer = self.memory.index(n % self.memory.shape[0])
        return buffer.reshape([buffer.shape[2], buffer.shape[3]])

    @gluon.jit
    def release(self, n, pred=True):
        """Consumer: tell the producer that this warpgroup has read the tile of the n-th use."""
        mbarrier.arrive(self.empty.index(n % self.memory.shape[0]), pred=pred)


@gluon.jit
def allocate_ring(desc, SIZE: gl.constexpr, READERS: gl.constexpr):
    shape: gl.constexpr = desc.block_type.shape
    memory = gl.allocate_shared_memory(desc.dtype, [SIZE] + shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SIZE):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(memory, full, empty)


@aggregate
class Work:
    """Sizes of the problem, and which query tiles a program computes."""

    order: gl.tensor
    H: gl.tensor
    G: gl.tensor
    M: gl.tensor
    N: gl.tensor
    shift: gl.tensor
    n_tiles: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, order, H, G, M, N, shift, n_tiles, BLOCK_M, BLOCK_N, CAUSAL):
        self.order = order
        self.H = H
        self.G = G
        self.M = M
        self.N = N
        self.shift = shift
        self.n_tiles = n_tiles
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.CAUSAL = gl.constexpr(CAUSAL)

    @gluon.jit
    def tiles(self):
        """Return the positions in `order` of the first tile of this program and past the last."""
        return gl.load(self.order + gl.program_id(0)), gl.load(self.order + gl.program_id(0) + 1)

    @gluon.jit
    def tile(self, position):
        """Return batch, head and first row of a tile."""
        number = gl.load(self.order + position)
        head = number // self.n_tiles
        return head // self.H, head % self.H, number % self.n_tiles * self.BLOCK_M

    @gluon.jit
    def key_blocks(self, start_m, ROWS: gl.constexpr):
        """Return the number of key blocks that one of these rows sees, at least one."""
        visible = self.N
        if self.CAUSAL:
            visible = gl.minimum(visible, gl.maximum(start_m + ROWS + self.shift, 1))
        return (visible + self.BLOCK_N - 1) // self.BLOCK_N

    @gluon.jit
    def start_n(self, j, n_blocks):
        """Return the first key of the j-th block that a tile visits. The last block is visited
        first: it is the one with a mask, and its softmax is outside of the loop, where a mask would
        need more registers than three warpgroups have."""
        return (n_blocks - 1 - j) * self.BLOCK_N


@gluon.jit
def load_tiles(work, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, GROUPS: gl.constexpr):
    """Producer: copy tiles in the order in which the warpgroups use them, V one block behind K. The
    first blocks come before the queries, whose buffers the last tile may still occupy."""
    ROWS: gl.constexpr = q_desc.block_type.shape[2]
    queries = 0
    keys = 0
    first, last = work.tiles()
    for position in range(first, last):
        batch, head, start_m = work.tile(position)
        key_head = head // work.G
        n_blocks = work.key_blocks(start_m, work.BLOCK_M)
        k_ring.load(keys, k_desc, batch, key_head, work.start_n(0, n_blocks))
        if n_blocks > 1:
            k_ring.load(keys + 1, k_desc, batch, key_head, work.start_n(1, n_blocks))
            v_ring.load(keys, v_desc, batch, key_head, work.start_n(0, n_blocks))
        for w in gl.static_range(GROUPS):
            q_ring.load(queries + w, q_desc, batch, head, start_m + w * ROWS)
        queries += GROUPS
        for j in range(2, n_blocks):
            k_ring.load(keys + j, k_desc, batch, key_head, work.start_n(j, n_blocks))
            v_ring.load(keys + j - 1, v_desc, batch, key_head, work.start_n(j - 1, n_blocks))
        keys += n_blocks
        v_ring.load(keys - 1, v_desc, batch, key_head, work.start_n(n_blocks - 1, n_blocks))


@gluon.jit
def softmax(s, top, sums, limits, factor, LAYOUT: gl.constexpr):
    """Return the probabilities of a block in float32, the new maxima and sums of the rows, and the
    factor by which what was summed before shrinks. `limits` are the keys of the block that each row
    sees, None for all of them."""
    if limits is not None:
        columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        s = gl.where(columns[None, :] < limits[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    base = new
    if limits is not None:
        # A row without a visible key so far: any finite base keeps -inf - base from being NaN.
        base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * factor - (base * factor)[:, None])
    rescale = gl.exp2((top - base) * factor)
    return p, new, sums * rescale + gl.sum(p, 1), rescale


@gluon.jit
def await_turn(turn, n, W: gl.constexpr, TURNS: gl.constexpr):
    """Wait for the n-th turn. The first warpgroup begins: it waits for the phase before."""
    if TURNS:
        mbarrier.wait(turn.index(W), (n & 1) ^ (1 if W == 0 else 0))


@gluon.jit
def issue_scores(q, k_ring, turn, n, W: gl.constexpr, LAYOUT: gl.constexpr, TURNS: gl.constexpr):
    """Issue QKᵀ with the n-th key block once it has arrived and it is this warpgroup's turn."""
    k_ring.wait(n)
    k = k_ring.tile(n)
    await_turn(turn, n, W, TURNS)
    zero = gl.full([q.shape[0], k.shape[0]], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def pass_turn(turn, W: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.arrive(turn.index((W + 1) % turn.shape[0]))


@gluon.jit
def skip_blocks(k_ring, v_ring, turn, base, count, W: gl.constexpr, TURNS: gl.constexpr):
    """Leave key blocks to the warpgroups that see them, and return the number of the next one. A
    release before the tile has arrived would count for its last use."""
    for n in range(base, base + count):
        k_ring.wait(n)
        await_turn(turn, n, W, TURNS)
        pass_turn(turn, W, TURNS)
        k_ring.release(n)
        v_ring.wait(n)
        v_ring.release(n)
    return base + count


@gluon.jit
def visit_blocks(
    q,
    o,
    p,
    top,
    sums,
    first,
    last,
    factor,
    k_ring,
    v_ring,
    turn,
    W: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Visit the key blocks from first to last; `p` are the probabilities of the block before
    `first`, whose V block has arrived."""
    for n in range(first, last):
        s = issue_scores(q, k_ring, turn, n, W, S_LAYOUT, TURNS)
        o = warpgroup_mma(p, v_ring.tile(n - 1), o, is_async=True)
        pass_turn(turn, W, TURNS)
        s = warpgroup_mma_wait(1, deps=(s,))
        k_ring.release(n)
        p32, top, sums, rescale = softmax(s, top, sums, None, factor, S_LAYOUT)
        # A wait between the two, or ptxas moves the softmax behind the wait for the matmul, where
        # the matrix units have nothing to do.
        v_ring.wait(n)
        o, p, p32 = warpgroup_mma_wait(0, deps=(o, p, p32))
        v_ring.release(n - 1)
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p = gl.convert_layout(p32.to(p.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return o, p, top, sums


@gluon.jit
def attend(
    work,
    o_desc,
    lse,
    scale,
    q_ring,
    k_ring,
    v_ring,
    turn,
    W: gl.constexpr,
    MASKED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Consumer: the warpgroup of query rows W · 64 to W · 64 + 63 of each tile."""
    GROUPS: gl.constexpr = turn.shape[0]
    # With a second buffer, the last output leaves its buffer while this tile is computed.
    EARLY: gl.constexpr = q_ring.memory.shape[0] > GROUPS
    ROWS: gl.constexpr = q_ring.memory.shape[3]
    D: gl.constexpr = q_ring.memory.shape[4]
    S_LAYOUT: gl.constexpr = mma_layout(work.BLOCK_N)
    O_LAYOUT: gl.constexpr = mma_layout(D)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)

    factor = scale * LOG2_E
    offs_row = gl.arange(0, ROWS, layout=ROW_LAYOUT)
    base = 0  # key blocks visited
    query = W
    first, last = work.tiles()
    for position in range(first, last):
        batch, head, start_m = work.tile(position)
        n_blocks = work.key_blocks(start_m, work.BLOCK_M)
        start_m += W * ROWS
        offs_m = start_m + offs_row
        if work.CAUSAL:
            own = work.key_blocks(start_m, ROWS)
            base = skip_blocks(k_ring, v_ring, turn, base, n_blocks - own, W, TURNS)
            n_blocks = own

        q_ring.wait(query)
        q = q_ring.tile(query)
        s = issue_scores(q, k_ring, turn, base, W, S_LAYOUT, TURNS)
        pass_turn(turn, W, TURNS)
        if EARLY:
            tma.store_wait(0)
            q_ring.release(query - GROUPS, pred=position > first)
        s = warpgroup_mma_wait(0, deps=(s,))
        k_ring.release(base)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        sums = gl.full([ROWS], 0.0, gl.float32, ROW_LAYOUT)
        limits = None
        if MASKED:
            limits = gl.full([ROWS], 0, gl.int32, ROW_LAYOUT) + work.N
            if work.CAUSAL:
                limits = gl.minimum(limits, offs_m + work.shift + 1)
            limits -= work.start_n(0, n_blocks)
        p32, top, sums, _ = softmax(s, top, sums, limits, factor, S_LAYOUT)
        p = gl.convert_layout(p32.to(o_desc.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        v_ring.wait(base)
        o = gl.full([ROWS, D], 0.0, gl.float32, O_LAYOUT)
        o, p, top, sums = visit_blocks(
            q,
            o,
            p,
            top,
            sums,
            base + 1,
            base + n_blocks,
            factor,
            k_ring,
            v_ring,
            turn,
            W,
            S_LAYOUT,
            O_LAYOUT,
            TURNS,
        )
        base += n_blocks
        o = warpgroup_mma(p, v_ring.tile(base - 1), o, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        v_ring.release(base - 1)

        # A row without a visible key has the sum 0: its output is zero, its log-sum-exp -inf.
        divisors = gl.where(sums == 0.0, 1.0, sums)
        o = o / gl.convert_layout(divisors, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # The queries have been read: their buffer takes the output to the copy engine.
        q.store(o.to(o_desc.dtype))
        fence_async_shared()
        buffer = q_ring.memory.index(query % q_ring.memory.shape[0])
        tma.async_copy_shared_to_global(o_desc, [batch, head, start_m, 0], buffer)
        row = (batch * work.H + head).to(gl.int64) * work.M
        gl.store(lse + row + offs_m, top * scale + gl.log(sums), mask=offs_m < work.M)
        if not EARLY:
            tma.store_wait(0)
            q_ring.release(query)
        query += GROUPS
    if EARLY:
        tma.store_wait(0)


# The kernel is not specialized on sizes: it is compiled once for many shapes.
@gluon.jit(do_not_specialize=["H", "G", "M", "N", "shift", "n_tiles"])
def specialized_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse,
    order,
    scale,
    H,
    G,
    M,
    N,
    shift,
    n_tiles,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    QUERIES: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    MASKED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Output and log-sum-exp of the query tiles of this program, 64 · GROUPS rows each."""
    work = Work(
        gl.to_tensor(order),
        gl.to_tensor(H),
        gl.to_tensor(G),
        gl.to_tensor(M),
        gl.to_tensor(N),
        gl.to_tensor(shift),
        gl.to_tensor(n_tiles),
        GROUPS * q_desc.block_type.shape[2],
        k_desc.block_type.shape[2],
        CAUSAL,
    )
    q_ring = allocate_ring(q_desc, GROUPS * QUERIES, 1)
    k_ring = allocate_ring(k_desc, STAGES, GROUPS)
    v_ring = allocate_ring(v_desc, STAGES, GROUPS)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(GROUPS):
        mbarrier.init(turn.index(w), count=1)
    # The copy engine signals these barriers.
    fence_async_shared()

    # The tuples are literals: a variable would turn their constants into run-time values.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    attend,
                    (work, o_desc, lse, scale, q_ring, k_ring, v_ring, turn, 0, MASKED, TURNS),
                ),
                (
                    attend,
                    (work, o_desc, lse, scale, q_ring, k_ring, v_ring, turn, 1, MASKED, TURNS),
                ),
                (load_tiles, (work, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    attend,
                    (work, o_desc, lse, scale, q_ring, k_ring, v_ring, turn, 0, MASKED, TURNS),
                ),
                (
                    attend,
                    (work, o_desc, lse, scale, q_ring, k_ring, v_ring, turn, 1, MASKED, TURNS),
                ),
                (
                    attend,
                    (work, o_desc, lse, scale, q_ring, k_ring, v_ring, turn, 2, MASKED, TURNS),
                ),
                (load_tiles, (work, q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def block_of(rows: int, head: int, dtype: Any) -> tuple[list[int], Any]:
    """Return the shape of a tile in a tensor (B, H, rows, D), and its layout in shared memory."""
    block = [1, 1, rows, head]
    return block, gl.NVMMASharedLayout.get_default_for(block, dtype)


def describe(x: Tensor, rows: int) -> Any:
    """Create the TMA descriptor for tiles of that many rows of a tensor (B, H, M, D)."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    block, layout = block_of(rows, x.shape[-1], dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def constants(variant: Variant, *, causal: bool, masked: bool) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel, in the order of its signature."""
    return {
        "STAGES": variant.stages,
        "GROUPS": variant.groups,
        "QUERIES": variant.queries,
        "REGISTERS": variant.registers,
        "CAUSAL": causal,
        "MASKED": causal or masked,
        "TURNS": variant.take_turns,
    }


def compile_for_hopper(variant: Variant, head: int, *, causal: bool, masked: bool) -> Any:
    """Compile for compute capability 9.0 without such a GPU."""
    fixed = constants(variant, causal=causal, masked=masked)
    types = {"lse": "*fp32", "order": "*i32", "scale": "fp32"}
    for name, rows in (("q", ROWS), ("k", variant.n), ("v", variant.n), ("o", ROWS)):
        block, layout = block_of(rows, head, gl.bfloat16)
        types[f"{name}_desc"] = f"tensordesc<bf16{block},{layout!r}>"
    signature = {
        name: "constexpr" if name in fixed else types.get(name, "i32")
        for name in specialized_forward_kernel.arg_names
    }
    source = GluonASTSource(specialized_forward_kernel, signature, constexprs=fixed, attrs={})
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 4})
