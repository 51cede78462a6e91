"""Memory and time of a compiled block under a plan, through the compiler's partitioner.

The joint graph of forward and backward pass is traced once on fake tensors. For each plan torch's
partitioner decides what the forward graph saves, as it does in `torch.compile`, and
`kernel_buffers` counts what the two graphs write.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.fx.traceback
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from stepscope.measure.dispatch import OperatorMode
from stepscope.planning.block_costs import BlockCost, Example
from stepscope.planning.cuda_operators import CudaDtypes, CudaOperators
from stepscope.planning.kernel_buffers import Kernels, base_of, bytes_in
from stepscope.planning.operators import Key, Rates
from stepscope.planning.selective import AS_IT_IS, BlockPlan, counted

_KEY = "stepscope_operator"


class _Joint(NamedTuple):
    module: fx.GraphModule
    outputs: int
    parameters: int
    """Number of the first inputs that are parameters and buffers."""


class CompiledBlock:
    """A block whose graph is known."""

    def __init__(self, example: Example, dtype: torch.dtype | None, rates: Rates) -> None:
        self._rates = rates
        self._joint, self._differentiable = _traced(example, dtype)
        plain, retained = self._measured(AS_IT_IS)
        self.retained = tuple(retained)
        """Bytes of each differentiable input, then output, that it saves; 0 of others."""
        self._plain_s = plain.forward_s + plain.backward_s
        self.plain = self.cost(AS_IT_IS)

    def cost(self, plan: BlockPlan) -> BlockCost:
        cost, _ = self._measured(plan)
        again = cost.forward_s + cost.backward_s - self._plain_s
        return cost._replace(saved=cost.saved - sum(self.retained), again_s=max(again, 0.0))

    def _measured(self, plan: BlockPlan) -> tuple[BlockCost, list[int]]:
        """Return the cost of a plan, and the bytes of each differentiable input, then output, that
        is saved as it is."""
        forward, backward = self._partitioned(plan)
        inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
        results = [_node(one) for one in _results(forward)]
        outputs = [base_of(one) for one in results[: self._joint.outputs] if one is not None]
        saved = {base_of(one) for one in results[self._joint.outputs :] if one is not None}
        differentiable = [inputs[at] for at in self._differentiable]
        boundary = [*differentiable, *dict.fromkeys(outputs)]
        retained = [bytes_in(one) if one in saved else 0 for one in boundary]
        own = saved - {*inputs, *outputs}
        held = sum(map(bytes_in, own))
        names = {node.name for node in own}
        given = [node for node in backward.graph.nodes if node.op == "placeholder"]
        gradients = [one for one in map(_node, _results(backward)) if one is not None]
        before = Kernels(forward.graph, self._rates).cost((), [r for r in results if r is not None])
        # Views of a saved tensor are saved under names of their own.
        owned = [node for node in given if node.name in names]
        after = Kernels(backward.graph, self._rates).cost(owned, gradients)
        cost = BlockCost(
            plan=plan,
            saved=held + sum(retained),
            copies=0,
            forward=before.most,
            backward=after.most,
            to_host=0,
            forward_s=before.seconds,
            backward_s=after.seconds,
            again_s=0.0,
        )
        return cost, retained

    def _partitioned(self, plan: BlockPlan) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint, outputs, parameters = self._joint
        graph = fx.Graph()
        result = graph.graph_copy(joint.graph, {})
        output = graph.output(result)
        output.meta = dict(next(iter(reversed(joint.graph.nodes))).meta)
        for node in graph.nodes if plan.recompute else ():
            key = node.meta.get(_KEY)
            if key is not None:
                keeps = key in plan.kept
                policy = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
                node.meta |= {"recompute": policy, "ac_graph_id": 0}
        return min_cut_rematerialization_partition(
            fx.GraphModule(joint, graph),
            None,
            num_fwd_outputs=outputs,
            static_lifetime_input_indices=list(range(parameters)),
        )


def _results(module: fx.GraphModule) -> list[Any]:
    return tree_flatten(next(iter(reversed(module.graph.nodes))).args)[0]


def _node(result: Any) -> fx.Node | None:
    return result if isinstance(result, fx.Node) else None


class _TracedError(Exception):
    """Ends the tracing once the graph is known."""


def _traced(example: Example, dtype: torch.dtype | None) -> tuple[_Joint, list[int]]:
    """Return the joint graph of a block, and which of its inputs are differentiable activations."""
    from torch._inductor.decomposition import select_decomp_table

    leaves, tree = tree_flatten((example.args, example.kwargs))
    where = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    state = {**dict(example.block.named_parameters()), **dict(example.block.named_buffers())}
    found: list[_Joint] = []

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

    def stop(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        for node in joint.graph.nodes:
            custom = node.meta.pop("custom", None) or {}
            if _KEY in custom and node.meta.get("partitioner_tag") != "is_backward":
                node.meta[_KEY] = custom[_KEY]
        found.append(_Joint(joint, num_fwd_outputs, len(state)))
        raise _TracedError

    given = [leaves[at].detach().requires_grad_(leaves[at].requires_grad) for at in where]
    compile_: Any = _as_it_is
    function: Any = aot_function(
        run, compile_, partition_fn=stop, decompositions=select_decomp_table()
    )
    with suppress(_TracedError):
        function(state, given)
    (joint,) = found
    start = len(state)
    return joint, [start + n for n, one in enumerate(given) if one.requires_grad]


def _as_it_is(module: Any, inputs: Any) -> Any:
    del inputs
    return module


class _Keys(OperatorMode):  # type: ignore[no-untyped-call]
    """Names the nodes of a graph by the operator that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        key: Key = counted(self._calls, function)
        with torch.fx.traceback.preserve_node_meta():
            torch.fx.traceback.current_meta["custom"] = {_KEY: key}
            try:
                return function(*arguments, **keywords)
            finally:
                torch.fx.traceback.current_meta.pop("custom", None)
