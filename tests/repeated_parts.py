"""Compares a graph whose repeated parts are copied with one that is traced as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import unified_diff
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from stepscope.acceleration import repeated_parts, torch_internals


def copies_of(
    function: Callable[..., Any],
    *batches: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    dynamic: bool | None = None,
) -> list[int]:
    """Return how many parts of each graph that Dynamo makes were copied; the graphs are those of a
    trace of everything."""
    found: list[int] = []

    def compare(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        made: list[Any] = []
        combine = repeated_parts._with_copies
        with monkeypatch.context() as patch:
            patch.setattr(
                repeated_parts, "_with_copies", lambda graph, x: made.append(x) or combine(graph, x)
            )
            fakes = torch_internals.fake_inputs(module, inputs)
            quick = repeated_parts.retraced(module, fakes)
            patch.setattr(repeated_parts, "_repeated_parts", lambda _: ())
            whole = repeated_parts.retraced(module, fakes)
            # Names count sizes that the trace has dropped again.
            whole.graph = combine(whole.graph, repeated_parts._Copies())
        assert _text(quick) == _text(whole), _difference(quick, whole)
        _same_constants(quick, whole)
        for one, other in zip(quick.graph.nodes, whole.graph.nodes, strict=True):
            assert _described(one) == _described(other), one.name
        quick.graph.lint()
        found.append(sum(len(x.made) - len(x.dropped) for x in made))
        return module.forward

    run = torch.compile(function, backend=compare, dynamic=dynamic)
    for batch in batches:
        run(*batch)
    assert found
    return found


def _described(node: Node) -> object:
    """Return what passes read of a node."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    source = [x.name for x in node.meta.get("from_node", ())]
    stack = torch_internals.module_path(node)
    return stack, node.meta.get("stack_trace"), source, *map(_of_value, values), *sorted(node.meta)


def _of_value(x: Any) -> object:
    if not isinstance(x, Tensor):
        return str(x)
    return str(x.shape), str(x.stride()), str(x.storage_offset()), x.dtype, x.device


def _text(module: GraphModule) -> str:
    """Return the operators; copies share their constants."""
    return re.sub(r"_tensor_constant\d+(_\d+)?", "_tensor_constant", str(module.graph))


def _same_constants(quick: GraphModule, whole: GraphModule) -> None:
    for one, other in zip(quick.graph.nodes, whole.graph.nodes, strict=True):
        if one.op == "get_attr":
            values = (torch_internals.attribute_of(*x) for x in ((quick, one), (whole, other)))
            torch.testing.assert_close(*values, rtol=0, atol=0)


def _difference(quick: GraphModule, whole: GraphModule) -> str:
    """Return the lines in which two graphs differ."""
    texts = (_text(x).splitlines() for x in (quick, whole))
    return "\n".join(unified_diff(*texts, lineterm="", n=0))
