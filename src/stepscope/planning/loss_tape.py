"""What a loop computes between the call of its model and `backward()`, to be computed again.

A loop has no function that returns its loss. The functions of torch that lead from the outputs of
the model to the loss are recorded once, on real or on fake tensors, and called again on those of
another step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from stepscope.errors import UsageError
from stepscope.measure.dispatch import FunctionMode


class _Computed(NamedTuple):
    """An output of the model, or a result of a recorded function."""

    index: int


class _Given(NamedTuple):
    """A tensor from elsewhere in the loop, such as the targets."""

    index: int


class _Call(NamedTuple):
    function: Any
    arguments: Any
    results: tuple[int, ...]


class LossTape(FunctionMode):
    """Records the functions that are called with what a model returned."""

    def __init__(self, output: Any, converted: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """`converted` is called with each tensor that a recorded function is given."""
        super().__init__()
        self._converted = converted
        self._indices = WeakIdKeyDictionary()
        self._numbers = 0
        self._calls: list[_Call] = []
        self._variables: tuple[int, ...] = ()
        self._alive: list[Tensor] = []
        self.given: list[Tensor] = []
        """Tensors that are neither outputs of the model nor computed from them."""
        for leaf in _tensors(output):
            self._number(leaf)
        self._outputs = self._numbers

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        arguments, keywords = tree_map(
            lambda leaf: self._converted(leaf) if isinstance(leaf, Tensor) else leaf,
            (arguments, keywords),
        )
        result = function(*arguments, **keywords)
        made = list(_tensors(result))
        if made:
            given = tree_map(self._reference, (arguments, keywords))
            self._calls.append(_Call(function, given, tuple(map(self._number, made))))
        return result

    def end(self, loss: Tensor) -> None:
        """Keep what the loss is computed from, and which tensors the loop still refers to."""
        if loss not in self._indices:
            raise UsageError(
                "the loss of the loop is not computed from the outputs of its model",
                "call the model once in a step, and `backward()` on a loss of its outputs",
            )
        self._loss = self._indices[loss]
        needed, kept = {self._loss}, []
        for call in reversed(self._calls):
            if needed.intersection(call.results):
                kept.append(call)
                needed |= {leaf.index for leaf in _leaves(call.arguments, _Computed)}
        self._calls = kept[::-1]
        used = {leaf.index for call in kept for leaf in _leaves(call.arguments, _Given)}
        for index in used:
            given = self.given[index]
            if given.requires_grad:
                what = "a parameter" if isinstance(given, nn.Parameter) else "a computed tensor"
                raise UsageError(
                    f"the loss of the loop uses {what} that its model does not return",
                    "put all that has parameters into one nn.Module that the loop calls",
                )
        alive = {self._indices[one] for one in self._indices}
        self._variables = tuple(sorted(alive & (needed | {*range(self._outputs)})))

    def replayed(self, output: Any, given: list[Any]) -> Tensor:
        """Compute the loss from other outputs of the model.

        Variables of the loop refer to their tensors until they are assigned again in the next step.
        """
        values = dict(enumerate(_tensors(output)))

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Computed):
                return values[leaf.index]
            return given[leaf.index] if isinstance(leaf, _Given) else leaf

        for function, arguments, results in self._calls:
            positional, keywords = tree_map(value, arguments, is_leaf=_is_reference)
            result = function(*positional, **keywords)
            values |= dict(zip(results, _tensors(result), strict=True))
        self._alive = [values[index] for index in self._variables]
        return values[self._loss]

    def forget(self) -> None:
        """Release the variables of the last replay."""
        self._alive = []

    def _number(self, made: Tensor) -> int:
        if made not in self._indices:
            self._indices[made] = self._numbers
            self._numbers += 1
        index: int = self._indices[made]
        return index

    def _reference(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf in self._indices:
            return _Computed(self._indices[leaf])
        known = next((at for at, one in enumerate(self.given) if one is leaf), None)
        if known is None:
            self.given.append(leaf)
        return _Given(len(self.given) - 1 if known is None else known)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, _Computed | _Given)


def _leaves(tree: Any, kind: type[Any]) -> Iterator[Any]:
    return (leaf for leaf in tree_leaves(tree, is_leaf=_is_reference) if isinstance(leaf, kind))
