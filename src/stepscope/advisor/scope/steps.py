"""Detect where the training steps of a program end, from optimizer steps and backward calls."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepscope.advisor.scope.anchor import Anchor

_NO_BACKWARD = -1
_BY_BACKWARD = "backward"
_BACKWARDS_ALONE = 3
"""Backward calls without an optimizer step before manual updates are looked for. Most programs
never reach it, and walking their autograd graph would cost milliseconds."""


def backward_task() -> int | None:
    """Id of the backward pass that this thread is executing, if any."""
    task: int = torch._C._current_graph_task_id()
    return None if task == _NO_BACKWARD else task


class StepFinder:
    """Detects the end of training steps. A step ends with an optimizer step; with several
    optimizers, see `Anchor`.

    If optimizers step in backward hooks, the step ends when that backward has returned, because a
    recording must not start in the middle of a backward. If no optimizer steps at all, because the
    program updates its parameters manually, it ends with each backward that follows an update.
    """

    def __init__(self) -> None:
        self.anchor = Anchor()
        self.optimizers: dict[int, Any] = {}
        self._stepped_in_backward = False
        self._backwards = 0
        self._updates = _Updates()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the optimizers; without one, the leaves that the loss depends on."""
        groups = [group for one in self.optimizers.values() for group in one.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return parameters or self._updates.leaves

    def optimizer_begins(self, optimizer: Any) -> bool:
        """Return True if this first optimizer step shows that the steps so far were misdetected:
        without an optimizer they were inferred from writes to gradients."""
        mistaken = not self.optimizers and bool(self.anchor.steps)
        if mistaken:
            self.anchor = Anchor()
        # Registered before it has stepped, because its closure calls backward.
        self.optimizers.setdefault(id(optimizer), optimizer)
        return mistaken

    def optimizer_stepped(self, optimizer: Any) -> bool:
        """Return True if a training step ends here."""
        if backward_task() is not None:
            self._stepped_in_backward = True
            return False
        return self.anchor.ends_step(id(optimizer))

    def backward_begins(self, roots: Any) -> None:
        if self._no_optimizer():
            self._backwards += 1
            if self._backwards >= _BACKWARDS_ALONE:
                self._updates.begin(roots)

    def backward_ended(self) -> bool:
        """Return True if a training step ends here."""
        if backward_task() is not None:
            return False
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            return self.anchor.ends_step(_BY_BACKWARD)
        if not self._no_optimizer() or self._backwards < _BACKWARDS_ALONE:
            return False
        return self._updates.end() and self.anchor.ends_step(_BY_BACKWARD)

    def _no_optimizer(self) -> bool:
        return not self.optimizers and backward_task() is None


class _Updates:
    """Detects changes to parameters or gradients between two backward calls; gradient accumulation
    changes neither."""

    def __init__(self) -> None:
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._state: list[tuple[int, ...]] | None = None
        self._changed = False

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]

    def begin(self, roots: Any) -> None:
        now = [_state(leaf) for leaf in self.leaves]
        self._changed = self._state is not None and now != self._state
        if len(now) < len(self._leaves) or not now:
            self._leaves = [weakref.ref(leaf) for leaf in _leaves_of(roots)]

    def end(self) -> bool:
        self._state = [_state(leaf) for leaf in self.leaves]
        return self._changed


def _state(leaf: torch.Tensor) -> tuple[int, ...]:
    """State that changes when the tensor or its gradient is written to or replaced."""
    gradient = leaf.grad
    return id(leaf), leaf._version, id(gradient), -1 if gradient is None else gradient._version


def _leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Leaves whose gradients a backward from `roots` computes."""
    tensors = roots if isinstance(roots, tuple | list) else (roots,)
    nodes = [one.grad_fn for one in tensors if isinstance(one, torch.Tensor)]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        nodes.extend(next_node for next_node, _ in node.next_functions)


class BackwardCalls:
    """Calls `begins` with the losses before every `backward`, and `ended` after it has returned.

    The tensor method and the function of `torch.autograd` that it calls are both replaced: a
    function mode runs the method inside its handler, where the mode cannot be exited.
    `torch.autograd.grad` stores no gradients; it counts if gradients of leaves are requested
    without `create_graph`.
    """

    def __init__(self, begins: Callable[[Any], None], ended: Callable[[], None]) -> None:
        self._begins, self._ended = begins, ended
        self._plain: list[tuple[Any, str, Callable[..., Any]]] = []
        self._here = threading.local()

    def attach(self) -> None:
        for owner, name, counts in (
            (torch.Tensor, "backward", _always),
            (torch.autograd, "backward", _always),
            (torch.autograd, "grad", _updates_leaves),
        ):
            plain = getattr(owner, name)
            self._plain.append((owner, name, plain))
            setattr(owner, name, self._around(plain, counts))

    def remove(self) -> None:
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)
        self._plain.clear()

    def _around(self, plain: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*arguments: Any, **keywords: Any) -> Any:
            inside = (
                torch.compiler.is_compiling()
                or getattr(self._here, "inside", False)
                # Comparisons of replaced parts in the first step of `accelerate`.
                or sys._getframe(1).f_globals.get("__name__") == "stepscope.acceleration.checks"
            )
            if inside or not counts(*arguments, **keywords):
                return plain(*arguments, **keywords)
            self._begins(arguments[0] if arguments else keywords.get("tensors"))
            self._here.inside = True
            try:
                result = plain(*arguments, **keywords)
            finally:
                self._here.inside = False
            self._ended()
            return result

        return call


def _always(*_: Any, **__: Any) -> bool:
    return True


def _updates_leaves(
    outputs: Any = None,  # noqa: ARG001
    inputs: Any = (),
    grad_outputs: Any = None,  # noqa: ARG001
    retain_graph: Any = None,  # noqa: ARG001
    create_graph: bool = False,
    **_: Any,
) -> bool:
    requested = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = all(isinstance(one, torch.nn.Parameter) or one.is_leaf for one in requested)
    return bool(requested) and leaves and not create_graph
