"""Memory of a step in other forms than it is written: compiled, or on several ranks.

Each kind of block runs once. Then the step runs with stand-ins, which allocate what the blocks do
in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stepscope.errors import UsageError
from stepscope.planning.block_costs import BlockCost, run_block
from stepscope.planning.cuda_operators import use_cuda_defaults
from stepscope.planning.fake_run import FakeStep, MemoryPrediction, predict_fake
from stepscope.planning.operators import Rates, known_rates
from stepscope.planning.ranks import ONE_RANK, Ranks, ShardedModel, in_dtype
from stepscope.planning.step_timeline import Blocks
from stepscope.records.memory import BUCKETS, GRAPH_INPUTS, WEIGHT_COPIES, PhasePeak

Compile = Literal["model", "blocks", "accelerate"]
T = TypeVar("T")


class Form(NamedTuple):
    """How a step runs."""

    compile: Compile | None = None
    """What `torch.compile` compiles, or "accelerate" for the step of `accelerate(compile=True)` and
    `TrainStep`; None for an eager step."""
    ranks: Ranks = ONE_RANK
    fp8: bool = False
    """Whether linear layers run in FP8, in an accelerated step."""

    def require_valid(self) -> None:
        if self.compile not in (None, *get_args(Compile)):
            words = ", ".join(f'"{one}"' for one in get_args(Compile))
            raise UsageError(f"compile={self.compile!r} is unknown", f"one of: {words}")
        if self.fp8 and self.compile != "accelerate":
            raise UsageError("FP8 is predicted for accelerated steps", 'use compile="accelerate"')
        self.ranks.require_valid()
        if self.compile == "accelerate" and self.ranks.number > 1:
            raise UsageError("an accelerated step is predicted on one rank", "use ranks=1")
        if self.compile == "model" and self.is_sharded:
            raise UsageError(
                "with sharding='full' each block is compiled by itself", 'use compile="blocks"'
            )

    @property
    def is_sharded(self) -> bool:
        return self.ranks.sharding == "full"

    def bucket_bytes(self, model: nn.Module) -> int:
        """Bytes of DDP's buckets, which have the gradients once more."""
        if self.ranks.number == 1 or self.is_sharded:
            return 0
        return sum(p.nbytes for p in model.parameters() if p.requires_grad)


EAGER = Form()


def predict_step(step: FakeStep, form: Form = EAGER) -> MemoryPrediction:
    """Predict a step of fake tensors in a form, within `fakes.active()`."""
    form.require_valid()
    if form.compile == "accelerate":
        return _accelerated(step, form)
    stands_in = form.compile is not None or form.is_sharded
    found = _with_stand_ins(step, form) if stands_in else predict_fake(step)
    if size := form.bucket_bytes(step.model):
        found = _with_buckets(found, size)
    return replace(found, is_estimate=form.compile is not None)


def _with_buckets(found: MemoryPrediction, size: int) -> MemoryPrediction:
    def more(peak: PhasePeak) -> PhasePeak:
        lines = peak.lines | {BUCKETS: size}
        return msgspec.structs.replace(peak, allocated=peak.allocated + size, lines=lines)

    return replace(found, phases=tuple(map(more, found.phases)), reserved=found.reserved + size)


def _accelerated(step: FakeStep, form: Form) -> MemoryPrediction:
    from stepscope.planning.accelerated import AcceleratedStep

    made = AcceleratedStep(step, known_rates(), fp8=form.fp8)
    step = step._replace(options=step.options._replace(loss_fn=made.loss_fn, dtype=None))
    inputs = [x.clone() for x in tree_leaves(step.batch) if isinstance(x, Tensor)]
    counted = {WEIGHT_COPIES: made.copies, GRAPH_INPUTS: inputs}
    predict_fake(step, steps=1, counted=counted)
    with made.updating():
        found = predict_fake(step, steps=1, counted=counted, between=made.begin)
    return replace(found, is_estimate=True, is_graph=True)


def _with_stand_ins(step: FakeStep, form: Form) -> MemoryPrediction:
    step, blocks, costs = run_blocks(step, form, known_rates(), partial(plain_costs, form=form))
    by_name = {name: costs[kind] for name, kind in blocks.kinds.items()}
    counted: Mapping[str, list[nn.Parameter]] = {}
    if blocks.sharded is not None:
        by_name, counted = blocks.sharded.gathered(by_name), blocks.sharded.lines
    blocks.costs = by_name
    with blocks.standing_in():
        return predict_fake(step, steps=1, counted=counted, between=blocks.begin)


def plain_costs(blocks: Blocks, step: FakeStep, form: Form) -> dict[Hashable, BlockCost]:
    """Run each kind of block without a plan, and return the costs."""
    if form.compile is not None:
        return _compiled_costs(blocks, step)
    for kind, example in blocks.examples.items():
        plain = blocks.plain[kind] = run_block(example, step.options.dtype, blocks.rates)
        blocks.retained[kind] = plain.retained
    return {kind: plain.cost for kind, plain in blocks.plain.items()}


def _compiled_costs(blocks: Blocks, step: FakeStep) -> dict[Hashable, BlockCost]:
    from stepscope.planning.compiled_blocks import CompiledBlock

    costs: dict[Hashable, BlockCost] = {}
    for kind, example in blocks.examples.items():
        block = CompiledBlock(example, step.options.dtype, blocks.rates)
        costs[kind], blocks.retained[kind] = block.plain, block.retained
    return costs


def run_blocks(
    step: FakeStep, form: Form, rates: Rates, measure: Callable[[Blocks, FakeStep], T]
) -> tuple[FakeStep, Blocks, T]:
    """Run a step once, `measure` its kinds of blocks, and return both with the step that has the
    state of the optimizer: under FSDP2 that of a rank."""
    use_cuda_defaults(step.optimizer)
    modules = {"": step.model} if form.compile == "model" else None
    if not form.is_sharded:
        blocks = Blocks(step.model, rates, modules)
        blocks.is_compiled = form.compile is not None
        blocks.run(step)
        return step, blocks, measure(blocks, step)
    step, dtypes = in_dtype(step)
    blocks = Blocks(step.model, rates, modules)
    blocks.is_compiled = form.compile is not None
    blocks.run(step, update=False)
    trained = [name for name, p in step.model.named_parameters() if p.grad is not None]
    step.model.zero_grad()
    measured = measure(blocks, step)
    blocks.sharded = ShardedModel(step, blocks.modules, form.ranks, dtypes)
    blocks.sharded.create_states(trained)
    return step, blocks, measured
