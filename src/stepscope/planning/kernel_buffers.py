"""Buffers and time of a graph that torch's compiler turns into kernels.

A chain of elementwise operators and reductions becomes one kernel, whose intermediate results are
never written. What is written: results of matmuls, attention, convolutions and other library calls,
what these read, what the graph returns, and what is read after a library call that follows it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from stepscope.planning.operators import Rates, aliases, flops_of, name_of

_BLOCK = 512
"""Bytes to which the allocator rounds."""
_VIEWS = ("_unsafe_view", "view", "reshape", "expand", "permute", "alias", "lift_fresh_copy")
LIBRARY_CALLS = (
    "attention", "attention_backward", "mm", "addmm", "bmm", "baddbmm", "_scaled_mm",
    "convolution", "convolution_backward", "sort", "topk", "cumsum", "_embedding_bag",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "index_put", "scatter_add",
    "_fft_r2c", "_fft_c2r",
)  # fmt: skip
"""Operators that are no part of a fused kernel."""


class GraphCost(NamedTuple):
    most: int
    """Largest number of bytes above those at the start."""
    net: int
    seconds: float


def sizes_in(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def bytes_in(node: fx.Node) -> int:
    return sum(-(-one.nbytes // _BLOCK) * _BLOCK for one in sizes_in(node))


def is_library_call(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node.target) in LIBRARY_CALLS


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one shares."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        # Of several results of a call, each has its memory.
        source = node.args[0]
        return isinstance(source, fx.Node) and aliases_input(source)
    return aliases_input(node)


def aliases_input(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    return name_of(node.target) in _VIEWS or aliases(node.target)


class Kernels:
    """The kernels of a graph, in its order."""

    def __init__(self, graph: fx.Graph, rates: Rates) -> None:
        self._nodes = list(graph.nodes)
        self._position = {node: at for at, node in enumerate(self._nodes)}
        self._rates = rates
        self._levels: dict[fx.Node, int] = {}
        for node in self._nodes:
            self._levels[node] = self._level_of(node)
        self._users = {node: self._users_of(node) for node in self._nodes}
        self.is_written = {node: self._writes(node) for node in self._nodes}

    def _level_of(self, node: fx.Node) -> int:
        inputs = node.all_input_nodes
        return max((self._levels[one] + is_library_call(one) for one in inputs), default=0)

    def _users_of(self, node: fx.Node) -> list[fx.Node]:
        """The operators that read a node, also through views and parts of it."""
        found: list[fx.Node] = []
        for user in node.users:
            found += self._users_of(user) if base_of(user) is not user else [user]
        return found

    def _writes(self, node: fx.Node) -> bool:
        if node.op != "call_function" or base_of(node) is not node or not sizes_in(node):
            return False
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return not is_library_call(source) and self._is_read_later(node)
        if is_library_call(node):
            return True
        parts = [user for user in node.users if user.target is operator.getitem]
        return not parts and self._is_read_later(node)

    def _is_read_later(self, node: fx.Node) -> bool:
        level = self._levels[node]
        return any(
            user.op == "output" or is_library_call(user) or self._levels[user] > level
            for user in self._users[node]
        )

    def last_read(self, node: fx.Node, seen: dict[fx.Node, int] | None = None) -> int:
        """Return the position of the last kernel that reads a node."""
        seen = {} if seen is None else seen
        if node not in seen:
            seen[node] = self._position[node]
            for user in self._users[node]:
                through = not self.is_written[user] and user.op == "call_function"
                at = self.last_read(user, seen) if through else self._position[user]
                seen[node] = max(seen[node], at)
        return seen[node]

    def cost(self, owned: Iterable[fx.Node], returned: Iterable[fx.Node]) -> GraphCost:
        """Return what the graph allocates. Inputs that are `owned` are freed after their last
        kernel; what is `returned` stays."""
        stays = {base_of(node) for node in returned}
        memo: dict[fx.Node, int] = {}
        dying: dict[int, list[fx.Node]] = {}
        for node in (*owned, *(node for node in self._nodes if self.is_written[node])):
            if node not in stays:
                dying.setdefault(self.last_read(node, memo), []).append(node)
        now = most = 0
        for at, node in enumerate(self._nodes):
            freed = [bytes_in(one) for one in dying.get(at, ())]
            if self.is_written[node]:
                size = bytes_in(node)
                if not is_library_call(node) and size in freed:
                    # A kernel writes its result in place of an input that nothing reads later.
                    freed.remove(size)
                    size = 0
                now += size
            most = max(most, now)
            now -= sum(freed)
        return GraphCost(most, now, self._seconds())

    def _seconds(self) -> float:
        calls = sum(self._call_seconds(node) for node in self._nodes if is_library_call(node))
        read: dict[int, set[fx.Node]] = {}
        written: dict[int, int] = {}
        for node in self._nodes:
            if self.is_written[node] and not is_library_call(node):
                level = self._levels[node]
                written[level] = written.get(level, 0) + bytes_in(node)
                read.setdefault(level, set()).update(self._read_by(node))
        moved = sum(written.values()) + sum(
            bytes_in(one) for those in read.values() for one in those
        )
        return calls + moved / self._rates.memory

    def _read_by(self, node: fx.Node) -> set[fx.Node]:
        """The tensors in memory from which a kernel computes a node."""
        found: set[fx.Node] = set()
        todo = list(node.all_input_nodes)
        seen: set[fx.Node] = set()
        while todo:
            one = base_of(todo.pop())
            if one in seen:
                continue
            seen.add(one)
            is_stored = one.op == "placeholder" or self.is_written[one] or is_library_call(one)
            if is_stored:
                found.add(one)
            else:
                todo += one.all_input_nodes
        return found

    def _call_seconds(self, node: fx.Node) -> float:
        inputs = [x for one in node.all_input_nodes for x in sizes_in(one)]
        moved = sum(x.nbytes for x in (*inputs, *sizes_in(node)))
        values: Any = fx.map_arg(node.args, lambda one: one.meta.get("val"))
        flops = flops_of(node.target, values, dict(node.kwargs), node.meta.get("val"))
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else ""
        return self._rates.seconds(flops, dtype, moved)
