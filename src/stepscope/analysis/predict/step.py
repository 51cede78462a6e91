"""Simulation of a step's memory: model, forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import msgspec

from stepscope.analysis.predict.allocator import CachingAllocator, ExactAllocator, OutOfBlocks
from stepscope.analysis.predict.deferred_frees import DeferredFrees
from stepscope.analysis.predict.fp8_layers import Fp8ProjectionLayers
from stepscope.analysis.predict.fused_layers import FusedLayers, FusedProjectionLayers
from stepscope.analysis.predict.layers import Layers, Shape
from stepscope.analysis.predict.memory import Buffer, Memory, MemoryState
from stepscope.analysis.predict.operators import FLOAT32, Operators
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.tape import Tape, Value
from stepscope.kernels.loss_chunks import matmul_columns, padded_columns, rows_per_chunk
from stepscope.model.config import WIDTHS, ModelConfig, precision
from stepscope.parallel.buckets import Rows, share_out
from stepscope.records.memory import GATHERED, INPUTS, LIBRARIES, LOGITS, OPTIMIZER, PARAMETERS

_INT64 = 8
_TEMPORARIES = {"torch": 2, "torch-fused": 0, "stepscope": 1, "course": 3}
"""Temporaries of a parameter's size while an optimizer updates it alone."""
_STEPS = 2
"""The first step creates the optimizer state, the second is like all that follow."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Itemized peak of each phase, and the bytes allocated at its end."""

    plan: StepPlan
    phases: tuple[MemoryState, ...]
    ends: dict[str, int]

    @property
    def peak(self) -> MemoryState:
        return max(self.phases, key=lambda moment: moment.allocated)


@lru_cache(maxsize=256)
def predict(plan: StepPlan) -> Prediction:
    """Simulate twice: first to learn when the peaks occur, then to itemize them. A page asks for
    the same plans several times."""
    first = StepSimulation(plan, frozenset())
    first.run()
    watched = frozenset(event for _, event in first.memory.peaks.values())
    second = StepSimulation(plan, watched)
    second.run()
    return Prediction(
        plan=plan,
        phases=tuple(second.memory.moments[event] for _, event in first.memory.peaks.values()),
        ends=dict(second.memory.ends),
    )


def overrun(plan: StepPlan, limit: int) -> MemoryState | None:
    """Return the memory when the step first needs more than the limit; None if it never does."""
    simulation = StepSimulation(plan, limit=limit)
    simulation.run()
    return simulation.memory.overrun


def runs_within(plan: StepPlan, limit: int) -> bool:
    """Return True if the allocator serves every request within the limit."""
    simulation = StepSimulation(plan, limit=limit, enforced=True)
    try:
        simulation.run()
    except OutOfBlocks:
        return False
    return simulation.memory.overrun is None


class StepSimulation:
    """The step of `studies.transformer_step.TransformerStep`, operator by operator."""

    def __init__(
        self,
        plan: StepPlan,
        watched: frozenset[int] = frozenset(),
        *,
        limit: int | None = None,
        enforced: bool = False,
    ) -> None:
        self.plan = plan
        dtypes = precision(plan.dtype)
        self.width, self.stream_width = WIDTHS[dtypes.weights], WIDTHS[dtypes.stream]
        self.master = dtypes.master
        blocks = CachingAllocator(limit if enforced else None)
        self.memory = Memory(blocks if plan.device == "cuda" else ExactAllocator(), watched, limit)
        self.tape = Tape(self.memory)
        self.ops = Operators(self.tape, WIDTHS[dtypes.compute] if dtypes.autocast else None)
        model = plan.model
        self.shape = Shape(
            batch=plan.batch,
            context=plan.context,
            d_model=model.d_model,
            d_ff=model.d_ff,
            heads=model.n_heads,
        )
        kind = (
            Fp8ProjectionLayers
            if dtypes.fp8
            else FusedProjectionLayers
            if plan.fused_projections
            else FusedLayers
            if plan.fused
            else Layers
        )
        self.layers = kind(self.ops, self.shape, plan.attention, plan.device, plan.written_out)
        self.policies = plan.policies()
        self.state: list[Buffer] = []
        self.deferred = DeferredFrees()
        if plan.updates_in_backward:
            self.tape.on_gradient = self._update_now
            if plan.device == "cuda":
                self.ops.read_by_side_stream = self.deferred.read
            if plan.takes_low_precision_grads:
                self.ops.on_weight_gradient = self._update_by_kernel

    def run(self) -> None:
        self._build()
        for step in range(_STEPS if self.plan.mode == "train-step" else 1):
            self._step(first=step == 0)

    def _build(self) -> None:
        model, new = self.plan.model, self.memory.buffer
        self.memory.begin("model built")
        self.embedding = self._weight(model.vocab, model.d_model)
        tables = [new(self.plan.context * model.d_head // 2 * FLOAT32, INPUTS) for _ in range(2)]
        shapes = _block_shapes(model)
        self.blocks = [[self._weight(*shape) for shape in shapes] for _ in range(model.n_layers)]
        self.norm = self._weight(model.d_model)
        self.head = self._weight(model.vocab, model.d_model)
        tokens = self.plan.batch * self.plan.context * _INT64
        self.inputs = [*tables, new(tokens, INPUTS), new(tokens, INPUTS)]
        self.memory.end()

    def _weight(self, rows: int, columns: int = 1) -> Value:
        """Create a parameter; ranks shard matrices by rows and replicate vectors."""
        matrix = columns > 1
        ranks = self.plan.ranks if self.plan.sharding == "full" and matrix else 1
        local_elements = -(-rows // ranks) * columns
        buffer = self.memory.buffer(local_elements * self.width, PARAMETERS)
        if matrix:
            # Initialized at random in float32; vectors are ones.
            self.memory.buffer(local_elements * FLOAT32)
        return Value(buffer, rows * columns, self.width, local_elements=local_elements)

    def _parameters(self) -> list[Value]:
        return [
            self.embedding,
            *(weight for block in self.blocks for weight in block),
            self.norm,
            self.head,
        ]

    def _step(self, first: bool) -> None:
        memory, plan = self.memory, self.plan
        self._first = first
        memory.begin("forward")
        if first:
            self._take_workspace(plan.workspaces)
        last, *branch = self._forward()
        if plan.loss == "fused" and plan.mode != "forward":
            loss = _fused_loss(self, last)
            del last, branch
            self.ops.leave_autocast()
            memory.end()
        else:
            logits = self._logits(last)
            del last, branch
            memory.end()
            if plan.mode == "forward":
                return
            memory.begin("loss")
            loss = self._loss(logits)
            memory.end()
        memory.begin("backward")
        if first and plan.workspaces == 1:
            # The backward pass runs in its own thread.
            self._take_workspace(1)
        assert loss.node is not None
        self.tape.backward(loss.node, memory.buffer(FLOAT32))
        memory.end()
        if plan.mode == "train-step":
            memory.begin("optimizer")
            self._optimize(first)
            memory.end()

    def _take_workspace(self, threads: int) -> None:
        if self.plan.device == "cuda":
            self.inputs += [
                self.memory.buffer(self.plan.workspace, LIBRARIES) for _ in range(threads)
            ]

    def _with_weights(
        self, x: Value, weights: list[Value], body: Callable[[Value, list[Value]], Value]
    ) -> Value:
        """Run `body` with full weights: sharded weights are gathered for it, and again for its
        backward pass."""
        if self.plan.sharding != "full":
            return body(x, weights)
        # Equal rows for each rank: the last rank may have fewer, and the rest is padding.
        sizes = [
            weight.local_elements * self.plan.ranks * (self.ops.autocast or weight.width)
            for weight in weights
            if weight.local_elements < weight.elements
        ]
        gathered: list[Buffer] = []

        def gather() -> None:
            gathered.extend(self.memory.buffer(size, GATHERED) for size in sizes)

        x = self.ops.with_backward_hook(x, gathered.clear)
        gather()
        out = body(x, weights)
        gathered.clear()
        return self.ops.with_backward_hook(out, gather)

    def _forward(self) -> Sequence[Value]:
        """Return the head's input, and the last branch, which the model's code keeps alive."""
        tape = self.tape
        stream = self.shape.tokens * self.shape.d_model
        table = self.embedding.bytes
        with tape.inside("embedding"):
            x = tape.operator(
                "lookup",
                self.memory.buffer(stream * self.width),
                stream,
                self.width,
                (self.embedding,),
                lambda _: (self.memory.buffer(table),),
            )
            x = self.ops.cast(x, self.stream_width)
        x, *branch = self._through_blocks([x], 0, len(self.blocks), self.plan.segments())
        with tape.inside("norm"):
            if isinstance(self.layers, FusedProjectionLayers):
                return self.layers.normed_sum(x, branch[0], self.norm)[1].value, *branch
            return (self.layers.norm(x, self.norm),)

    def _logits(self, x: Value) -> Value:
        ops = self.ops
        with self.tape.inside("head"):
            logits = self._with_weights(
                x, [self.head], lambda x, weights: ops.linear(x, weights[0], self.plan.model.vocab)
            )
        logits.buffer.line = LOGITS
        ops.leave_autocast()
        return logits

    def _through_blocks(
        self, stream: Sequence[Value], first: int, end: int, levels: tuple[int, ...]
    ) -> Sequence[Value]:
        """Return the stream and, with fused projections, the branch still to be added to it."""
        if not levels:
            for index in range(first, end):
                stream = self._through(index, *stream)
            return stream
        for start in range(first, end, levels[0]):
            body = partial(
                self._through_blocks,
                first=start,
                end=min(start + levels[0], end),
                levels=levels[1:],
            )
            stream = self.tape.checkpointed(stream, body)
        return stream

    def _through(self, index: int, x: Value, branch: Value | None = None) -> Sequence[Value]:
        layers, weights = self.layers, self.blocks[index]
        if isinstance(layers, FusedProjectionLayers):
            return layers.fused_block(x, branch, weights, self.policies[index])
        return (self._with_weights(x, weights, layers.block),)

    def _loss(self, logits: Value) -> Value:
        ops = self.ops
        with self.tape.inside("loss"):
            wide = ops.cast(logits, FLOAT32)
            probabilities = ops.saves_output(wide, "log-softmax")
            size, total_weight = probabilities.bytes, self.memory.buffer(FLOAT32)
            return self.tape.operator(
                "mean",
                self.memory.buffer(FLOAT32),
                1,
                FLOAT32,
                (probabilities,),
                lambda _: (self.memory.buffer(size),),
                (probabilities.buffer, total_weight),
            )

    def _update_now(self, parameter: Value, gradient: Buffer) -> None:
        """Update a parameter in the backward pass, as soon as its gradient is computed."""
        if not self.plan.has_kernels:
            size = self._updated_bytes(parameter)
            self._update_alone(size, _TEMPORARIES["stepscope"], self._first, one_by_one=self.master)
        else:
            self._update_by_kernel(gradient, parameter.bytes)

    def _update_by_kernel(self, gradient: Buffer, size: int) -> None:
        """`size` is the bytes of the gradient, which may be part of its buffer."""
        if not self.state:
            sizes = self._own_sizes()
            self.state = [*self._masters(sizes), *self._moments(sizes)]
        if self.plan.device == "cuda":
            self.deferred.read(gradient, size)

    def _optimize(self, first: bool) -> None:
        memory, plan = self.memory, self.plan
        if plan.updates_in_backward:
            self.deferred.join()
            return
        optimizer = plan.optimizer
        if optimizer == "stepscope-fused":
            # One launch, or the eager update rule if the kernel does not run.
            optimizer = "torch-fused" if plan.has_kernels else "stepscope"
        # PyTorch updates all parameters at once on CUDA only.
        on_all = optimizer == "torch" and plan.device == "cuda"
        temporaries = 0 if on_all else _TEMPORARIES[optimizer]
        sizes = self._own_sizes()
        # Stepscope's optimizer handles master weights itself. Around any other optimizer all
        # master weights are created, and all gradients widened.
        one_by_one = self.master and plan.optimizer == "stepscope-fused"
        wrapped = self.master and not one_by_one
        if first and (wrapped or not temporaries):
            self.state = self._masters(sizes)
        wide = [memory.buffer(size) for size in sizes] if wrapped else []
        if first and not temporaries:
            self.state += self._moments(sizes)
        if on_all:
            # Square roots of the second moments.
            roots = [memory.buffer(size) for size in sizes]
            del roots
        last = None
        for size in sizes if temporaries else ():
            temporary_buffers = self._update_alone(size, temporaries, first, one_by_one=one_by_one)
            # A loop variable of PyTorch's code: the divisor lives until the next one replaces it.
            last = temporary_buffers[-1] if optimizer == "torch" else None
            del temporary_buffers
        del wide, last
        for parameter in self._parameters():
            parameter.gradient = None

    def _update_alone(
        self, size: int, temporaries: int, first: bool, *, one_by_one: bool = False
    ) -> list[Buffer]:
        """`one_by_one`: the master copy is created with the moments, and one gradient widened."""
        if first:
            self.state += [*(self._masters([size]) if one_by_one else ()), *self._moments([size])]
        return [self.memory.buffer(size) for _ in range(temporaries + int(one_by_one))]

    def _masters(self, sizes: Sequence[int]) -> list[Buffer]:
        return [self.memory.buffer(size, OPTIMIZER) for size in sizes] if self.master else []

    def _moments(self, sizes: Sequence[int]) -> list[Buffer]:
        return [self.memory.buffer(size, OPTIMIZER) for size in sizes for _ in "mv"]

    def _updated_bytes(self, parameter: Value) -> int:
        return parameter.local_elements * (FLOAT32 if self.master else parameter.width)

    def _own_sizes(self) -> list[int]:
        """Bytes that this rank updates, parameters or their float32 copies; of all ranks, the one
        with the most."""
        sizes = [self._updated_bytes(parameter) for parameter in self._parameters()]
        if self.plan.sharding != "optimizer":
            return sizes
        model, loads = self.plan.model, [0] * self.plan.ranks
        block = [shape[0] for shape in _block_shapes(model)]
        rows = [model.vocab, *block * model.n_layers, model.d_model, model.vocab]
        tensors = [Rows(n, size // n) for n, size in zip(rows, sizes, strict=True)]
        pieces = share_out(tensors, loads)
        most = loads.index(max(loads))
        return [
            (p.end - p.begin) * tensors[p.tensor_index].bytes for p in pieces if p.owner == most
        ]


def _block_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Shapes of norm, four attention weights, norm, three feed-forward weights, in model order."""
    d, wide = model.d_model, model.d_ff
    return [(d,), *[(d, d)] * 4, (d,), (wide, d), (d, wide), (wide, d)]


def _fused_loss(simulation: StepSimulation, x: Value) -> Value:
    """Head and loss in chunks of rows, as `kernels.linear_cross_entropy` allocates it. Return the
    loss; gradients of x and of the head are computed with it and saved."""
    new, head, model = simulation.memory.buffer, simulation.head, simulation.plan.model
    tokens, vocab, d = simulation.shape.tokens, model.vocab, model.d_model
    compute = simulation.ops.autocast or max(x.width, head.width)
    wide = max(FLOAT32, compute)
    narrow: list[Buffer] = []
    columns = matmul_columns(vocab)
    if isinstance(simulation.layers, FusedProjectionLayers) and head.width != compute:
        simulation.layers.narrow([head], padding=(columns - vocab) * d)
    elif head.width != compute or columns != vocab:
        narrow.append(new(columns * d * compute))
    grad_x = new(tokens * d * compute)
    losses = new(tokens * wide)
    counted = new(wide), new(wide)
    loss, grad_weight = _loss_chunks(simulation, narrow, x.width != compute, compute, wide)
    del losses, counted
    x_width, head_width = x.width, head.width

    def rule(_: Buffer) -> tuple[Buffer, Buffer]:
        # Scaled in place, unless the dtype changes.
        towards_x = grad_x if x_width == compute else new(tokens * d * x_width)
        same = head_width == wide
        return towards_x, grad_weight if same else new(vocab * d * head_width)

    with simulation.tape.inside("loss"):
        return simulation.tape.operator(
            "gradients", loss, 1, wide, (x, head), rule, (grad_x, grad_weight)
        )


def _loss_chunks(
    simulation: StepSimulation, narrow: list[Buffer], casts: bool, compute: int, wide: int
) -> tuple[Buffer, Buffer]:
    """Loop over rows; return the loss and the gradient of the weight. All chunks share one buffer
    of logits; the cast weight is freed before the last matmul."""
    new, model = simulation.memory.buffer, simulation.plan.model
    tokens, vocab, d = simulation.shape.tokens, model.vocab, model.d_model
    rows, columns = min(tokens, rows_per_chunk(tokens, vocab, d)), matmul_columns(vocab)
    logits = new(rows * padded_columns(vocab) * compute, LOGITS)
    grad_weight = read = None
    for start in range(0, tokens, rows):
        own = min(rows, tokens - start)
        read = new(own * d * compute) if casts else None
        if not simulation.plan.has_kernels:
            # Logits in float32, minus their log-sum-exp, as probabilities.
            widened = new(own * vocab * wide) if wide != compute else None
            shifted = new(own * vocab * wide)
            probabilities = new(own * vocab * wide)
            del widened, shifted, probabilities
        if start + rows >= tokens:
            narrow.clear()
        # cuBLAS writes and accumulates in a wider dtype than it reads.
        widens = wide != compute and simulation.plan.device == "cpu"
        if grad_weight is not None:
            added = new(columns * d * compute) if widens else None
            del added
            continue
        copies = (new(own * columns * wide), new(own * d * wide)) if widens else ()
        grad_weight = new(columns * d * wide)
        del copies
    assert grad_weight is not None
    loss = new(wide)
    del read, logits
    return loss, grad_weight
