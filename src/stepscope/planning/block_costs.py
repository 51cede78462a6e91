"""Memory and time of one block, from a run of it alone on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stepscope.planning.cuda_operators import CudaDtypes, CudaOperators, InPlaceSums
from stepscope.planning.fake_run import run_backward
from stepscope.planning.host_copies import HostCopies
from stepscope.planning.operators import OperatorLog, Rates
from stepscope.planning.selective import AS_IT_IS, BlockPlan, apply_to
from stepscope.planning.simulated_bytes import SimulatedBytes


class Example(NamedTuple):
    """A call of a block."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BlockCost(NamedTuple):
    """Bytes and seconds of a block under a plan."""

    plan: BlockPlan
    saved: int
    """Bytes from its forward to its backward pass, without inputs and outputs that it saves as it
    is."""
    copies: int
    """Bytes of cast weights that autocast holds until the end of the forward pass."""
    forward: int
    """Largest number of bytes in its forward pass, above those before it."""
    backward: int
    to_host: int
    forward_s: float
    backward_s: float
    again_s: float
    """Seconds of recomputation."""


class BlockRun(NamedTuple):
    """A run of a block."""

    cost: BlockCost
    log: OperatorLog
    last: int
    """Number of its operators that a recomputation calls: up to the last saved tensor."""
    retained: tuple[int, ...]
    """Bytes of each differentiable input, then output, that it saves; 0 of others."""
    inputs: int
    """Number of differentiable inputs."""


class _Source(torch.autograd.Function):
    """Creates the differentiable inputs of a block, which nothing else refers to."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Sequence[Tensor]) -> Any:
        del ctx, anchor
        return tuple(torch.empty_like(one) for one in like)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients
        return None, None


class _Sink(torch.autograd.Function):
    """Takes the outputs of a block, and creates their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *outputs: Tensor) -> Tensor:
        ctx.begin = begin
        with _disable_current_modes():
            ctx.like = [torch.empty_like(one, device="meta") for one in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients = [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=gradient.device)
            for x in ctx.like
        ]
        ctx.begin()
        return None, *gradients


def run_block(
    example: Example,
    dtype: torch.dtype | None,
    rates: Rates,
    plan: BlockPlan = AS_IT_IS,
    plain: BlockRun | None = None,
) -> BlockRun:
    """Run a block under a plan; `plain` is its run as it is, with whose inputs and outputs memory
    is compared."""
    layer = apply_to(example.block, plan, HostCopies(), plan)
    try:
        with CudaDtypes(), CudaOperators():
            return _run(example, dtype, rates, plan, plain)
    finally:
        if layer is not None:
            layer.remove()
        for parameter in example.block.parameters():
            parameter.grad = None


def _run(
    example: Example,
    dtype: torch.dtype | None,
    rates: Rates,
    plan: BlockPlan,
    plain: BlockRun | None,
) -> BlockRun:
    counted, log = SimulatedBytes(), OperatorLog(rates)
    last, start, forward_end = 0, 0, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal last
        last = len(log.operators)
        with _disable_current_modes():
            return tensor.detach()

    def begin_backward() -> None:
        nonlocal start, forward_end
        start, forward_end = counted.begin_part(), len(log.operators)

    leaves, tree = tree_flatten((example.args, example.kwargs))
    where = [at for at, leaf in enumerate(leaves) if _is_differentiable(leaf)]
    with counted, log, InPlaceSums():
        block = example.block
        given = [x for x in leaves if isinstance(x, Tensor) and not x.requires_grad]
        counted.count((*block.parameters(), *block.buffers(), *given))
        anchor = torch.zeros((), requires_grad=True)
        before = counted.blocks.in_use
        made = _Source.apply(anchor, [leaves[at] for at in where])  # type: ignore[no-untyped-call]
        boundary = [one.untyped_storage()._cdata for one in made]
        new = dict(zip(where, made, strict=True))
        leaves = [new.get(at, leaf) for at, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, tree)
        del leaves, made, new
        log.operators.clear()
        at_start = counted.begin_part()
        with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
                output = block(*args, **kwargs)
            in_forward, with_copies = counted.blocks.most - at_start, counted.blocks.in_use
        outputs = [x for x in tree_leaves(output) if _is_differentiable(x)]
        cast = with_copies - counted.blocks.in_use
        boundary += {x.untyped_storage()._cdata for x in outputs} - set(boundary)
        loss = _Sink.apply(begin_backward, *outputs)  # type: ignore[no-untyped-call]
        operators = len(log.operators)
        del args, kwargs, output, outputs
        retained = [counted.size_of(storage) for storage in boundary]
        saved = counted.blocks.in_use - before
        run_backward(loss)
        del loss
    seconds = [one.seconds for one in log.operators]
    plain_log, plain_last = (log, last) if plain is None else (plain.log, plain.last)
    again = [one for one in plain_log.operators[:plain_last] if one.key not in plan.kept]
    cost = BlockCost(
        plan=plan,
        saved=saved - sum(retained if plain is None else plain.retained),
        copies=cast,
        forward=in_forward,
        backward=counted.blocks.most - start,
        to_host=0,
        forward_s=sum(seconds[:operators]),
        backward_s=sum(seconds[forward_end:]),
        again_s=sum(one.seconds for one in again) if plan.recompute else 0.0,
    )
    return BlockRun(cost, log, plain_last, tuple(retained), len(where))


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
