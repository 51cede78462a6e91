"""Fully sharded data parallelism: a rank keeps its rows of each matrix, gradient and state.

    model = FSDP(module, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step(); optimizer.zero_grad()

Parameters of two or more dimensions are cut by rows; the others are replicated and their gradients
averaged. A module that owns a cut parameter finds it whole under its name during its forward. What
the forward leaves for the backward is not the whole weight but a note of it: when autograd asks,
the rows are gathered again. The next one needed is fetched while one is in use, and gradients are
reduced while the backward goes on.

With `compute_dtype`, weights travel and compute in that format (and inputs of the modules follow);
what the optimizer sees, weights and gradients, keeps its own. Each backward adds its average to the
gradients, so accumulating needs nothing special.

Every rank must take the same way through the model (`order.py`): one that strays is an error with
its number and the parameter.

A module must use its weights in its own forward: one that reads the weight of another module (as
torch's MultiheadAttention does with its output projection) is refused, or raises in the backward.

Gradients are of this rank's rows: clip them with `model.clip_grad_norm_(1.0)`. Torch's function and
its GradScaler look at one rank's alone; bfloat16 needs no scaling.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from stepscope.gradient_hooks import hook_for_life
from stepscope.parallel.agreement import Agreement
from stepscope.parallel.broadcast import broadcast
from stepscope.parallel.clipping import clip
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.guard import refuse_early_steps
from stepscope.parallel.layout import require_same_layout
from stepscope.parallel.order import Order
from stepscope.parallel.sharded_parameter import Gather, ShardedParameter


class FSDP(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise ParallelError("there is no process group", "use World.connected or torchrun")
        _refuse_hidden_uses(module)
        require_same_layout(module, group)
        self.module = module
        self.compute_dtype = compute_dtype
        self.process_group = group
        self._size = dist.get_world_size(group)
        self.order = Order(group)
        self._agreement = Agreement(
            group,
            zlib.crc32(str(compute_dtype).encode()),
            [name for name, p in module.named_parameters() if p.dim() >= 2],
            "another compute_dtype than rank 0",
            "it must be the same on all ranks",
            self.order,
        )
        broadcast(list(module.buffers()), group)
        self.sharded: dict[nn.Parameter, ShardedParameter] = {}
        self._replicated: list[nn.Parameter] = []
        self._unaveraged = False
        for name, parameter in module.named_parameters():
            broadcast([parameter.data], group)
            if parameter.dim() >= 2:
                self.sharded[parameter] = ShardedParameter(
                    parameter, name, compute_dtype, group, self.order
                )
                if parameter.requires_grad:
                    parameter.register_hook(_refuse_gradients_of(name))  # type: ignore[no-untyped-call]
            else:
                self._replicated.append(parameter)
                self._watch(parameter)
        self._last_used: ShardedParameter | None = None
        for owner in module.modules():
            if any(True for _ in owner.parameters(recurse=False)):
                Unit(owner, self)
        refuse_early_steps(self, module.parameters())

    @property
    def pending(self) -> bool:
        """Whether there are gradients that finish_gradient_synchronization has to average."""
        return self._unaveraged or any(held.reducing for held in self.sharded.values())

    @property
    def steps(self) -> int:
        return self._agreement.steps

    def forward(self, *inputs: Any, **named: Any) -> Any:
        for held in self.sharded.values():
            # The rows may have changed since.
            held.forget()
        self._last_used = None
        return self.module(*inputs, **named)

    def used(self, held: ShardedParameter) -> None:
        """Remember the order of this forward; fetch what came next in the last one."""
        if held.after is not None:
            held.after.prefetch("gather")
        if self._last_used is not None and self._last_used is not held:
            self._last_used.after, held.before = held, self._last_used
        self._last_used = held

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the average over all ranks."""
        used = [held.reducing for held in self.sharded.values()]
        if not any(used) and all(p.grad is None for p in self._replicated):
            raise ParallelError(
                "there is no gradient to synchronize",
                "finish_gradient_synchronization follows a backward, once",
            )
        self._agreement.exchange(used)
        for held in self.sharded.values():
            held.finish()
        small = [p for p in self._replicated if p.requires_grad]
        if small and self._size > 1:
            _average(small, self.process_group, self._size)
        self._unaveraged = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ of the whole model; collective."""
        if self.pending:
            raise ParallelError(
                "gradients are clipped before they are averaged",
                "call finish_gradient_synchronization first",
            )
        return clip(self.sharded, self._replicated, max_norm, norm_type, self.process_group)

    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter whole, in the format in which it is kept; collective."""
        return {
            name: self.sharded[p].gather_master() if p in self.sharded else p.detach().clone()
            for name, p in self.module.named_parameters()
        }

    def _watch(self, parameter: nn.Parameter) -> None:
        """Its gradient is not averaged as it is made: an optimizer has to wait for that."""

        def made(root: FSDP, _: Tensor) -> None:
            root._unaveraged = True

        if parameter.requires_grad:
            hook_for_life(self, parameter, made)


class Unit:
    """A module that owns parameters: they are whole, in the compute format, while it runs."""

    def __init__(self, owner: nn.Module, root: FSDP) -> None:
        self._root = root
        # By all its names: one parameter may have two.
        self._names = [name for name, held in owner._parameters.items() if held is not None]
        self._runs: list[Run] = []
        owner.register_forward_pre_hook(self._before, with_kwargs=True)
        owner.register_forward_hook(self._after, always_call=True)

    def _before(self, owner: nn.Module, inputs: Any, named: Any) -> tuple[Any, Any]:
        # In its place even if a gather fails: `_after` is called then, too.
        run = Run({name: owner.__dict__.get(name) for name in self._names})
        self._runs.append(run)
        wholes: dict[int, ShardedParameter] = {}
        dtype = self._root.compute_dtype
        for name in self._names:
            parameter = owner._parameters[name]
            assert parameter is not None
            held = self._root.sharded.get(parameter)
            if held is not None:
                shown = Gather.apply(parameter, held)  # type: ignore[no-untyped-call]
                wholes[shown.untyped_storage().data_ptr()] = held
                self._root.used(held)
            else:
                shown = (
                    parameter.to(dtype) if dtype and parameter.is_floating_point() else parameter
                )
            # An attribute of the instance is found before a registered parameter.
            owner.__dict__[name] = shown
        notes = saved_tensors_hooks(Notes(wholes), _from_note)
        notes.__enter__()
        run.notes = notes
        if dtype is None:
            return inputs, named
        return tree_map(lambda t: _cast(t, dtype), (inputs, named))  # type: ignore[no-any-return]

    def _after(self, owner: nn.Module, *_: Any) -> None:
        run = self._runs.pop()
        run.notes.__exit__(None, None, None)
        for name, shown in run.around.items():
            if shown is None:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = shown
            parameter = owner._parameters[name]
            if parameter in self._root.sharded:
                self._root.sharded[parameter].release()


@dataclass
class Run:
    """A module within its forward."""

    around: dict[str, Any]
    """What it shows by its names to a run around this one."""
    notes: AbstractContextManager[Any] = field(default_factory=nullcontext)


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Handed(NamedTuple):
    """What is kept by whoever was asked before, such as a checkpointed stretch, which drops it."""

    bring: Callable[[Any], Tensor]
    kept: Any


def _hooks_around() -> Hooks | None:
    """Torch asks the innermost alone, so that one has to ask the others."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


class Notes:
    """What autograd keeps: for a whole weight, who can bring it again and how it was seen."""

    def __init__(self, wholes: dict[int, ShardedParameter]) -> None:
        self._wholes = wholes
        self.around = _hooks_around()
        """Where others look who want to know in what this runs."""

    def __call__(self, tensor: Tensor) -> Any:
        held = self._wholes.get(tensor.untyped_storage().data_ptr())
        if held is not None:
            return held, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor if self.around is None else Handed(self.around[1], self.around[0](tensor))


def _from_note(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if isinstance(kept, Handed):
        return kept.bring(kept.kept)
    held, shape, stride, offset = kept
    whole: Tensor = held.whole("regather")
    if held.before is not None:
        held.before.prefetch("regather")
    if not held.parameter.requires_grad:
        # No gradient will come that says when it is done with.
        held.release()
    return whole.as_strided(shape, stride, offset)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _refuse_hidden_uses(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, nn.MultiheadAttention | nn.RNNBase):
            raise ParallelError(
                f"{name or 'the module'} is a {type(inner).__name__}, which reads weights"
                " other than by their names",
                "write it with Linear layers",
            )
        if isinstance(inner, nn.ParameterList | nn.ParameterDict) and any(
            held.dim() >= 2 for held in inner.parameters(recurse=False)
        ):
            raise ParallelError(
                f"{name or 'the module'} is a {type(inner).__name__}, whose weights others read",
                "give each weight to the module that uses it in its forward",
            )


def _refuse_gradients_of(name: str) -> Callable[[Tensor | None], None]:
    """What goes through `Gather` gives its rows no gradient: they were read without it."""

    def refuse(gradient: Tensor | None) -> None:
        if gradient is not None:
            raise ParallelError(
                f"{name} was read outside of the forward of its own module, where it is only this"
                " rank's rows",
                "use a weight in the forward of the module that has it; tie weights by giving one"
                " parameter to both modules",
            )

    return refuse


@torch.no_grad()
def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, size: int) -> None:
    """Gradients of small parameters in one message, with a flag each: does any rank have one?"""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad / size for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], device=parts[0].device)
    flat = torch.cat([flags, *(part.reshape(-1) for part in parts)])
    dist.all_reduce(flat, group=group)
    used = flat[: len(parts)].tolist()
    offset = len(parts)
    for parameter, part, count in zip(parameters, parts, used, strict=True):
        if count:
            piece = flat[offset : offset + part.numel()]
            parameter.grad = piece.view(part.shape).to(part.dtype)
        offset += part.numel()
