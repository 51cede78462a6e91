"""A whole step played through in sizes: model, forward, loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from stepscope.analysis.predict.allocator import CachingAllocator, ExactAllocator, OutOfBlocks
from stepscope.analysis.predict.deferred_frees import DeferredFrees
from stepscope.analysis.predict.fused_layers import FusedLayers, FusedProjectionLayers
from stepscope.analysis.predict.fused_loss import fused_loss
from stepscope.analysis.predict.layers import Layers, Shape
from stepscope.analysis.predict.memory import Buffer, Memory, MemoryState
from stepscope.analysis.predict.operators import FLOAT32, Operators
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.tape import Tape, Value
from stepscope.model.config import ModelConfig, precision
from stepscope.parallel.buckets import Rows, share_out
from stepscope.records.memory import GATHERED, INPUTS, LIBRARIES, LOGITS, OPTIMIZER, PARAMETERS

_INT64 = 8
_WIDTHS = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
_TEMPORARIES = {"torch": 2, "torch-fused": 0, "stepscope": 1, "course": 3}
"""Of the size of a parameter, while an optimizer updates it alone."""
_STEPS = 2
"""The first makes the optimizer state, the second is like all that follow."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Of each phase its peak, itemised, and what is left at its end."""

    plan: StepPlan
    phases: tuple[MemoryState, ...]
    ends: dict[str, int]

    @property
    def peak(self) -> MemoryState:
        return max(self.phases, key=lambda moment: moment.allocated)


def predict(plan: StepPlan) -> Prediction:
    """Played twice: the first time to learn when the peaks are, the second to itemise them."""
    first = Play(plan, frozenset())
    first.run()
    watched = frozenset(event for _, event in first.memory.peaks.values())
    second = Play(plan, watched)
    second.run()
    return Prediction(
        plan=plan,
        phases=tuple(second.memory.moments[event] for _, event in first.memory.peaks.values()),
        ends=dict(second.memory.ends),
    )


def overrun(plan: StepPlan, limit: int) -> MemoryState | None:
    """What is held when the step first needs more than the limit; None if it never does."""
    play = Play(plan, limit=limit)
    play.run()
    return play.memory.overrun


def runs_within(plan: StepPlan, limit: int) -> bool:
    """Whether the allocator finds room for every request without taking more than the limit."""
    play = Play(plan, limit=limit, enforced=True)
    try:
        play.run()
    except OutOfBlocks:
        return False
    return play.memory.overrun is None


class Play:
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
        form = precision(plan.dtype)
        self.width, self.stream_width = _WIDTHS[form.weights], _WIDTHS[form.stream]
        self.master = form.master
        blocks = CachingAllocator(limit if enforced else None)
        self.memory = Memory(blocks if plan.device == "cuda" else ExactAllocator(), watched, limit)
        self.tape = Tape(self.memory)
        self.ops = Operators(self.tape, _WIDTHS[form.compute] if form.autocast else None)
        model = plan.model
        self.shape = Shape(
            batch=plan.batch, context=plan.context, d_model=model.d_model, d_ff=model.d_ff,
            heads=model.n_heads,
        )  # fmt: skip
        kind = FusedProjectionLayers if plan.joined else FusedLayers if plan.fused else Layers
        self.layers = kind(self.ops, self.shape, plan.attention, plan.device, plan.written_out)
        self.keeps = plan.kept()
        self.state: list[Buffer] = []
        self.beside = DeferredFrees()
        if plan.updates_in_backward:
            self.tape.take = self._update_at_once
            if plan.device == "cuda":
                self.ops.read_beside = self.beside.read
            if plan.takes_gradients_as_made:
                self.ops.hand_over = self._update_by_kernel

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
        """Ranks divide a matrix by whole rows, and have vectors each."""
        matrix = columns > 1
        ranks = self.plan.ranks if self.plan.sharding == "full" and matrix else 1
        kept = -(-rows // ranks) * columns
        buffer = self.memory.buffer(kept * self.width, PARAMETERS)
        if matrix:
            # Drawn at random in float32; vectors are ones.
            self.memory.buffer(kept * FLOAT32)
        return Value(buffer, rows * columns, self.width, kept=kept)

    def _parameters(self) -> list[Value]:
        return [
            self.embedding, *(weight for block in self.blocks for weight in block),
            self.norm, self.head,
        ]  # fmt: skip

    def _step(self, first: bool) -> None:
        memory, plan = self.memory, self.plan
        self._first = first
        memory.begin("forward")
        if first:
            self._take_workspace(plan.workspaces)
        last, *branch = self._forward()
        if plan.loss == "fused" and plan.mode != "forward":
            loss = fused_loss(self, last)
            del last, branch
            self.ops.leave_autocast()
            memory.end()
        else:
            logits = self._make_logits(last)
            del last, branch
            memory.end()
            if plan.mode == "forward":
                return
            memory.begin("loss")
            loss = self._loss(logits)
            memory.end()
        memory.begin("backward")
        if first and plan.workspaces == 1:
            # The backward runs in a thread of its own.
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
        """Run `body` with whole weights: where ranks divide them, they are gathered for it, and
        again for its backward."""
        if self.plan.sharding != "full":
            return body(x, weights)
        # As many rows of each rank: the last ones may have fewer, and the rest is padding.
        sizes = [
            weight.kept * self.plan.ranks * (self.ops.autocast or weight.width)
            for weight in weights
            if weight.kept < weight.elements
        ]
        gathered: list[Buffer] = []

        def gather() -> None:
            gathered.extend(self.memory.buffer(size, GATHERED) for size in sizes)

        x = self.ops.around(x, gathered.clear)
        gather()
        out = body(x, weights)
        gathered.clear()
        return self.ops.around(out, gather)

    def _forward(self) -> Sequence[Value]:
        """What the head reads, and the last branch: a variable of the model holds it until then."""
        tape = self.tape
        stream = self.shape.tokens * self.shape.d_model
        table = self.embedding.bytes
        with tape.inside("embedding"):
            x = tape.operator(
                "lookup", self.memory.buffer(stream * self.width), stream, self.width,
                (self.embedding,), lambda _: (self.memory.buffer(table),),
            )  # fmt: skip
            x = self.ops.cast(x, self.stream_width)
        x, *branch = self._through_blocks([x], 0, len(self.blocks), self.plan.stretches())
        with tape.inside("norm"):
            if isinstance(self.layers, FusedProjectionLayers):
                return self.layers.normed_sum(x, branch[0], self.norm)[1].value, *branch
            return (self.layers.norm(x, self.norm),)

    def _make_logits(self, x: Value) -> Value:
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
        """The stream, and where products are joined the branch that is still to be added to it."""
        if not levels:
            for number in range(first, end):
                stream = self._through(number, *stream)
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

    def _through(self, number: int, x: Value, branch: Value | None = None) -> Sequence[Value]:
        layers, weights = self.layers, self.blocks[number]
        if isinstance(layers, FusedProjectionLayers):
            return layers.joined_block(x, branch, weights, self.keeps[number])
        return (self._with_weights(x, weights, layers.block),)

    def _loss(self, logits: Value) -> Value:
        ops = self.ops
        with self.tape.inside("loss"):
            wide = ops.cast(logits, FLOAT32)
            probabilities = ops.keeps_output(wide, "log-softmax")
            size, total_weight = probabilities.bytes, self.memory.buffer(FLOAT32)
            return self.tape.operator(
                "mean", self.memory.buffer(FLOAT32), 1, FLOAT32, (probabilities,),
                lambda _: (self.memory.buffer(size),), (probabilities.buffer, total_weight),
            )  # fmt: skip

    def _update_at_once(self, parameter: Value, gradient: Buffer) -> None:
        """In the backward, as soon as a gradient is there."""
        if not self.plan.has_kernels:
            size = self._updated_bytes(parameter)
            self._update_alone(size, _TEMPORARIES["stepscope"], self._first, alike=self.master)
        else:
            self._update_by_kernel(gradient, parameter.bytes)

    def _update_by_kernel(self, gradient: Buffer, size: int) -> None:
        """`size`: bytes of the gradient, which may be a part of its buffer."""
        if not self.state:
            sizes = self._own_sizes()
            self.state = [*self._masters(sizes), *self._moments(sizes)]
        if self.plan.device == "cuda":
            self.beside.read(gradient, size)

    def _optimize(self, first: bool) -> None:
        memory, plan = self.memory, self.plan
        if plan.updates_in_backward:
            self.beside.join()
            return
        optimizer = plan.optimizer
        if optimizer == "stepscope-fused":
            # One launch, or where its kernel does not run the rule written out.
            optimizer = "torch-fused" if plan.has_kernels else "stepscope"
        # Torch works on all parameters at once on CUDA only.
        on_all = optimizer == "torch" and plan.device == "cuda"
        temporaries = 0 if on_all else _TEMPORARIES[optimizer]
        sizes = self._own_sizes()
        # Ours knows of master weights. Around any other all are made, and all gradients widened.
        alike = self.master and plan.optimizer == "stepscope-fused"
        around = self.master and not alike
        if first and (around or not temporaries):
            self.state = self._masters(sizes)
        wide = [memory.buffer(size) for size in sizes] if around else []
        if first and not temporaries:
            self.state += self._moments(sizes)
        if on_all:
            # The roots of the second moments.
            roots = [memory.buffer(size) for size in sizes]
            del roots
        last = None
        for size in sizes if temporaries else ():
            made = self._update_alone(size, temporaries, first, alike=alike)
            # A variable of torch's loop: the divisor stays until there is the next one.
            last = made[-1] if optimizer == "torch" else None
            del made
        del wide, last
        for parameter in self._parameters():
            parameter.gradient = None

    def _update_alone(
        self, size: int, temporaries: int, first: bool, *, alike: bool = False
    ) -> list[Buffer]:
        """`alike`: the master copy is made as the moments are, and one gradient widened."""
        if first:
            self.state += [*(self._masters([size]) if alike else ()), *self._moments([size])]
        return [self.memory.buffer(size) for _ in range(temporaries + int(alike))]

    def _masters(self, sizes: Sequence[int]) -> list[Buffer]:
        return [self.memory.buffer(size, OPTIMIZER) for size in sizes] if self.master else []

    def _moments(self, sizes: Sequence[int]) -> list[Buffer]:
        return [self.memory.buffer(size, OPTIMIZER) for size in sizes for _ in "mv"]

    def _updated_bytes(self, parameter: Value) -> int:
        return parameter.kept * (FLOAT32 if self.master else parameter.width)

    def _own_sizes(self) -> list[int]:
        """Bytes of what this rank updates, parameters or their float32 copies: of all ranks the one
        with the most."""
        sizes = [self._updated_bytes(parameter) for parameter in self._parameters()]
        if self.plan.sharding != "optimizer":
            return sizes
        model, loads = self.plan.model, [0] * self.plan.ranks
        block = [shape[0] for shape in _block_shapes(model)]
        rows = [model.vocab, *block * model.n_layers, model.d_model, model.vocab]
        things = [Rows(n, size // n) for n, size in zip(rows, sizes, strict=True)]
        pieces = share_out(things, loads)
        most = loads.index(max(loads))
        return [(p.end - p.begin) * things[p.place].bytes for p in pieces if p.owner == most]


def _block_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Norm, the four of attention, norm, the three of the feed-forward; as the model has them."""
    d, wide = model.d_model, model.d_ff
    return [(d,), *[(d, d)] * 4, (d,), (wide, d), (d, wide), (wide, d)]
