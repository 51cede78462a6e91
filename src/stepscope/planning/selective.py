"""Blocks that save some of their operators' outputs and recompute the rest in the backward pass.

`torch.utils.checkpoint` runs a block again, with the random numbers and the autocast of the forward
pass. Outputs that were kept are used there in place of a second call of their operators. What is
kept is named by operator and number of the call, never by values, so that a plan of a run on fake
tensors holds on any device; an operator that is not found again is recomputed.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from stepscope.acceleration.forward_registry import Layer, add_layer, forward_below
from stepscope.errors import StepscopeError
from stepscope.measure.dispatch import OperatorMode
from stepscope.planning.host_copies import LEAST_BYTES, Group, HostCopies, HostCopy
from stepscope.planning.operators import Key, can_keep, is_random, name_of
from stepscope.records import plans
from stepscope.torch_tools.capturing import is_capturing


class BlockPlan(NamedTuple):
    """How a block saves what its backward pass needs."""

    recompute: bool = False
    """False: as it is."""
    kept: frozenset[Key] = frozenset()
    """Operators whose outputs are saved; all others are recomputed."""
    offload: bool = False
    """Whether kept outputs and inputs are copied to host memory."""
    inputs: tuple[int, ...] = ()
    """Positions of the arguments that no other block saves."""
    is_random: bool = True
    """Whether the block draws random numbers. Their state cannot be read in a CUDA graph."""

    def __str__(self) -> str:
        if not self.recompute:
            return plans.AS_IT_IS
        names = sorted(Counter(name for name, _ in self.kept).items())
        listed = ", ".join(f"{count} {name}" for name, count in names)
        words = f"recompute all but {listed}" if listed else "recompute"
        return f"{words}, with copies in host memory" if self.offload else words


AS_IT_IS = BlockPlan()


def apply_to(block: nn.Module, plan: BlockPlan, copies: HostCopies, owner: object) -> Layer | None:
    """Let a block follow a plan; None if it stays as it is."""
    if not plan.recompute:
        return None
    below = forward_below(block)
    compiled = partial(_compiled_contexts, tuple(sorted(plan.kept)))

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return below(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(below, *args, use_reentrant=False, context_fn=compiled, **kwargs)
        group = copies.new_group() if plan.offload else None
        repeats_random = plan.is_random or not is_capturing()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            store: dict[Key, _Kept] = {}
            needed = plan.kept or not repeats_random
            keeping = _Keeping(plan, store, group, repeats_random) if needed else nullcontext()
            return keeping, _Again(module, store)

        with _offloaded(group, [args[at] for at in plan.inputs]):
            return checkpoint(
                below, *args, use_reentrant=False, context_fn=contexts,
                preserve_rng_state=repeats_random, **kwargs,
            )  # fmt: skip

    return add_layer(block, run, owner)


def _compiled_contexts(kept: tuple[Key, ...]) -> Any:
    """Let the compiler's partitioner save these outputs; it never copies them to host memory."""
    return create_selective_checkpoint_contexts(_Policy(kept))  # type: ignore[no-untyped-call]


class _Policy:
    def __init__(self, kept: tuple[Key, ...]) -> None:
        self._kept = frozenset(kept)
        self._calls: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del kwargs
        key = counted(self._calls[context.is_recompute], function)
        keeps = key in self._kept and can_keep(function, args)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class _Again:
    """Recomputes with what was kept, and without changing buffers again, such as running
    statistics."""

    def __init__(self, module: nn.Module, store: dict[Key, _Kept]) -> None:
        self._module, self._store = module, store
        self._buffers: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def __enter__(self) -> None:
        self._buffers = [
            (part._buffers, name, buffer)
            for part in self._module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer.detach().clone()
        self._mode = _Using(self._store) if self._store else nullcontext()
        self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer


class _Kept(NamedTuple):
    """The output of an operator, and what its call is recognized by."""

    called: tuple[object, ...]
    output: Any
    versions: tuple[int, ...]

    @property
    def is_unchanged(self) -> bool:
        return self.versions == _versions(self.output)


def _versions(output: Any) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


class _Keeping(OperatorMode):  # type: ignore[no-untyped-call]
    """Stores the outputs of operators in the forward pass of a block."""

    def __init__(
        self, plan: BlockPlan, store: dict[Key, _Kept], group: Group | None, repeats_random: bool
    ) -> None:
        super().__init__()
        self._wanted, self._store, self._group = plan.kept, store, group
        self._repeats_random = repeats_random
        self._calls: Counter[str] = Counter()

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not self._repeats_random and is_random(function, arguments):
            raise StepscopeError(
                "the block draws random numbers, and did not when its memory was planned",
                "call stepscope.fit on the model in training mode",
            )
        output = function(*arguments, **keywords)
        key = counted(self._calls, function)
        if key in self._wanted and can_keep(function, arguments):
            kept = tree_map(self._stored, output)
            called = (function, *_shapes(arguments))
            self._store[key] = _Kept(called, kept, _versions(kept))
        return output

    def _stored(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # With it a detached tensor shows later writes to the output, by its version.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            detached = leaf.detach()
        if self._group is not None and leaf.nbytes >= LEAST_BYTES:
            return self._group.add(detached)
        return detached


class _Using(OperatorMode):  # type: ignore[no-untyped-call]
    """Returns stored outputs where a block runs again."""

    def __init__(self, store: dict[Key, _Kept]) -> None:
        super().__init__()
        self._store = store
        self._calls: Counter[str] = Counter()

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        key = counted(self._calls, function)
        kept = self._store.pop(key, None)
        called = (function, *_shapes(arguments))
        if kept is not None and kept.called == called and kept.is_unchanged:
            return tree_map(lambda x: x.take() if isinstance(x, HostCopy) else x, kept.output)
        return function(*arguments, **keywords)


def counted(calls: Counter[str], function: Any) -> Key:
    name = name_of(function)
    calls[name] += 1
    return name, calls[name] - 1


def _shapes(arguments: Any) -> tuple[object, ...]:
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(arguments)
    )


def _offloaded(group: Group | None, inputs: list[Tensor]) -> AbstractContextManager[Any]:
    """Copy these inputs, which `checkpoint` saves, to host memory."""
    if group is None:
        return nullcontext()
    storages = {one.untyped_storage()._cdata for one in inputs}

    def pack(tensor: Tensor) -> Any:
        is_own = tensor.untyped_storage()._cdata in storages
        return group.add(tensor) if is_own and tensor.nbytes >= LEAST_BYTES else tensor

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor = packed.take() if isinstance(packed, HostCopy) else packed
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
