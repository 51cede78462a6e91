"""Memory of a step whose model or blocks are compiled: stand-ins allocate what their graphs do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from stepscope.planning.block_costs import BlockCost
from stepscope.planning.compiled_blocks import CompiledBlock
from stepscope.planning.fake_run import MemoryPrediction, StepOptions, predict_fake
from stepscope.planning.fake_step import Fakes
from stepscope.planning.operators import known_rates
from stepscope.planning.step_timeline import Blocks


def predict_compiled(
    fakes: Fakes,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    *,
    whole: bool,
) -> MemoryPrediction:
    """Estimate a step of fake tensors, within `fakes.active()`: `whole` for one graph of the model,
    otherwise one for each repeated block."""
    rates = known_rates()
    blocks = Blocks(model, rates, {"": model} if whole else None)
    blocks.run(optimizer, batch, options)
    costs = {}
    for kind, example in blocks.examples.items():
        block = CompiledBlock(example, options.dtype, rates)
        costs[kind], blocks.retained[kind] = block.plain, block.retained
    return with_costs(
        fakes, blocks, optimizer, batch, options, {n: costs[k] for n, k in blocks.kinds.items()}
    )


def with_costs(
    fakes: Fakes,
    blocks: Blocks,
    optimizer: Optimizer,
    batch: Any,
    options: StepOptions,
    costs: Mapping[str, BlockCost],
) -> MemoryPrediction:
    """Predict a step in which the blocks have these costs."""
    blocks.costs = costs
    try:
        with blocks.standing_in():
            found = predict_fake(
                fakes, blocks.model, optimizer, batch, options,
                steps=1, between=blocks.until_backward.clear,
            )  # fmt: skip
    finally:
        blocks.costs = None
    return replace(found, is_estimate=True)
