"""A step that `accelerate(compile=True)` and `TrainStep` run as a CUDA graph, on fake tensors.

The loss is traced with its model, and goes through the passes and the regions of the graph backend.
Torch's partitioner decides what each region saves; a stand-in allocates it. The update of Adam and
AdamW is one kernel, which also writes the weights in the matmul dtype or in FP8, and runs in the
backward pass unless gradients are clipped or added up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.acceleration.accelerate import use_fp8
from stepscope.acceleration.backend import run_passes
from stepscope.acceleration.copied import Copied
from stepscope.acceleration.losses import loss_of, without_cache
from stepscope.acceleration.optimizer import why_not_on_a_gpu
from stepscope.acceleration.passes.linears import Weights, copied_inputs
from stepscope.acceleration.regions import compile_regions, hoist_views
from stepscope.acceleration.report import Report
from stepscope.acceleration.torch_internals import module_path
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.planning.block_costs import BlockCost
from stepscope.planning.compiled_graphs import CompiledGraph, traced_joint
from stepscope.planning.cuda_operators import CudaDtypes, CudaOperators, attention, dropout
from stepscope.planning.fake_run import FakeStep, LossFunction
from stepscope.planning.operators import Rates
from stepscope.planning.stand_in import allocate, stand_in
from stepscope.torch_tools.side_stream import MAX_PENDING_BYTES

aten = torch.ops.aten
_AS_ON_CUDA = {
    aten.scaled_dot_product_attention.default: attention,
    aten.dropout.default: dropout,
}


class AcceleratedStep:
    """A step of fake tensors whose loss is `loss_fn`, to be called with its model and batch."""

    def __init__(self, step: FakeStep, rates: Rates, *, fp8: bool) -> None:
        options = step.options
        self._step, self._rates = step, rates
        self._state = [*step.model.parameters(), *step.model.buffers()]
        self.copies: list[Tensor] = []
        """Weights in the matmul dtype or in FP8."""
        self.is_fused = why_not_on_a_gpu(step.optimizer) is None
        self.updates_in_backward = self.is_fused and options.max_grad_norm is None
        self._update = _Update()
        for group in step.optimizer.param_groups if self.is_fused else ():
            # As the fused kernel, torch's needs no memory besides the state.
            group.update(fused=True, foreach=False)
        layers = Fp8Layers(is_assumed=True) if fp8 else None
        if layers is not None:
            use_fp8(step.model, WeightCopies(keep=False), layers, Report(""))
        with tracing(TracingContext(_mode_of(self._state))), self._autocast():
            self._run = self._compiled(layers)

    @property
    def loss_fn(self) -> LossFunction:
        def loss(_: nn.Module, batch: Any) -> Tensor:
            found: Tensor = self._run(*self._state, *_tensors(batch))
            return found

        return loss

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Update in the backward pass, if the step does: gradients are freed one by one. The state
        of the optimizer exists already."""
        with ExitStack() as stack:
            for parameter in self._state if self.updates_in_backward else ():
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                    hook = self._updated
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            self._update.in_backward = self.updates_in_backward
            yield
            self._update.in_backward = False

    def begin(self, phase: str) -> None:
        """Begin a phase of the step."""
        if phase == "optimizer":
            self._update.join()

    def _updated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._update.read(parameter.grad)
            parameter.grad = None

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._step.options.dtype
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    def _compiled(self, fp8: Fp8Layers | None) -> Any:
        inputs = [*self._state, *_tensors(self._step.batch)]
        traced = self._traced(inputs)
        hoist_views(traced)
        original = GraphModule(traced, traced.graph)
        placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
        tensors = dict(zip(placeholders, inputs, strict=True))
        # Without an update that writes them, weights are cast in the graph.
        copies = WeightCopies(keep=False) if self.is_fused or fp8 is not None else None
        run_passes(traced, weights=Weights(tensors, copies, fp8))
        run, _, _ = compile_regions(
            traced, original, inputs, self._region, copied=self._copied(copied_inputs(traced.graph))
        )
        return run

    def _copied(self, found: dict[str, Copied]) -> dict[str, Copied]:
        """Return what makes the copies, of which each is made once."""
        distinct = {id(one): self._made(one) for one in found.values()}
        self.copies = [tensor for one in distinct.values() for tensor in one.made]
        return {name: distinct[id(one)] for name, one in found.items()}

    def _made(self, one: Copied) -> _MadeOnce:
        weights = [self._named[name] for name in one.weights]
        weight = weights[0]
        rows = sum(x.shape[0] for x in weights)
        made = [torch.empty((rows, *weight.shape[1:]), dtype=one.dtype)]
        if one.fp8 is not None:
            shape = weight.shape[::-1] if one.transposed else weight.shape
            slot = torch.empty_strided(weight.shape, (0, 0), dtype=one.dtype)
            made = [torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(()), slot]
        return _MadeOnce(
            one.weights, one.names, one.copies, one.dtype, one.fp8, one.transposed,
            tuple(made), self._update,
        )  # fmt: skip

    def _traced(self, inputs: Sequence[Tensor]) -> GraphModule:
        """Return the loss as operators before autograd, with the modules that called them."""
        step, options = self._step, self._step.options
        leaves, tree = tree_flatten(step.batch)
        where = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        names = [name for name, _ in (*step.model.named_parameters(), *step.model.named_buffers())]

        def run(*given: Tensor) -> Tensor:
            state = dict(zip(names, given, strict=False))
            filled = list(leaves)
            for at, tensor in zip(where, given[len(names) :], strict=True):
                filled[at] = tensor
            batch = tree_unflatten(filled, tree)
            loss = _Loss(step.model, options.loss_fn or loss_of)
            found: Tensor = torch.func.functional_call(loss, _prefixed(state), (batch,))
            return found

        # Programs read no values where they see that they are compiled.
        compiling = patch.object(torch.compiler, "_is_compiling_flag", True)
        with (
            fx_traceback.preserve_node_meta(), _Paths(step.model).noted(),
            without_cache(step.model), compiling, _Dtypes(),
        ):  # fmt: skip
            traced: GraphModule = make_fx(run, pre_dispatch=True, _allow_non_fake_inputs=True)(
                *inputs
            )
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        for node, given in zip(placeholders, inputs, strict=True):
            node.meta["requires_grad"] = given.requires_grad
        self._named = {node.name: x for node, x in zip(placeholders, inputs, strict=True)}
        return traced

    def _region(self, region: GraphModule, given: Sequence[Any]) -> Any:
        """Return a stand-in for a region of the graph."""
        for node in region.graph.nodes:
            node.target = _AS_ON_CUDA.get(node.target, node.target)
        region.recompile()

        def run(given: list[Tensor]) -> list[Tensor]:
            with self._autocast(), CudaOperators():
                return [*region(*given)]

        like, joint = run([*given]), traced_joint(run, ([*given],), 0)
        if joint is None:
            return region.forward
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            cost, retained = CompiledGraph(joint, range(len(given)), self._rates).measured()
        cost = cost._replace(saved=cost.saved - sum(retained))
        return _Region(like, cost, retained, _name_of(region))


class _Loss(nn.Module):
    """The loss as a module, so that tensors of the model can be replaced."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self._loss_fn(self.model, batch)


def _prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in state.items()}


@dataclass
class _Region:
    """A region of the graph: what it allocates."""

    outputs: Sequence[Tensor]
    cost: BlockCost
    sizes: Sequence[int]
    """Bytes of each input, then output, that it saves as it is; 0 of others."""
    name: str
    is_compiled = True

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        return stand_in(self, given)

    def allocated(self, what: str) -> Tensor:
        return allocate(getattr(self.cost, what), what, self.name)

    def retained(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        both = zip((*inputs, *outputs), self.sizes, strict=True)
        return [one for one, size in both if size]

    def keep_in_forward(self, copies: Tensor) -> None:
        """A region has no such copies."""


def _name_of(region: GraphModule) -> str:
    """Return the name of the module that has most of a region's operators, without numbers."""
    paths = Counter(path[0][0] for node in region.graph.nodes if (path := module_path(node)))
    most = max(paths, key=paths.__getitem__, default="loss")
    # A ledger takes what follows the last dot.
    return "/".join(word for word in most.split(".") if not word.isdigit())


class _Update:
    """An update on a side stream, which reads gradients while the backward pass continues."""

    def __init__(self) -> None:
        self.in_backward = False
        self._pending: deque[Tensor] = deque()

    def read(self, gradient: Tensor) -> None:
        """Keep a gradient until too many wait."""
        self._pending.append(gradient)
        while len(self._pending) > 1 and _bytes(self._pending) > MAX_PENDING_BYTES:
            self._pending.popleft()

    def join(self) -> None:
        self._pending.clear()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(one.nbytes for one in tensors)


@dataclass(frozen=True)
class _MadeOnce(Copied):
    """Copies that the update of the optimizer writes."""

    made: tuple[Tensor, ...] = ()
    update: _Update = field(default_factory=_Update)

    def __call__(self, *weights: Tensor) -> tuple[Tensor, ...]:
        made: Any = _Read.apply(self, *weights)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copied: _MadeOnce, *weights: Tensor) -> Any:
        ctx.copied, ctx.dtype = copied, weights[0].dtype
        ctx.rows = [weight.shape[0] for weight in weights]
        ctx.set_materialize_grads(False)
        made = [one.detach() for one in copied.made]
        ctx.mark_non_differentiable(*made[:-1])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        gradient, update = gradients[-1], ctx.copied.update
        if gradient is not None and update.in_backward:
            # The update reads it in its own dtype.
            update.read(gradient)
            gradient = None
        if gradient is None:
            return None, *[None] * len(ctx.rows)
        return None, *torch.split(gradient.to(ctx.dtype), ctx.rows)


class _Dtypes(CudaDtypes):
    """The dtypes of CUDA's autocast, with the operators of the program, which passes know."""

    replaces = False


class _Paths:
    """The modules that run, as the graph backend reads them of a trace."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def noted(self) -> Iterator[None]:
        before: list[Any] = []
        meta = fx_traceback.current_meta

        def enter(name: str, module: nn.Module) -> None:
            stack = meta.get("nn_module_stack", {})
            before.append(stack)
            meta["nn_module_stack"] = {**stack, name: (name, type(module))}

        def leave() -> None:
            meta["nn_module_stack"] = before.pop()

        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name:
                    first = module.register_forward_pre_hook(
                        lambda module, _, name=name: enter(name, module)
                    )
                    hooks.callback(first.remove)
                    last = module.register_forward_hook(lambda *_: leave(), always_call=True)
                    hooks.callback(last.remove)
            yield


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]


def _mode_of(tensors: Sequence[Any]) -> Any:
    return tensors[0].fake_mode
