"""Memory and time of compiled graphs, through the compiler's partitioner.

The joint graph of forward and backward pass is traced once on fake tensors. For each plan torch's
partitioner decides what the forward graph saves, as it does in `torch.compile`, and
`kernel_buffers` counts what the two graphs write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointPolicy

from stepscope.errors import UsageError, one_line
from stepscope.planning.block_costs import BlockCost
from stepscope.planning.kernel_buffers import Kernels, base_of, bytes_in
from stepscope.planning.operators import Rates
from stepscope.planning.selective import AS_IT_IS, BlockPlan

KEY = "stepscope_operator"
"""Entry of a node's `meta`: the operator that it comes from."""


class Joint(NamedTuple):
    """Forward and backward pass as one graph."""

    module: fx.GraphModule
    results: int
    """Number of the first results that the forward pass returns; gradients follow."""
    outputs: int
    """Number of the last ones of them that are outputs: inputs that are written to come before."""
    parameters: int
    """Number of the first inputs that are parameters and buffers."""


class CompiledGraph:
    """A graph that is compiled. `boundary` has the positions of inputs that others made."""

    def __init__(self, joint: Joint, boundary: Sequence[int], rates: Rates) -> None:
        self._joint, self._boundary, self._rates = joint, boundary, rates

    def measured(self, plan: BlockPlan = AS_IT_IS) -> tuple[BlockCost, list[int]]:
        """Return the cost of a plan, and the bytes of each input of the boundary, then output, that
        is saved as it is."""
        forward, backward = self._partitioned(plan)
        inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
        results = [_node(one) for one in _results(forward)]
        returned, kept = results[: self._joint.results], results[self._joint.results :]
        outputs = [base_of(one) for one in returned[-self._joint.outputs :] if one is not None]
        saved = {base_of(one) for one in kept if one is not None}
        boundary = [*(inputs[at] for at in self._boundary), *outputs]
        retained = [
            bytes_in(one) if one in saved and one not in boundary[:at] else 0
            for at, one in enumerate(boundary)
        ]
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
        joint, results, _, parameters = self._joint
        graph = fx.Graph()
        result = graph.graph_copy(joint.graph, {})
        output = graph.output(result)
        output.meta = dict(next(iter(reversed(joint.graph.nodes))).meta)
        for node in graph.nodes if plan.recompute else ():
            key = node.meta.get(KEY)
            if key is not None:
                keeps = key in plan.kept
                policy = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
                node.meta |= {"recompute": policy, "ac_graph_id": 0}
        return min_cut_rematerialization_partition(
            fx.GraphModule(joint, graph),
            None,
            num_fwd_outputs=results,
            static_lifetime_input_indices=list(range(parameters)),
        )


def _results(module: fx.GraphModule) -> list[Any]:
    return tree_flatten(next(iter(reversed(module.graph.nodes))).args)[0]


def _node(result: Any) -> fx.Node | None:
    return result if isinstance(result, fx.Node) else None


class _TracedError(Exception):
    """Ends the tracing once the graph is known."""


def traced_joint(
    run: Callable[..., Any], arguments: Sequence[Any], parameters: int
) -> Joint | None:
    """Return the joint graph of a function of tensors, which returns a list of tensors; None if it
    has no backward pass. The first of its inputs are parameters and buffers."""
    from torch._inductor.decomposition import select_decomp_table

    found: list[Joint] = []
    outputs = 0

    def counted(*given: Any) -> Any:
        nonlocal outputs
        made = run(*given)
        outputs = len(made)
        return made

    def stop(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        for node in joint.graph.nodes:
            custom = node.meta.pop("custom", None) or {}
            if KEY in custom and node.meta.get("partitioner_tag") != "is_backward":
                node.meta[KEY] = custom[KEY]
        found.append(Joint(joint, num_fwd_outputs, outputs, parameters))
        raise _TracedError

    compile_: Any = _as_it_is
    function: Any = aot_function(
        counted, compile_, partition_fn=stop, decompositions=select_decomp_table()
    )
    try:
        function(*arguments)
    except _TracedError:
        return found[0]
    except Exception as error:
        raise UsageError(
            f"torch.compile cannot trace it: {one_line(error)}", "predict the eager step"
        ) from error
    return None


def _as_it_is(module: Any, inputs: Any) -> Any:
    del inputs
    return module
