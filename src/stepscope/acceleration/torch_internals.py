"""The names of torch that are not public and that the graph backend needs: one file to look at for
a new version of torch. Tested with 2.11 and 2.13."""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Thread
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_map

Compiled = Callable[..., Any]
_PACKAGE = __name__.partition(".")[0]
GRAD_MODE = torch._C._set_grad_enabled
ENTERS_AUTOCAST = autocast_mode._enter_autocast
EXITS_AUTOCAST = autocast_mode._exit_autocast
_DATA: Any = getattr(torch._C._autograd, "_get_data_attr", None)


def fake_mode() -> Any:
    """Return the mode of the fake tensors that a backend compiles with."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    return mode


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def mode_of(values: Sequence[Any]) -> Any:
    """Return the mode of the first fake tensor among these."""
    return next(x for x in values if isinstance(x, FakeTensor)).fake_mode


def fake_inputs(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return fake tensors for a graph's placeholders, with `requires_grad` and symbolic sizes;
    numbers as Dynamo has them."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [
        node.meta.get("example_value", given)
        for node, given in zip(placeholders, inputs, strict=True)
    ]
    with fake_mode():
        return [_same_layout(x) if isinstance(x, Tensor) else x for x in values]


def _same_layout(x: Tensor) -> Tensor:
    """Return a tensor of the current mode with that layout. Dynamo's graph has one mode, and its
    backends another."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    made.requires_grad_(x.requires_grad)
    _with_number_of(x, made)
    return made


def _with_number_of(x: Any, made: Any) -> None:
    """Let `item()` of a fake tensor return the number of another one: a float of the program that
    Dynamo passes in a tensor, since it may change between calls."""
    if (number := number_in(x)) is not None:
        made.item_memo = number


def number_in(x: Any) -> torch.SymFloat | None:
    """Return the number that `item()` of a fake tensor gives, if the program passes one so."""
    number = getattr(x, "item_memo", None)
    return number if isinstance(number, torch.SymFloat) else None


def without_numbers(
    compile_region: Callable[..., Compiled], inputs: Sequence[Any]
) -> Callable[..., Compiled]:
    """Let a compiler compile graphs that read no numbers from these inputs. AOTAutograd would take
    them for constants, and Dynamo would trace again."""
    names = {str(x.node.expr) for x in map(number_in, inputs) if x is not None}

    def run(module: GraphModule, given: Sequence[Any]) -> Compiled:
        new = {name for name in names if not TensorifyState.should_specialize(name)}
        TensorifyState.force_specializations |= new
        try:
            return compile_region(module, given)
        finally:
            TensorifyState.force_specializations -= new

    return run


def trace_with(interpreter: Callable[[], Interpreter], inputs: Sequence[Any]) -> GraphModule:
    """Trace what an interpreter runs, as operators before autograd and autocast with the `meta` of
    the nodes that it runs."""

    def run(*args: Any) -> Any:
        for x, traced in zip(inputs, args, strict=True):
            _with_number_of(x, traced)
        return interpreter().run(*args)

    with fx_traceback.preserve_node_meta():
        return _traced(run, inputs)


def _traced(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
    trace = make_fx(function, pre_dispatch=True, tracing_mode="fake", _allow_non_fake_inputs=True)
    traced: GraphModule = trace(*inputs)
    return traced


def traced_apart(
    function: Callable[..., Any], inputs: Sequence[Any], rewrite: Callable[[GraphModule], object]
) -> GraphModule:
    """Return the graph of a function of tensors, as a retrace does, after a pass: for a call with
    these inputs, or such as these."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, list(inputs))
    with tracing(TracingContext(mode)):
        # A bound method would have one argument more than the trace has inputs.
        traced = _traced(lambda *given: function(*given), fakes)
        rewrite(traced)
    return traced


class Traceable(Interpreter):
    """Runs Dynamo's graph with operators only: `x.data` is none, but the same as `x.detach()`."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _DATA:
            return args[0].detach()
        return super().call_function(target, args, kwargs)


def _tracer() -> Any:
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    return mode.tracer


def last_traced_node() -> Node:
    """Return the latest node of the trace that runs."""
    latest: Node = next(iter(reversed(_tracer().graph.nodes)))
    return latest


def traced_node(x: Tensor) -> Node | None:
    """Return what a tensor is in the trace that runs."""
    found = proxy_tensor.get_proxy_slot(x, _tracer(), None)
    return None if found is None else found.proxy.node


def traced_constant(x: Tensor) -> Tensor | None:
    """Return the value of a tensor, if the trace that runs knows it and may compute with it."""
    found = proxy_tensor.get_proxy_slot(x, _tracer(), None)
    known = None if found is None else found.constant
    return getattr(x, "constant", None) if known is None else known


def meta_of_trace(node: Node) -> dict[str, Any]:
    """Return what the operators that a node becomes in a trace know about it."""
    with fx_traceback.preserve_node_meta(), fx_traceback.set_current_meta(node):
        return dict(fx_traceback.get_current_meta())


def add_like_traced(graph: Graph, node: Node, args: Any, kwargs: Any) -> Node:
    """Add a copy of a traced node, by the name that a trace would give it in this graph."""
    name = node.name if node.op == "placeholder" else None
    if isinstance(node.target, OpOverload):
        name = graph._target_to_str(node.target.overloadpacket.__name__)
    return graph.create_node(node.op, node.target, args, kwargs, name, node.type)


def ambient_state(values: Sequence[Any]) -> tuple[object, ...]:
    """Return the state besides its inputs that a trace depends on."""
    kinds = sorted({"cpu", *(x.device.type for x in values if isinstance(x, Tensor))})
    autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                 for kind in kinds]  # fmt: skip
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), *autocasts,
    )  # fmt: skip


def is_plain_fake(value: Any) -> bool:
    return type(value) is FakeTensor and value.layout is torch.strided


def storage_of(x: Tensor) -> int:
    """Return the identity of the memory of a tensor."""
    return int(x.untyped_storage()._cdata)


def attribute_of(module: GraphModule, node: Node) -> Any:
    """Return the constant that a `get_attr` node reads."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def why_not_retraced(module: GraphModule) -> str | None:
    """Return why a graph cannot be traced again, if so.

    Operators whose arguments are graphs (custom autograd functions, checkpointed segments, control
    flow) would run, and lose what they do to gradients. What a transform of torch.func computes
    becomes constants.
    """
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    if operators := sorted({str(one) for one in called if isinstance(one, HigherOrderOperator)}):
        return f"it calls {', '.join(operators)}"
    if any("_functorch" in (getattr(one, "__module__", None) or "") for one in called):
        return "operators within a transform (torch.func) cannot be traced again"
    return None


class Break(NamedTuple):
    """What Dynamo could not trace: a graph ends there, or there is none."""

    line: str
    reason: str


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def graph_breaks() -> list[Break]:
    """Return what Dynamo could not trace so far, in this process."""
    return [_break(one) for one in dynamo_utils.graph_break_reasons]


def _break(why: Any) -> Break:
    user = [frame for frame in why.user_stack if "/torch/" not in frame.filename]
    line = f"{user[-1].filename}:{user[-1].lineno}" if user else ""
    lines = [x.strip() for x in str(why.reason).splitlines() if x.strip()]
    explained = next((x for x in lines if x.startswith("Explanation:")), lines[0] if lines else "")
    return Break(line, explained.removeprefix("Explanation:").strip())


_numbers = itertools.count()


def compiled_apart(
    function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool = False
) -> Callable[..., Any]:
    """Compile a function apart from every other compilation of it: Dynamo's cache, its guards and
    the limit of its recompilations belong to a code object. Call it within `tracing_settings`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert isinstance(run, FunctionType)
    run.__code__ = run.__code__.replace(co_name=f"run_{next(_numbers)}")
    compiled: Callable[..., Any] = torch.compile(run, backend=backend, fullgraph=fullgraph)
    return compiled


@contextmanager
def tracing_settings(**settings: Any) -> Iterator[None]:
    """Trace as passes need it: warnings that are given once have been, when the model ran as it is
    (they end a graph), and regions leave gradients in the order that DDP reduces them."""
    settings["optimize_ddp"] = False
    if once := {x for name, x in vars(logging.Logger).items() if name.endswith("_once")}:
        settings["ignore_logger_methods"] = once
    with torch._dynamo.config.patch(settings), _without_metrics_errors():
        yield


@contextmanager
def _without_metrics_errors() -> Iterator[None]:
    """torch 2.11 sorts the functions to ignore, to log them among its metrics, and reports that it
    cannot."""
    log = logging.getLogger("torch._dynamo.metrics_context")
    log.addFilter(_is_about_the_program)
    try:
        yield
    finally:
        log.removeFilter(_is_about_the_program)


def _is_about_the_program(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Unexpected exception logging")


def module_path(node: Node) -> list[tuple[str, Any]]:
    """Return the modules that called an operator, from the outermost: path and class."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(str(path), kind) for path, kind in stack.values()]


_NAME = "name_before_split"


def note_names(module: GraphModule) -> None:
    """Let the nodes that replace others, and so have their `meta`, know what they replace."""
    for node in module.graph.nodes:
        node.meta[_NAME] = node.name


def forget_name(meta: dict[str, Any]) -> None:
    """Let nodes with this `meta` of another one not get its name."""
    meta.pop(_NAME, None)


def rename_replacements(module: GraphModule) -> None:
    """Give nodes that replaced another one its name."""
    present = {node.name for node in module.graph.nodes}
    for node in reversed(module.graph.nodes):
        replaced = node.meta.get(_NAME)
        if replaced is not None and replaced not in present:
            node.name = replaced
            present.add(replaced)


def split(module: GraphModule, region_of: dict[Node, int]) -> GraphModule:
    """Return a graph that calls one submodule per region."""
    note_names(module)
    return split_module(module, module, lambda node: region_of[node], keep_original_order=True)


def symbols_of(value: Any) -> set[Any]:
    """Return the symbols in the sizes and strides of a tensor, or in a number."""
    if isinstance(value, Tensor):
        return set().union(*(symbols_of(n) for n in (*value.shape, *value.stride())))
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def known_symbols(value: Any) -> set[Any]:
    """Return the symbols whose value a compiled graph reads from this input: those that are a size
    or a number by themselves."""
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return {n.node.expr for n in sizes if isinstance(n, torch.SymInt) and n.node.expr.is_symbol}


@contextmanager
def own_tracing_context() -> Iterator[None]:
    """Compile one of several graphs of a trace. The backward pass is compiled in its first call,
    in the context of the forward: in a shared one, it would find which buffers may be overwritten
    in the graph that was compiled last."""
    with tracing(copy.copy(TracingContext.get())):
        yield


def name_before_split(node: Node) -> str:
    """Return the name of a node, as the inputs of other regions have it."""
    return str(node.meta.get(_NAME, node.name))


def prepare_compiler(device: torch.device) -> None:
    """Begin what the first compilation waits for, while the model is traced: the hash of Triton, by
    which caches are found, and the processes that compile kernels for a GPU. They take seconds to
    start, and until they run Inductor compiles one kernel after the other in this process; torch
    starts them for its own backend only."""
    if device.type != "cuda":
        return
    _hash_triton()
    _start_compile_workers()


@cache
def _hash_triton() -> None:
    from torch._inductor.runtime import triton_compat

    if triton_compat.HAS_TRITON:
        # Reading and hashing half a gigabyte leaves the interpreter to other threads.
        Thread(target=triton_compat.triton_key, daemon=True).start()


def _start_compile_workers() -> None:
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def compile_with_inductor(
    module: GraphModule, inputs: Sequence[Any], *, cudagraphs: bool = False
) -> Compiled:
    """Compile forward and backward, with Inductor's CUDA graphs if wanted. Values that the backward
    pass needs in memory are computed again there if that is cheap, such as the outputs of norms and
    the products of gated MLPs; torch would save them."""
    from torch._inductor.compile_fx import compile_fx

    if any(x.is_cuda for x in inputs if isinstance(x, Tensor)):
        # They end when nothing is compiled for a while.
        _start_compile_workers()
    with functorch_config.patch(ban_recompute_materialized_backward=False):
        patches: dict[str, Any] = {"triton.cudagraphs": True} if cudagraphs else {}
        patches |= _cacheable(module)
        compiled: Any = compile_fx(module, list(inputs), config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def _cacheable(module: GraphModule) -> dict[str, Any]:
    """Return the setting by which caches take graphs that call functions of this package: they are
    found again as long as the files of the package are the same."""
    from torch._inductor import config

    names = {f"{x.__module__}.{x.__name__}" for x in _functions(module)}
    marked = {name: _version_of_package() for name in names if name.startswith(f"{_PACKAGE}.")}
    return {"unsafe_marked_cacheable_functions": config.unsafe_marked_cacheable_functions | marked}


def _functions(module: GraphModule) -> Iterator[FunctionType]:
    for node in module.graph.nodes:
        if isinstance(node.target, FunctionType):
            yield node.target


@cache
def _version_of_package() -> str:
    root = Path(__file__).parents[1]
    files = sorted((str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in root.rglob("*.py"))
    return sha256(repr(files).encode()).hexdigest()


def add_decompositions(formulas: Mapping[Any, Callable[..., Any]]) -> None:
    """Let Inductor replace operators by what these functions compute."""
    from torch._inductor import decomposition

    if not formulas.keys() <= decomposition.decompositions.keys():
        decomposition.decompositions.update(formulas)
        # A copy of the table may have been made.
        decomposition.fast_random_decomps.cache_clear()


def compile_with_aot_eager(module: GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Trace forward and backward as Inductor does, and run them without compilation."""
    from torch._dynamo.backends.debugging import aot_eager

    compiled: Compiled = aot_eager(module, list(inputs))
    return compiled


def as_region_input(value: Any) -> Any:
    """Return a fake tensor as a leaf with the same `requires_grad`."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def is_dense(x: Tensor) -> bool:
    """Return whether a fake tensor is contiguous whatever its symbolic sizes are."""
    return bool(is_contiguous_or_false(x))


def written_arguments(node: Node) -> list[Node]:
    """Return the inputs that an operator writes to."""
    return _aliased(node, writes=True)


def shared_arguments(node: Node) -> list[Node]:
    """Return the inputs whose memory the output of an operator may share."""
    if node.target is operator.getitem:  # Such as a part of `chunk`.
        return node.all_input_nodes[:1]
    return _aliased(node, writes=False) or _aliased(node, writes=True)


def _aliased(node: Node, *, writes: bool) -> list[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or argument.alias_info.is_write is not writes:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [x for x in (given if isinstance(given, list | tuple) else [given])
                  if isinstance(x, Node)]  # fmt: skip
    return found


def group_store() -> tuple[Any, int]:
    """Return the store of the process group (None: there is none), and the rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None, 0
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store(), torch.distributed.get_rank()
