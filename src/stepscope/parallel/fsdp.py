"""Fully sharded data parallelism: a rank stores its rows of each matrix, gradient and state.

Parameters of two or more dimensions are sharded by rows; the others are replicated and their
gradients averaged. During its forward pass, a module that owns a sharded parameter sees the full
parameter under its name. For the backward pass, autograd saves a reference instead of the full
weight: when it needs the weight, the rows are gathered again. The next weight is prefetched while
one is in use, and gradients are reduced while the backward pass continues.

With `compute_dtype`, matrices are gathered and used in that dtype, together with the biases and
inputs of their modules. A module without a matrix and without submodules (a norm) computes in the
dtype of its parameters and returns the dtype of its input: the weights of a norm are near 1, where
float16 has steps of 0.0005 to 0.001, and rounding them changes every activation. The weights and
gradients that the optimizer sees keep their dtype, and gradients are averaged in it. `reduce_dtype`
selects another one, for example the compute dtype for half the traffic and one more rounding per
rank. Each backward pass adds its average to the gradients, so gradient accumulation needs no extra
call.

Training is equivalent to one process with the same casts on the concatenated batch, up to the order
of additions and, in a low-precision compute dtype, up to one rounding: each rank rounds the
gradient of its part of the batch where one process rounds the gradient of the full batch. A weight
may then round to the other neighbor, and an activation near 0 may change its sign and with it the
gradient of a ReLU. No implementation that splits the batch avoids that.

Persistent buffers (running statistics) are synchronized from rank 0 in every step. `state_dict`
returns sharded parameters as DTensors of the full shape, with the same keys and shapes on every
rank. `load_state_dict` accepts such entries or full tensors.

Parameters may be frozen, unfrozen, added, removed, replaced or converted between steps if all ranks
do the same. The next forward pass detects the change, the ranks agree on it, and new parameters
take their values from rank 0. A replacement must have the full shape. The caller must update the
optimizer.

Every rank must take the same path through the model (`collective_order.py`). If one differs, the
error names the rank and the parameter.

A module must use its weights in its own forward: one that reads the weight of another module (as
torch's MultiheadAttention does with its output projection) is rejected, or raises in the backward
pass. A module whose attribute `needs_full_weights` is a nonempty string is rejected, with the
string as the reason.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.parallel.agreement import Agreement
from stepscope.parallel.broadcast import broadcast, buffers_identity, running_buffers
from stepscope.parallel.clipping import clip
from stepscope.parallel.collective_order import Order, Verb
from stepscope.parallel.collectives import all_reduce
from stepscope.parallel.digests import digests
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.guard import NotCopied, refuse_early_steps, refuse_sparse_gradients
from stepscope.parallel.memory_order import as_real, in_logical_order
from stepscope.parallel.model_layout import require_same_layout
from stepscope.parallel.parameter_watch import ParameterWatch
from stepscope.parallel.peers import connect_peers
from stepscope.parallel.sharded_module import COPY_HINT, Unit
from stepscope.parallel.sharded_parameter import ShardedParameter
from stepscope.torch_tools.gradient_hooks import hook_for_life


class FSDP(NotCopied, nn.Module):
    """Fully sharded wrapper of a module.

        model = FSDP(module, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(inputs)).backward()
        model.finish_gradient_synchronization()
        optimizer.step(); optimizer.zero_grad()

    With `compute_dtype`, matrices are gathered and used in that dtype; norms keep the dtype of
    their parameters. Gradients are averaged in the parameters' dtype, or in `reduce_dtype`.

    Gradients are those of this rank's rows: clip them with `model.clip_grad_norm_(1.0)`. Torch's
    function and its GradScaler only see the gradients of one rank; bfloat16 needs no loss scaling.

    `verify_every=N` compares a digest of the replicated parameters between the ranks before the
    first step and then in every Nth one: ranks that differ in any bit raise within N steps, with
    the step, a rank and the parameters. A row of a sharded parameter exists on one rank only.
    `verify_parameters()` compares them at once.

    A rank that ends, hangs or is cut off by the network makes the others raise `PeerLost`, which
    names the ranks, within the timeout of the process group.
    """

    label = "FSDP"
    instead = COPY_HINT

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        verify_every: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ParallelError("there is no process group", "use World.connected or torchrun")
        _refuse_unsupported(module)
        connect_peers(group)
        require_same_layout(module, group)
        self.module = module
        self.compute_dtype = compute_dtype
        self.reduce_dtype = reduce_dtype
        self.process_group = group
        self._size = dist.get_world_size(group)
        self.order = Order(group)
        dtypes = zlib.crc32(f"{compute_dtype} {reduce_dtype}".encode())
        self._agreement = Agreement(
            group,
            dtypes,
            (),
            "a different compute_dtype or reduce_dtype than rank 0",
            "they must be the same on all ranks",
            self.order,
            verify_every,
        )
        self._dtypes = dtypes
        broadcast(list(module.buffers()), group)
        self.sharded: dict[nn.Parameter, ShardedParameter] = {}
        self._replicated: list[nn.Parameter] = []
        self._hooked: set[int] = set()
        self._units: dict[nn.Module, Unit] = {}
        self._unaveraged = False
        self._last_used: ShardedParameter | None = None
        self._watch = ParameterWatch(self)
        self._arrange(self._watch.named.values())
        refuse_early_steps(self)

    def _arrange(self, new: Iterable[nn.Parameter]) -> None:
        """Take over the parameters of the module; new ones take their values from rank 0."""
        known, self.sharded, self._replicated = self.sharded, {}, []
        values = {id(parameter) for parameter in new}
        for full_name, parameter in self._watch.named.items():
            name = full_name.removeprefix("module.")
            if id(parameter) in values:
                broadcast([parameter.data], self.process_group)
            if parameter in known:
                self.sharded[parameter] = known.pop(parameter)
            elif parameter.dim() >= 2:
                self.sharded[parameter] = ShardedParameter(
                    parameter,
                    name,
                    self.compute_dtype,
                    self.reduce_dtype,
                    self.process_group,
                    self.order,
                )
            else:
                self._replicated.append(parameter)
            self._hook(name, parameter)
        for removed in known.values():
            removed.finish()
        for shard in self.sharded.values():
            shard.before = shard.after = None
        for owner in self.module.modules():
            if owner not in self._units and any(True for _ in owner.parameters(recurse=False)):
                self._units[owner] = Unit(owner, self)
        self._agreement.replan(self._dtypes, [shard.name for shard in self.sharded.values()])
        # After sharding, so that the shapes are those of this rank's rows.
        self._watch = ParameterWatch(self)
        self._hooked &= set(map(id, self._watch.named.values()))

    def _hook(self, name: str, parameter: nn.Parameter) -> None:
        """Register a hook once per parameter, when it first requires a gradient."""
        if not parameter.requires_grad or id(parameter) in self._hooked:
            return
        self._hooked.add(id(parameter))
        if parameter in self.sharded:
            parameter.register_hook(_refuse_gradients_of(name))  # type: ignore[no-untyped-call]
        else:
            self._watch_gradient(parameter)

    @torch.no_grad()
    def _follow_changes(self) -> None:
        """Arrange the parameters again if they changed; collective in that case."""
        if not self._watch.changed():
            return
        _refuse_unsupported(self.module)
        before, now = self._watch, ParameterWatch(self)
        changes = [line.removeprefix("module.") for line in now.changes_since(before)]
        new = now.new_since(before)
        if changes:
            self._require_full_shapes(before, now)
            self._agreement.agree_on(changes)
        self._watch = now
        if changes:
            # Parameters outlive a forward pass in inference mode.
            with torch.inference_mode(False):
                self._arrange(new)

    def _require_full_shapes(self, before: ParameterWatch, now: ParameterWatch) -> None:
        """Raise if a replacement has the shape of one rank's rows, or would be sharded twice."""
        for full_name, parameter in now.named.items():
            name, old = full_name.removeprefix("module."), before.named.get(full_name)
            shard = self.sharded.get(old) if old is not None else None
            if shard is None:
                continue
            expected = shard.local_shape if parameter is old else shard.shape
            if parameter.shape != expected:
                raise ParallelError(
                    f"{name} was given the shape {tuple(parameter.shape)}, but rank"
                    f" {dist.get_rank(self.process_group)} stores {shard.rows} rows of"
                    f" {tuple(shard.shape)}",
                    "replace the parameter with a new one of the full shape, on all ranks",
                )

    @property
    def pending(self) -> bool:
        """True if gradients wait for finish_gradient_synchronization to average them."""
        return self._unaveraged or any(shard.reducing for shard in self.sharded.values())

    @property
    def steps(self) -> int:
        return self._agreement.steps

    @contextmanager
    def observed(self, observer: Callable[[Verb, str, dist.Work | None], None]) -> Iterator[None]:
        """Call `observer` with each gather of a parameter: its work when it is issued, and None
        when the parameter is needed."""
        for shard in self.sharded.values():
            shard.observer = observer
        try:
            yield
        finally:
            for shard in self.sharded.values():
                shard.observer = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        for shard in self.sharded.values():
            # The rows may have changed since the last forward pass.
            shard.forget()
        self._last_used = None
        if not torch.compiler.is_compiling():
            self._follow_changes()
        return self.module(*inputs, **named)

    def used(self, shard: ShardedParameter) -> None:
        """Record the order of this forward pass; prefetch what came next in the last one."""
        if shard.after is not None:
            shard.after.prefetch("gather")
        if self._last_used is not None and self._last_used is not shard:
            self._last_used.after, shard.before = shard, self._last_used
        self._last_used = shard

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over all ranks."""
        used = [shard.reducing for shard in self.sharded.values()]
        if not any(used) and all(p.grad is None for p in self._replicated):
            raise ParallelError(
                "there is no gradient to synchronize",
                "call finish_gradient_synchronization once, after a backward",
            )
        self._agreement.exchange(
            used,
            buffers=buffers_identity(self.module),
            values=self._values() if self._agreement.verifies else None,
        )
        for shard in self.sharded.values():
            shard.finish()
        small = [p for p in self._replicated if p.requires_grad]
        if small and self._size > 1:
            _average(small, self.process_group, self._size)
        self._unaveraged = False
        broadcast(list(running_buffers(self.module)), self.process_group)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Like torch.nn.utils.clip_grad_norm_ on the full model; collective."""
        if self.pending:
            raise ParallelError(
                "gradients cannot be clipped before they are averaged",
                "call finish_gradient_synchronization first",
            )
        return clip(self.sharded, self._replicated, max_norm, norm_type, self.process_group)

    def verify_parameters(self) -> None:
        """Raise on every rank, naming a rank and its parameters, unless the replicated parameters
        of all ranks are equal bit by bit; collective."""
        self._agreement.verify(self._values())

    def _values(self) -> dict[str, int]:
        """Digests of the parameters that every rank stores."""
        named = {n: p for n, p in self.module.named_parameters() if p not in self.sharded}
        return dict(zip(named, digests(named.values()), strict=True))

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return every parameter in full, in the dtype in which it is stored; collective."""
        return {
            name: self.sharded[p].gather_master() if p in self.sharded else p.detach().clone()
            for name, p in self.module.named_parameters()
        }

    def _watch_gradient(self, parameter: nn.Parameter) -> None:
        """Mark the gradients as pending when the backward pass produces this one, which is averaged
        later."""

        def produced(root: FSDP, _: Tensor) -> None:
            root._unaveraged = True

        hook_for_life(self, parameter, produced)


def _refuse_unsupported(module: nn.Module) -> None:
    refuse_sparse_gradients(module)
    for name, inner in module.named_modules():
        if reason := getattr(inner, "needs_full_weights", ""):
            raise ParallelError(
                f"the weights of {name or 'the module'} cannot be sharded: {reason}",
                "use DDP, or ShardedOptimizer to shard the optimizer state",
            )
        if isinstance(inner, nn.MultiheadAttention | nn.RNNBase):
            raise ParallelError(
                f"{name or 'the module'} is a {type(inner).__name__}, which does not read its"
                " weights by their names",
                "implement it with Linear layers",
            )
        if isinstance(inner, nn.ParameterList | nn.ParameterDict) and any(
            parameter.dim() >= 2 for parameter in inner.parameters(recurse=False)
        ):
            raise ParallelError(
                f"{name or 'the module'} is a {type(inner).__name__}, whose weights are read by"
                " other modules",
                "register each weight on the module that uses it in its forward",
            )


def _refuse_gradients_of(name: str) -> Callable[[Tensor | None], None]:
    """Return a hook that raises: rows read through `Gather` never receive a gradient directly."""

    def refuse(gradient: Tensor | None) -> None:
        if gradient is not None:
            raise ParallelError(
                f"{name} was read outside the forward of its own module, where it only contains"
                " this rank's rows",
                "use a weight in the forward of the module that owns it; tie weights by assigning"
                " one parameter to both modules",
            )

    return refuse


@torch.no_grad()
def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, size: int) -> None:
    """Average the gradients of small parameters in one message. Each has a flag for whether
    any rank has a gradient."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad / size for p in parameters]
    parts = [as_real(in_logical_order(part)) for part in parts]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], device=parts[0].device)
    flat = torch.cat([flags, *(part.reshape(-1) for part in parts)])
    all_reduce(flat, group)
    used = flat[: len(parts)].tolist()
    offset = len(parts)
    for parameter, part, count in zip(parameters, parts, used, strict=True):
        if count:
            # With the strides of the parameter, as autograd makes a gradient.
            parameter.grad = torch.empty_like(parameter)
            as_real(parameter.grad).copy_(flat[offset : offset + part.numel()].view(part.shape))
        offset += part.numel()
