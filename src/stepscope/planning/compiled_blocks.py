"""Memory and time of a compiled block under a plan."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.measure.dispatch import OperatorMode
from stepscope.planning.block_costs import BlockCost, Example
from stepscope.planning.compiled_graphs import KEY, CompiledGraph, traced_joint
from stepscope.planning.cuda_operators import CudaDtypes, CudaOperators
from stepscope.planning.operators import Key, Rates
from stepscope.planning.selective import AS_IT_IS, BlockPlan, counted


class CompiledBlock:
    """A block whose graph is known."""

    def __init__(self, example: Example, dtype: torch.dtype | None, rates: Rates) -> None:
        self._graph = _traced(example, dtype, rates)
        plain, retained = self._graph.measured()
        self.retained = tuple(retained)
        """Bytes of each differentiable input, then output, that it saves; 0 of others."""
        self._plain_s = plain.forward_s + plain.backward_s
        self.plain = self.cost(AS_IT_IS)

    def cost(self, plan: BlockPlan) -> BlockCost:
        cost, _ = self._graph.measured(plan)
        again = cost.forward_s + cost.backward_s - self._plain_s
        return cost._replace(saved=cost.saved - sum(self.retained), again_s=max(again, 0.0))


def _traced(example: Example, dtype: torch.dtype | None, rates: Rates) -> CompiledGraph:
    """Return the graph of a block, whose boundary are its differentiable activations."""
    leaves, tree = tree_flatten((example.args, example.kwargs))
    where = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    state = {**dict(example.block.named_parameters()), **dict(example.block.named_buffers())}

    def run(state: dict[str, Tensor], given: list[Tensor]) -> Any:
        filled = list(leaves)
        for at, tensor in zip(where, given, strict=True):
            filled[at] = tensor
        args, kwargs = tree_unflatten(filled, tree)
        autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        # Programs read no values where they see that they are compiled.
        compiling = patch.object(torch.compiler, "_is_compiling_flag", True)
        with CudaDtypes(), CudaOperators(), autocast, _Keys(), compiling:
            output = torch.func.functional_call(example.block, state, args, kwargs)
        return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]

    given = [leaves[at].detach().requires_grad_(leaves[at].requires_grad) for at in where]
    joint = traced_joint(run, (state, given), len(state))
    assert joint is not None, "a block has parameters that are trained"
    differentiable = [len(state) + n for n, one in enumerate(given) if one.requires_grad]
    return CompiledGraph(joint, differentiable, rates)


class _Keys(OperatorMode):  # type: ignore[no-untyped-call]
    """Names the nodes of a graph by the operator that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        key: Key = counted(self._calls, function)
        with torch.fx.traceback.preserve_node_meta():
            torch.fx.traceback.current_meta["custom"] = {KEY: key}
            try:
                return function(*arguments, **keywords)
            finally:
                torch.fx.traceback.current_meta.pop("custom", None)
