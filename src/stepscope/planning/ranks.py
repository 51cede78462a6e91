"""A step on data-parallel ranks: what one rank holds under DDP or FSDP2.

`torch.distributed.fsdp.fully_shard` is taken as applied to each repeated block and to the model:

- a rank has 1/N of parameters, gradients and optimizer state; parameters outside of blocks are
  gathered from the first forward operator to the last backward one;
- in the forward pass a block has its gathered parameters and the buffer of the all-gather, and
  while they are copied out also the buffer of the block before;
- in the backward pass it has its gathered parameters, the all-gather of the next block to run, and
  the input of the reduce-scatter of the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stepscope.errors import UsageError
from stepscope.planning.block_costs import BlockCost
from stepscope.planning.fake_run import FakeStep
from stepscope.records.memory import GATHERED, PARAMETERS

Sharding = Literal["none", "full"]


class Ranks(NamedTuple):
    """Data-parallel ranks: `none` is DDP, `full` is FSDP2."""

    number: int = 1
    sharding: Sharding = "none"
    reshard_after_forward: bool = True

    def require_valid(self) -> None:
        if self.number < 1:
            raise UsageError(f"ranks={self.number} is invalid", "use an integer, 1 or more")
        if self.sharding == "full" and self.number == 1:
            raise UsageError("sharding='full' with one rank", "give the number of ranks")


ONE_RANK = Ranks()


class ShardedModel:
    """A fake model whose blocks have shards for parameters, with the optimizer of the shards.

    `dtype` is that of `MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)`.
    """

    def __init__(
        self, step: FakeStep, blocks: Mapping[str, nn.Module], ranks: Ranks,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:  # fmt: skip
        self._ranks, self._optimizer = ranks, step.optimizer
        self._block_bytes = {name: _sizes(block) for name, block in blocks.items()}
        of_blocks = {id(p) for block in blocks.values() for p in block.parameters()}
        self._shards: dict[str, nn.Parameter] = {}
        shards: dict[int, nn.Parameter] = {}
        self._outside: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in step.model.named_parameters():
            rows = -(-parameter.shape[0] // ranks.number) if parameter.dim() else 1
            shape = (rows, *parameter.shape[1:])
            data = torch.empty(shape, dtype=dtypes.get(name, parameter.dtype))
            shard = nn.Parameter(data, requires_grad=parameter.requires_grad)
            shards[id(parameter)] = self._shards[name] = shard
            if id(parameter) not in of_blocks:
                self._outside.append((parameter, shard))
        for module in (part for block in blocks.values() for part in block.modules()):
            for key, own in module._parameters.items():
                if own is not None:
                    module._parameters[key] = shards[id(own)]
        for group in step.optimizer.param_groups:
            group["params"] = [shards.get(id(p), p) for p in group["params"]]
        step.optimizer.state.clear()

    @property
    def lines(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by line of a ledger: shards, and those that stay gathered."""
        outside = [parameter for parameter, _ in self._outside]
        return {PARAMETERS: list(self._shards.values()), GATHERED: outside}

    def create_states(self, trained: Iterable[str]) -> None:
        """Update once from gradients of these parameters, which creates the optimizer's states."""
        for name in trained:
            self._shards[name].grad = torch.empty_like(self._shards[name])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reduce(self) -> None:
        """Reduce the gradients of parameters outside of blocks to those of their shards."""
        whole = [(p, s) for p, s in self._outside if p.grad is not None]
        if not whole:
            return
        sent = torch.empty(sum(p.numel() for p, _ in whole), dtype=_REDUCED)
        for parameter, shard in whole:
            shard.grad = torch.empty_like(shard)
            parameter.grad = None
        del sent

    def gathered(self, costs: Mapping[str, BlockCost]) -> dict[str, BlockCost]:
        """Add the gathered parameters and the buffers of collectives to costs of blocks."""
        names = list(costs)
        changed = {}
        for at, name in enumerate(names):
            cost, full = costs[name], self._block_bytes[name][0]
            before = self._block_bytes[names[at - 1]][0] if at else 0
            after = self._block_bytes[names[at + 1]][1] if at + 1 < len(names) else 0
            stays = 0 if self._ranks.reshard_after_forward else full
            changed[name] = cost._replace(
                forward=max(2 * full + before, 2 * full + cost.forward),
                # The buffer of the last all-gather is freed after the forward pass.
                copies=cost.copies + (0 if at + 1 < len(names) else full),
                saved=cost.saved + stays,
                backward=cost.backward + full - stays + before + after,
            )
        return changed


_REDUCED = torch.float32
"""Dtype of the reduction of gradients."""


def _sizes(block: nn.Module) -> tuple[int, int]:
    """Bytes of the gathered parameters of a block, and of the input of its reduce-scatter."""
    parameters = list(block.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return sum(p.nbytes for p in parameters), trained * _REDUCED.itemsize


def in_dtype(step: FakeStep) -> tuple[FakeStep, dict[str, torch.dtype]]:
    """Convert a model to the dtype of its gathered parameters: FSDP2 casts these instead of
    autocast. Return the step, and the dtypes that the parameters had."""
    dtypes = {name: parameter.dtype for name, parameter in step.model.named_parameters()}
    dtype, batch = step.options.dtype, step.batch
    if dtype is not None:
        step.model.to(dtype)
        batch = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    return step._replace(batch=batch, options=step.options._replace(dtype=None)), dtypes
