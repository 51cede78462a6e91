"""Run a program's training loop as a `stepscope.TrainStep`, without editing the program.

A loop that calls its model once, calls `backward()` of a loss in the model's output, may clip the
norm of the gradients, and updates with one optimizer, does what a `TrainStep` does. After one such
step has been seen, the call of the model runs all of it; the loop's own `backward()`, clipping and
`optimizer.step()` then find nothing to do, because no gradients are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from stepscope.acceleration.train_step import TrainStep

_WARMUP = 2
"""Eager calls of the `TrainStep` before its capture: it is captured before the trial is timed."""
_ANOTHER_LOSS = (
    "the loop computes its loss outside of the model: write it as loss_fn of stepscope.TrainStep"
)


class Seen:
    """What a step of the program has done."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        """Outputs of the model with gradients."""
        self.roots: list[Any] = []
        """What `backward` was called for."""
        self.norms: list[tuple[float, float]] = []
        """Largest norm and its order, for each clipping."""
        self.optimizers: list[Any] = []
        self.refused = ""


class LoopStep:
    """The steps of a program's loop; `run` replaces the call of its model once they are known."""

    def __init__(self, paused: Callable[[], AbstractContextManager[Any]]) -> None:
        self._paused = paused
        self._seen = Seen()
        self._step: TrainStep | None = None
        self._loss_index = 0
        self._shape: Any = None
        self._original: Callable[..., Any]
        self.refused = ""
        """Why the loop is not run as a `TrainStep`."""

    @property
    def active(self) -> bool:
        return self._step is not None

    def attach(self) -> None:
        """Watch the clipping of gradients; called before the program imports these functions."""
        utils = torch.nn.utils
        clip_norm, clip_value = utils.clip_grad_norm_, utils.clip_grad_value_

        def watched_norm(
            parameters: Any, max_norm: float, norm_type: float = 2.0, *rest: Any, **keywords: Any
        ) -> Any:
            if not self.active:
                self._seen.norms.append((float(max_norm), float(norm_type)))
            return clip_norm(parameters, max_norm, norm_type, *rest, **keywords)

        def watched_value(*arguments: Any, **keywords: Any) -> Any:
            self._seen.refused = "the loop clips the values of gradients"
            return clip_value(*arguments, **keywords)

        for module in (utils, utils.clip_grad):
            module.clip_grad_norm_ = watched_norm  # type: ignore[attr-defined]
            module.clip_grad_value_ = watched_value  # type: ignore[attr-defined]

    def called(self, output: Any) -> None:
        self._seen.calls.append(output)

    def backward_begins(self, roots: Any) -> None:
        self._seen.roots.append(roots)

    def optimizer_stepped(self, optimizer: Any) -> None:
        self._seen.optimizers.append(optimizer)

    def end_step(self, modules: Sequence[torch.nn.Module], dtype: torch.dtype | None) -> None:
        """Build the `TrainStep` if the step that ends here is one; otherwise note why not.
        `modules` are the models that the program calls."""
        seen, self._seen = self._seen, Seen()
        if self.active:
            return
        self.refused = _not_a_train_step(seen, modules)
        if self.refused:
            return
        leaves, self._shape = tree_flatten(seen.calls[0])
        (root,) = _tensors(seen.roots[0])
        self._loss_index = next(i for i, leaf in enumerate(leaves) if leaf is root)
        self._step = TrainStep(
            modules[0],
            seen.optimizers[0],
            loss_fn=lambda _, batch: self._loss(batch),
            max_grad_norm=seen.norms[0][0] if seen.norms else None,
            dtype=dtype,
            warmup=_WARMUP,
        )

    def run(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a whole step, and return the model's output with the loss; its other tensors are
        None."""
        assert self._step is not None
        self._original = original
        with self._paused():
            loss = self._step((arguments, keywords))
        leaves: list[Any] = [None] * self._shape.num_leaves
        # The loop calls `backward()` of it: a leaf without a graph.
        leaves[self._loss_index] = loss.requires_grad_()
        return tree_unflatten(leaves, self._shape)

    def _loss(self, batch: Any) -> Tensor:
        arguments, keywords = batch
        leaves = tree_flatten(self._original(*arguments, **keywords))[0]
        loss: Tensor = leaves[self._loss_index]
        return loss

    def without_effect(self) -> str | None:
        """Return why the step is not a CUDA graph; None if it is."""
        if self._step is None:
            return self.refused or "no model is called in a step"
        captured = self._step.captured
        if captured.graphs:
            return None
        return self._step.explain()


def _not_a_train_step(seen: Seen, modules: Sequence[torch.nn.Module]) -> str:
    """Return why the step is not that of a `TrainStep`; empty if it is."""
    roots = [root for one in seen.roots for root in _tensors(one)]
    if seen.refused:
        return seen.refused
    if len(modules) != 1:
        return f"a step of the loop calls {len(modules)} models"
    if len(seen.calls) != 1 or len(roots) != 1 or len(seen.optimizers) != 1:
        return (
            f"a step of the loop has {len(seen.calls)} calls of the model, {len(roots)} losses"
            f" and {len(seen.optimizers)} optimizer steps, not one of each"
        )
    if not any(leaf is roots[0] for leaf in tree_flatten(seen.calls[0])[0]):
        return _ANOTHER_LOSS
    if len(seen.norms) > 1 or any(kind != 2.0 for _, kind in seen.norms):
        return "the loop clips gradients more than once, or by another norm"
    return ""


def _tensors(roots: Any) -> list[Tensor]:
    several = roots if isinstance(roots, tuple | list) else (roots,)
    return [one for one in several if isinstance(one, Tensor)]
