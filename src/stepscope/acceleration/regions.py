"""Splits a graph into regions: each repeated block is one, and so is what surrounds the blocks.

A graph of the full model returns all gradients at once, after its last kernel; a region returns its
own as soon as its backward pass has run. Regions with the same operators and inputs are compiled
once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from stepscope.acceleration.comparison import (
    Comparison,
    CompiledPart,
    Part,
    as_tuple,
    constants_of,
    with_gradient,
)
from stepscope.acceleration.copied import Copied, CopiedTogether
from stepscope.acceleration.passes.matching import is_tensor, memory_of, value_of
from stepscope.acceleration.sharded.unit_calls import as_direct_call, is_unit_call, with_calls_apart
from stepscope.acceleration.torch_internals import (
    ENTERS_AUTOCAST,
    EXITS_AUTOCAST,
    GRAD_MODE,
    Compiled,
    as_region_input,
    attribute_of,
    fake_mode,
    is_dense,
    known_symbols,
    module_path,
    own_tracing_context,
    split,
    symbols_of,
    written_arguments,
)
from stepscope.kernels.activation_operator import activated_linear
from stepscope.kernels.fp8.traced import traced_linear

aten = torch.ops.aten
_MATMULS = (aten.linear.default, aten.matmul.default, aten.einsum.default, aten.addmm.default,
            aten.conv2d.default, aten.conv1d.default, traced_linear, activated_linear)  # fmt: skip
_MIN_MATMULS = 2
"""Fewer are not a block: an activation between two linear layers would not be fused."""
_ALIGNMENT = 16
"""Bytes of the largest load of a kernel."""
_VIEWS = (aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim,
          aten.view.default, aten.reshape.default, aten.transpose.int)  # fmt: skip


@dataclass(frozen=True)
class Regions:
    """How many regions a graph has, and how many of them differ."""

    count: int
    compiled: int


ONE_REGION = Regions(1, 1)


def region_numbers(module: GraphModule) -> dict[Node, int]:
    """Return the region of each node: numbers that never decrease."""
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    blocks = repeated_blocks(nodes)
    after = _after_blocks(nodes, blocks)
    returned = _returned_and_read(module)
    numbers: dict[Node, int] = {}
    current, block, ends = 0, None, False
    for node, within in _with_context(nodes):
        if node.target is operator.getitem:  # A region returns no lists.
            numbers[node] = numbers.get(node.all_input_nodes[0], current)
            continue
        here = blocks.get(node)
        starts = (here is not None and here != block) or (bool(block) and node in after)
        if not within and (starts or ends):
            current, ends = current + 1, False
            block = here if starts else block
        numbers[node] = current
        ends = ends or node in returned
    return numbers


def _returned_and_read(module: GraphModule) -> set[Node]:
    """Return the outputs that others are computed from, such as logits: a region ends there, so
    that gradients pass through the tensor that the caller has."""
    output = next(iter(reversed(module.graph.nodes)))
    return {
        node
        for node in output.all_input_nodes
        if len(node.users) > 1 and is_tensor(node) and value_of(node).is_floating_point()
    }


def _with_context(nodes: Sequence[Node]) -> Iterator[tuple[Node, bool]]:
    """Yield each node, and whether it runs without gradients or in an autocast of the model: a
    region does not end there."""
    no_grad, autocasts = False, 0
    for node in nodes:
        if node.target is GRAD_MODE:
            no_grad = not node.args[0]
        autocasts += (node.target is ENTERS_AUTOCAST) - (node.target is EXITS_AUTOCAST)
        yield node, no_grad or autocasts > 0 or node.target in (GRAD_MODE, EXITS_AUTOCAST)


def hoist_views(module: GraphModule) -> None:
    """Move views of inputs to the start: `scales[3]` would make the block that reads it different
    from the others."""
    first = {n for n in module.graph.nodes if n.op == "placeholder"}
    inner = [n for n in module.graph.nodes if n.op != "placeholder"]
    anchor = inner[0]
    for node, within in _with_context(inner):
        if not within and node.target in _VIEWS and set(node.all_input_nodes) <= first:
            first.add(node)
            if node is not anchor:
                anchor.prepend(node)
            else:
                anchor = anchor.next


def gather_parts(module: GraphModule) -> None:
    """Move the parts of a list, such as those of `split`, to the operator that returns it."""
    for node in list(module.graph.nodes):
        if node.target is operator.getitem:
            node.args[0].append(node)


def _after_blocks(nodes: Sequence[Node], blocks: dict[Node, str]) -> set[Node]:
    """Return the nodes after the last block: head and loss. What lies between two blocks belongs to
    the region of the first."""
    after: set[Node] = set()
    for node in reversed(nodes):
        if node in blocks:
            break
        after.add(node)
    return after


def repeated_blocks(nodes: Sequence[Node]) -> dict[Node, str]:
    """Return the path of the repeated module that each node belongs to: modules of one class with
    the same parent, the outermost that contain several matmuls."""
    calls: dict[str, tuple[str, Any]] = {}
    matmuls: Counter[str] = Counter()
    paths = {node: module_path(node) for node in nodes}
    for node, path in paths.items():
        for name, kind in path:
            calls[name] = (name.rpartition(".")[0], kind)
            matmuls[name] += node.target in _MATMULS
    siblings = Counter(calls.values())
    repeated = {
        name
        for name, family in calls.items()
        if siblings[family] > 1 and matmuls[name] >= _MIN_MATMULS
    }
    found = {}
    for node, path in paths.items():
        outermost = next((name for name, _ in path if name in repeated), None)
        if outermost is not None:
            found[node] = outermost
    return found


def compile_regions(
    module: GraphModule,
    original: GraphModule,
    inputs: Sequence[Any],
    compile_region: Callable[[GraphModule, Sequence[Any]], Compiled],
    *,
    by_block: bool = True,
    copied: Mapping[str, Copied] | None = None,
) -> tuple[Compiled, Regions, Comparison]:
    """Compile each kind of region once, and return the graph that calls them, with the regions of
    the original graph to compare them with. `copied` makes the last inputs of the graph."""
    copied = copied or {}
    gather_parts(module)
    numbers = region_numbers(module)
    if not by_block or any(_writes_to_another(node, numbers) for node in numbers):
        numbers = dict.fromkeys(numbers, 0)
    numbers = with_calls_apart(module, numbers)
    _require_calls_outside_of_contexts(numbers)
    before = split(original, _numbers_of(original, numbers))
    outer = split(module, numbers)
    placeholders = [n for n in outer.graph.nodes if n.op == "placeholder"]
    values = {n.name: n.meta["val"] for n in module.graph.nodes if n.name in copied}
    inputs = [*inputs, *(values[n.name] for n in placeholders if n.name in copied)]
    compiler = _Compiler(outer, compile_region, inputs)
    compiler.run(*inputs)
    for node in outer.graph.nodes:
        if node.op == "call_module":
            more = (placeholders[at] for at in compiler.lengths[node.target])
            node.args = (*node.args, *more)
    given = [n for n in placeholders if n.name not in copied]
    _copy_where_read(outer, copied)
    comparison = Comparison(
        tuple(n.name for n in given),
        {number: Part.of(part) for number, part in _parts(before)},
        {number: compiler.compiled[_NAME + str(number)] for number, _ in _parts(outer)},
        constants_of(before) | constants_of(outer),
        copied,
    )
    for name, compiled in compiler.compiled.items():
        setattr(outer, name, _Call(compiled.run))
    outer.recompile()
    regions = Regions(len(compiler.compiled), len(compiler.by_structure))
    return outer.forward, regions, comparison


def _require_calls_outside_of_contexts(numbers: Mapping[Node, int]) -> None:
    """Raise if a unit is called without gradients or in an autocast of the model, which would end
    in another region, or if a region writes to memory of another."""
    calls = [node for node, within in _with_context(list(numbers)) if is_unit_call(node) and within]
    if calls:
        raise ValueError("a sharded part is called in an autocast, or without gradients")
    if any(map(is_unit_call, numbers)) and any(
        _writes_to_another(x, dict(numbers)) for x in numbers
    ):
        raise ValueError("it writes to what was made before a call of a sharded part")


def _copy_where_read(outer: GraphModule, copied: Mapping[str, Copied]) -> None:
    """Make copies of weights right before the first region that reads them: then their gradients
    are passed on as soon as those of that region are known."""
    graph = outer.graph
    placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    readers: dict[object, tuple[Node, list[Copied]]] = {}
    for one in {id(x): x for x in copied.values()}.values():
        users = {user for name in one.names for user in placeholders[name].users}
        if users:
            first = min(users)
            # The gradient of what several regions read is known later than those of one alone.
            alone = len(users) > 1 or type(one) is not Copied
            key: object = one.names if alone else first
            readers.setdefault(key, (first, []))[1].append(one)
    for number, (first, parts) in enumerate(readers.values()):
        together = parts[0] if len(parts) == 1 else CopiedTogether(tuple(parts))
        name = f"copied_{number}"
        setattr(outer, name, _Call(together))
        with graph.inserting_before(first):
            made = graph.call_module(name, tuple(map(placeholders.__getitem__, together.weights)))
            values = [
                graph.call_function(operator.getitem, (made, at))
                for at in range(len(together.names))
            ]
        for input_name, value in zip(together.names, values, strict=True):
            placeholders[input_name].replace_all_uses_with(value)
    for name in copied:
        graph.erase_node(placeholders[name])


_NAME = "submod_"
"""Prefix of the submodules of a split graph."""


def _parts(outer: GraphModule) -> Iterator[tuple[int, GraphModule]]:
    for name, part in outer.named_children():
        if isinstance(part, GraphModule):
            yield int(name.removeprefix(_NAME)), part


def _numbers_of(original: GraphModule, numbers: dict[Node, int]) -> dict[Node, int]:
    """Return the regions of the nodes before the passes: nodes that went belong to that of the
    next one that did not, as the head does to that of the loss."""
    by_name = {node.name: number for node, number in numbers.items()}
    found: dict[Node, int] = {}
    current = max(by_name.values(), default=0)
    for node in reversed(original.graph.nodes):
        if node.op not in ("placeholder", "output"):
            found[node] = current = min(current, by_name.get(node.name, current))
    return found


def _writes_to_another(node: Node, numbers: dict[Node, int]) -> bool:
    """Return whether an operator writes to memory that another region allocated."""
    return any(
        numbers.get(memory, numbers[node]) != numbers[node]
        for argument in written_arguments(node)
        for memory in memory_of(argument)
    )


class _Call(torch.nn.Module):
    """A compiled region, or what makes copies of weights, as a submodule."""

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *args: Any) -> Any:
        return self.compiled(*args)


class _Compiler(Interpreter):
    """Runs the outer graph on fake tensors and compiles each region with its inputs."""

    def __init__(
        self,
        outer: GraphModule,
        compile_region: Callable[[GraphModule, Sequence[Any]], Compiled],
        inputs: Sequence[Any],
    ) -> None:
        super().__init__(outer)
        self._compile, self._inputs = compile_region, inputs
        self._names = [n.name for n in outer.graph.nodes if n.op == "placeholder"]
        self.compiled: dict[str, CompiledPart] = {}
        self.lengths: dict[str, list[int]] = {}
        """Which inputs of the outer graph each region has as further arguments."""
        self.by_structure: dict[tuple[object, ...], Compiled] = {}
        self._outputs: dict[tuple[object, ...], Callable[[], Any] | None] = {}
        """What makes the outputs of the next region with this structure."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.fetch_attr(target)
        assert isinstance(region, GraphModule)
        key = _structure(region, args)
        with fake_mode():
            outputs = None if (like := self._outputs.get(key)) is None else like()
            if outputs is None:
                outputs = super().call_module(target, args, kwargs)
        lengths = self.lengths[str(target)] = self._lengths(args)
        for at in lengths:
            last = [n for n in region.graph.nodes if n.op == "placeholder"][-1]
            with region.graph.inserting_after(last):
                region.graph.placeholder(self._names[at])
        region.recompile()
        args = (*args, *(self._inputs[at] for at in lengths))
        part = Part.of(region)
        compiled = self.by_structure.get(key)
        if compiled is None:
            self._outputs[key] = _likes(outputs, args)
            single = _with_tuple_output(region)
            run = as_direct_call(region)
            if run is None:
                with own_tracing_context():
                    run = self._compile(region, [as_region_input(x) for x in args])
            compiled = _with_layout(run, as_tuple(outputs), single)
            self.by_structure[key] = compiled
        kind = list(self.by_structure).index(key)
        is_call = any(map(is_unit_call, region.graph.nodes))
        self.compiled[str(target)] = CompiledPart(
            part, compiled, with_gradient(part, args), kind, is_call
        )
        return outputs

    def _lengths(self, args: Sequence[Any]) -> list[int]:
        """Return which inputs of the outer graph are lengths that these arguments have only within
        an expression such as `length - 1`."""
        unknown = set().union(*map(symbols_of, args)) - set().union(*map(known_symbols, args))
        found = {symbol: at for at, x in enumerate(self._inputs) if isinstance(x, torch.SymInt)
                 for symbol in known_symbols(x) & unknown}  # fmt: skip
        return sorted(found.values())


def _likes(outputs: Any, inputs: Sequence[Any]) -> Callable[[], Any] | None:
    """Return what makes outputs of an equal region with equal inputs. None if they are views, whose
    memory is that of others, or have sizes that only running the region gives."""
    known = set().union(*map(symbols_of, inputs))
    for x in as_tuple(outputs):
        if not isinstance(x, Tensor) or x._is_view() or any(x is one for one in inputs):
            return None
        if not symbols_of(x) <= known or x.storage_offset() != 0 or (x.requires_grad and x.is_leaf):
            return None
    return lambda: tree_map(_like, outputs)


def _like(x: Tensor) -> Tensor:
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    # With a gradient it is no leaf.
    return made.requires_grad_().as_strided(x.shape, x.stride()) if x.requires_grad else made


def _with_tuple_output(region: GraphModule) -> bool:
    """Make the output of a region a tuple, which compilers demand; return whether it was not."""
    output = next(iter(reversed(region.graph.nodes)))
    if isinstance(output.args[0], tuple | list):
        return False
    output.args = ((output.args[0],),)
    region.recompile()
    return True


def _with_layout(run: Compiled, expected: Sequence[Any], single: bool) -> Compiled:
    """Return the compiled region with outputs as contiguous as they are in the trace, which other
    regions rely on: Inductor pads the rows of a matmul. `single`: return the first output alone."""
    dense = [at for at, x in enumerate(expected) if isinstance(x, Tensor) and is_dense(x)]

    def call(*given: Any) -> Any:
        outputs = list(run(*given))
        for at in dense:
            outputs[at] = outputs[at].contiguous()
        return outputs[0] if single else outputs

    return call


def _structure(region: GraphModule, inputs: Sequence[Any]) -> tuple[object, ...]:
    """Return operators, their arguments, and what the inputs are: regions for which it is equal run
    the same code."""
    number = {node: at for at, node in enumerate(region.graph.nodes)}
    described = [
        (
            node.op,
            node.target if node.op == "call_function" else _attribute(region, node),
            repr(torch.fx.node.map_arg(node.args, lambda x: number[x])),
            repr(torch.fx.node.map_arg(node.kwargs, lambda x: number[x])),
        )
        for node in region.graph.nodes
    ]
    return (*described, *map(_description, inputs))


def _attribute(region: GraphModule, node: Node) -> object:
    """Return the identity of a constant."""
    return id(attribute_of(region, node)) if node.op == "get_attr" else None


def _description(value: Any) -> object:
    if not isinstance(value, Tensor):
        return repr(value)
    return (
        tuple(map(str, value.shape)),
        tuple(map(str, value.stride())),
        value.dtype,
        value.device,
        value.requires_grad,
        type(value),
        value.is_leaf,
        _is_aligned(value),
    )


def _is_aligned(value: Tensor) -> bool:
    """Return whether the data starts where vectors can be loaded, which a compiler relies on."""
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.element_size() % _ALIGNMENT == 0
