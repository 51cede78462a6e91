"""Finds where the training steps of a program end, from its optimizers and its backward calls."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stepscope.advisor.scope.anchor import Anchor

_NO_BACKWARD = -1
_BY_BACKWARD = "backward"
_BACKWARDS_ALONE = 3
"""Backward calls without an optimizer step before updates are looked for: most programs never come
that far, and a walk over their graph would cost them milliseconds."""


def backward_task() -> int | None:
    """The autograd engine's pass that this thread works on, if any."""
    task: int = torch._C._current_graph_task_id()
    return None if task == _NO_BACKWARD else task


class StepFinder:
    """A step ends with the step of an optimizer; with several optimizers, see `Anchor`.

    Where optimizers step in hooks of the backward, it ends when that backward has returned: nothing
    may be recorded from the middle of a backward on. Where no optimizer steps at all, because the
    program updates its parameters by hand, it ends with each backward that follows such an update.
    """

    def __init__(self) -> None:
        self.anchor = Anchor()
        self.optimizers: dict[int, Any] = {}
        self._stepped_in_backward = False
        self._backwards = 0
        self._updates = _Updates()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those of the optimizers; without one, the leaves that the program's loss depends on."""
        groups = [group for one in self.optimizers.values() for group in one.param_groups]
        held = [parameter for group in groups for parameter in group["params"]]
        return held or self._updates.leaves

    def optimizer_begins(self, optimizer: Any) -> bool:
        """Whether this first optimizer step shows that the steps so far were none: without an
        optimizer they were found by the program's writes to its gradients."""
        mistaken = not self.optimizers and bool(self.anchor.steps)
        if mistaken:
            self.anchor = Anchor()
        # Known from here on: its closure calls backward before it has stepped.
        self.optimizers.setdefault(id(optimizer), optimizer)
        return mistaken

    def optimizer_stepped(self, optimizer: Any) -> bool:
        """Whether a training step ends here."""
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
        """Whether a training step ends here."""
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
    """Whether a program has changed its parameters or gradients between two backward calls: where
    it accumulates gradients, it leaves both alone."""

    def __init__(self) -> None:
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._state: list[tuple[int, ...]] | None = None
        self._changed = False

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for held in self._leaves if (leaf := held()) is not None]

    def begin(self, roots: Any) -> None:
        now = [_state(leaf) for leaf in self.leaves]
        self._changed = self._state is not None and now != self._state
        if len(now) < len(self._leaves) or not now:
            self._leaves = [weakref.ref(leaf) for leaf in _leaves_of(roots)]

    def end(self) -> bool:
        self._state = [_state(leaf) for leaf in self.leaves]
        return self._changed


def _state(leaf: torch.Tensor) -> tuple[int, ...]:
    """Differs from an earlier one where the tensor or its gradient was written to or replaced."""
    gradient = leaf.grad
    return id(leaf), leaf._version, id(gradient), -1 if gradient is None else gradient._version


def _leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """The tensors whose gradients a backward from these makes."""
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
        nodes.extend(further for further, _ in node.next_functions)


class BackwardCalls:
    """Calls `begins` with the losses ahead of every `backward`, and `ended` when it has returned.

    The method of a tensor and the function of `torch.autograd` that it calls are both replaced: a
    function mode runs the method within its handler, where it cannot be left.
    `torch.autograd.grad` leaves no gradients behind: it counts where gradients of leaves are asked
    for and not differentiated again.
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
            inside = torch.compiler.is_compiling() or getattr(self._here, "inside", False)
            if inside or not counts(*arguments, **keywords):
                return plain(*arguments, **keywords)
            self._begins(arguments[0] if arguments else keywords.get("tensors"))
            self._here.inside = True
            try:
                found = plain(*arguments, **keywords)
            finally:
                self._here.inside = False
            self._ended()
            return found

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
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = all(isinstance(one, torch.nn.Parameter) or one.is_leaf for one in wanted)
    return bool(wanted) and leaves and not create_graph
