"""What a loop computes from its batch to its loss, to be computed again.

A loop has no function that returns its loss. The calls of its model, or of parts of it, and the
functions of torch that lead from there to the loss are recorded once, on real or on fake tensors,
and made again in another step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from stepscope.errors import StepscopeError, UsageError, one_line
from stepscope.measure.dispatch import FunctionMode

_FIX = "call the model in each step, and `backward()` on a loss of its outputs"


class _Computed(NamedTuple):
    """A result of a recorded call."""

    number: int


class _Given(NamedTuple):
    """A tensor from elsewhere in the loop, such as the batch."""

    number: int


class _Parameter(NamedTuple):
    name: str


class _Part(NamedTuple):
    """A call of the model, or of the part of this name."""

    name: str


_REFERENCES = (_Computed, _Given, _Parameter)


class _Call(NamedTuple):
    function: Any
    arguments: Any
    results: tuple[int, ...]


class LossTape(FunctionMode):
    """Records the functions of torch that a loop calls; calls of its model go through `call`."""

    def __init__(
        self,
        parameters: Mapping[int, str],
        converted: Callable[[Tensor], Tensor] = lambda given: given,
    ) -> None:
        """`parameters` has the names of the model's by id; all other tensors that the loop gives to
        a function are `converted`."""
        super().__init__()
        self._parameters, self._converted = parameters, converted
        self._indices = WeakIdKeyDictionary()
        self._numbers = 0
        self._calls: list[_Call] = []
        self._variables: tuple[int, ...] = ()
        self._alive: list[Tensor] = []
        self._within = False
        self._failure = ""
        self.given: list[Tensor] = []
        """Tensors that no recorded call has computed, and no parameters."""

    def call(self, name: str, module: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the model, or its part of this name."""
        self._within = True
        try:
            args, kwargs = self._with_converted((args, kwargs))
            output = module(*args, **kwargs)
        finally:
            self._within = False
        self._add(_Part(name), (args, kwargs), output)
        return output

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        arguments, keywords = self._with_converted((arguments, keywords))
        result = function(*arguments, **keywords)
        if not self._within:
            self._add(function, (arguments, keywords), result)
        return result

    def end(self, loss: Tensor) -> None:
        """Keep what the loss is computed from, and which tensors the loop still refers to after the
        backward pass."""
        if self._failure:
            raise StepscopeError(f"the loss could not be followed: {self._failure}")
        self._loss: int = self._indices.get(loss, -1)  # type: ignore[no-untyped-call]
        needed, kept, from_model = {self._loss}, [], False
        for call in reversed(self._calls):
            is_part, is_needed = isinstance(call.function, _Part), needed & {*call.results}
            from_model |= is_part and bool(is_needed)
            if is_part or is_needed:
                kept.append(call)
                needed |= {*call.results}
                needed |= {leaf.number for leaf in _leaves(call.arguments, _Computed)}
        if not from_model:
            raise UsageError("the loss is not computed from the outputs of the model", _FIX)
        self._calls = kept[::-1]
        used = {leaf.number for call in kept for leaf in _leaves(call.arguments, _Given)}
        if any(self.given[index].requires_grad for index in used):
            raise UsageError(
                "the loss uses tensors with gradients that the model neither has nor returns",
                "put all that has parameters into one nn.Module",
            )
        self.given = [one if at in used else one.new_empty(0) for at, one in enumerate(self.given)]
        alive = {self._indices[one] for one in self._indices}
        self._variables = tuple(sorted(alive & needed))

    def replayed(self, model: nn.Module, given: list[Tensor]) -> Tensor:
        """Compute the loss of a model, or a copy of it, from other tensors.

        Variables of the loop refer to their tensors until they are assigned again in the next step.
        """
        values: dict[int, Tensor] = {}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Computed):
                return values[leaf.number]
            if isinstance(leaf, _Parameter):
                return model.get_parameter(leaf.name)
            return given[leaf.number] if isinstance(leaf, _Given) else leaf

        for call, forgotten in zip(self._calls, self._last_uses(), strict=True):
            args, kwargs = tree_map(value, call.arguments, is_leaf=_is_reference)
            part = isinstance(call.function, _Part)
            function = model.get_submodule(call.function.name) if part else call.function
            result = function(*args, **kwargs)
            del args, kwargs
            values |= dict(zip(call.results, _tensors(result), strict=True))
            del result
            for index in forgotten:
                del values[index]
        self._alive = [values[index] for index in self._variables]
        return values[self._loss]

    def _last_uses(self) -> list[list[int]]:
        """Results that no call after each one uses, and no variable of the loop refers to."""
        seen, forgotten = {self._loss, *self._variables}, []
        for call in reversed(self._calls):
            own = {*call.results, *(leaf.number for leaf in _leaves(call.arguments, _Computed))}
            forgotten.append(sorted(own - seen))
            seen |= own
        return forgotten[::-1]

    def _with_converted(self, tree: Any) -> Any:
        def converted(leaf: Any) -> Any:
            is_given = isinstance(leaf, Tensor) and id(leaf) not in self._parameters
            return self._converted(leaf) if is_given and leaf not in self._indices else leaf

        return tree_map(converted, tree)

    def _add(self, function: Any, arguments: Any, result: Any) -> None:
        """An error must not reach the loop."""
        try:
            made = list(_tensors(result))
            if made:
                references = tree_map(self._reference, arguments)
                self._calls.append(_Call(function, references, tuple(map(self._number, made))))
        except Exception as error:
            self._failure = self._failure or one_line(error)

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
        if id(leaf) in self._parameters:
            return _Parameter(self._parameters[id(leaf)])
        known = next((at for at, one in enumerate(self.given) if one is leaf), None)
        if known is None:
            self.given.append(leaf)
        return _Given(len(self.given) - 1 if known is None else known)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, _REFERENCES)


def _leaves(tree: Any, kind: type[Any]) -> Iterator[Any]:
    return (leaf for leaf in tree_leaves(tree, is_leaf=_is_reference) if isinstance(leaf, kind))
