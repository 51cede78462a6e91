"""Which linear layers of a model run in FP8, by which recipe, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.fp8 import choice
from stepscope.kernels.fp8.casts import Histories, Quantized
from stepscope.kernels.fp8.feed_forward import fp8_feed_forward
from stepscope.kernels.fp8.linear import apply
from stepscope.kernels.fp8.recipe import DELAYED, Recipe, recipe_of, shape_refused, unavailable
from stepscope.kernels.fp8.saved import Layer
from stepscope.kernels.norm import Normed
from stepscope.kernels.weight_copies import WeightCopies, Weights

_DTYPES = (torch.bfloat16, torch.float16)


class Fp8Layers:
    """The choice of FP8 for the layers that read one `WeightCopies` (its attribute `fp8`).

    A layer runs in FP8 if the device has FP8 GEMMs, its shape allows them, and the rule of
    `choice` predicts a gain for its number of tokens. `always` leaves the rule out. `keep` has
    weights that stay in the matmul dtype. With `is_assumed`, for predictions, every device is taken
    to have FP8 GEMMs. `decisions` says for each layer that has run why it stayed; None for a layer
    in FP8.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        *,
        always: bool = False,
        rates: choice.Rates = choice.RATES,
        is_assumed: bool = False,
    ) -> None:
        self.recipe = recipe_of(recipe)
        self.always = always
        self._rates, self._is_assumed = rates, is_assumed
        self._kept = WeakTensorKeyDictionary()
        self._overrides = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()
        self._histories = WeakTensorKeyDictionary()
        self._devices: dict[tuple[torch.device, Recipe], str | None] = {}
        self.decisions: dict[str, str | None] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the settings only: names and histories belong to the weights of one model."""
        return _created, (self.recipe, self.always, self._rates)

    @property
    def notes_amax(self) -> bool:
        """Whether the kernels around the GEMMs should compute largest magnitudes for casts."""
        return self.recipe.one_scale

    def name(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set the names of weights, as `decisions` and `override` use them. Casts of these weights
        are cached."""
        for name, weight in named:
            self._names[weight] = name

    def keep(self, weight: Tensor, reason: str) -> None:
        """Leave the layers that read this weight in the matmul dtype."""
        self._kept[weight] = reason

    def left(self, weight: Tensor, reason: str) -> None:
        """Record that a layer with this weight ran without FP8."""
        self._decide((weight,), reason)

    def override(self, pattern: str, recipe: Recipe | str | None) -> None:
        """Use another recipe for layers whose weights' names match, or None for no FP8, whatever
        the rule says."""
        matching = [weight for weight in self._names if fnmatch(self._names[weight], pattern)]
        if not matching:
            raise ValueError(f"no weight has a name that matches {pattern!r}")
        for weight in matching:
            if recipe is None:
                self.keep(weight, "excluded")
            else:
                self._overrides[weight] = recipe_of(recipe)

    def saturated(self) -> dict[str, tuple[int, int]]:
        """Return how many values of the input and of the gradient of each layer with delayed scales
        were limited so far. Waits for the device."""
        counts = {}
        for weight in self._histories:
            one = self._histories[weight]
            if weight in self._names:
                counts[self._names[weight]] = (int(one.x.saturated), int(one.grad.saturated))
        return counts

    def refused(
        self, weights: Weights, tokens: int | None = None, transposed: bool = False
    ) -> str | None:
        """Return why a layer with these weights does not run in FP8; None if it does. Without a
        number of tokens, only reasons that hold for every input."""
        kept = [self._kept[weight] for weight in weights if weight in self._kept]
        if kept:
            return str(kept[0])
        recipe, chosen = self._recipe_of(weights)
        where = (weights[0].device, recipe)
        if where not in self._devices:
            self._devices[where] = None if self._is_assumed else unavailable(*where)
        if reason := self._devices[where]:
            return reason
        rows = sum(weight.shape[0] for weight in weights)
        d_out, d_in = (weights[0].shape[1], rows) if transposed else (rows, weights[0].shape[1])
        reason = shape_refused(tokens, d_in, d_out)
        if reason is not None or tokens is None or self.always or chosen:
            return reason
        return choice.not_worth_it(tokens, d_in, d_out, recipe, self._rates)

    def linear(self, x: Tensor | Normed, weights: Weights, copies: WeightCopies) -> Tensor | None:
        """Return the output of a fused projection in FP8; None if it stays in the matmul dtype."""
        read = x.value if isinstance(x, Normed) else x
        if not self._takes(weights, read):
            return None
        normed = x if isinstance(x, Normed) else None
        operands = self.operands(weights, copies)
        return apply(read.to(matmul_dtype(read)), normed, operands, self._layer(weights), weights)

    def feed_forward(
        self,
        x: Tensor | Normed,
        first: Weights,
        second: Tensor,
        copies: WeightCopies,
        policy: str,
    ) -> Tensor | None:
        """Return the output of a SwiGLU feed-forward in FP8; None if it stays in the matmul dtype.
        Both of its layers do, or neither."""
        read = x.value if isinstance(x, Normed) else x
        layers = (first, (second,))
        both = [self._takes(weights, read) for weights in layers]
        if not all(both) or self.recipe_of(first) != self.recipe_of((second,)):
            for weights, takes in zip(layers, both, strict=True):
                if takes:
                    self._decide(weights, "the other layer of its MLP has another dtype or recipe")
            return None
        operands = self.operands(first, copies), self.operands((second,), copies)
        settings = self._layer(first), self._layer((second,))
        normed = x if isinstance(x, Normed) else None
        read = read.to(matmul_dtype(read))
        return fp8_feed_forward(read, normed, operands, settings, policy, first, second)

    def operands(
        self, weights: Weights, copies: WeightCopies, transposed: bool = False
    ) -> Quantized:
        """Return all these weights as operands of FP8 GEMMs."""
        # A weight that a wrapper gathers from several ranks has no name here: it changes without a
        # change of its version.
        named = all(weight in self._names for weight in weights)
        return copies.quantized(weights, self.recipe_of(weights), transposed, cached=named)

    def recipe_of(self, weights: Weights) -> Recipe:
        """Return the recipe of the layer that reads these weights side by side."""
        return self._recipe_of(weights)[0]

    def decide(self, weights: Weights, tokens: int | None, transposed: bool) -> str | None:
        """Return why a layer stays in the matmul dtype, and record it; None for a layer in FP8."""
        reason = self.refused(weights, tokens, transposed)
        self._decide(weights, reason)
        return reason

    def _takes(self, weights: Weights, x: Tensor) -> bool:
        tokens = x.numel() // max(1, x.shape[-1])
        reason = self.refused(weights, tokens)
        dtype = matmul_dtype(x)
        if reason is None and dtype not in _DTYPES:
            reason = f"its matmuls run in {str(dtype).removeprefix('torch.')}, without autocast"
        self._decide(weights, reason)
        return reason is None

    def _decide(self, weights: Weights, reason: str | None) -> None:
        for weight in weights:
            if weight in self._names:
                self.decisions[self._names[weight]] = reason

    def _recipe_of(self, weights: Weights) -> tuple[Recipe, bool]:
        """Return the recipe of a layer, and whether it was set for it."""
        for weight in weights:
            if weight in self._overrides:
                return self._overrides[weight], True
        return self.recipe, False

    def _layer(self, weights: Weights) -> Layer:
        recipe = self._recipe_of(weights)[0]
        histories = None
        if recipe.scaling == DELAYED:
            if weights[0] not in self._histories:
                self._histories[weights[0]] = Histories.of(recipe, weights[0].device)
            histories = self._histories[weights[0]]
        return Layer(recipe, histories)


def _created(recipe: Recipe, always: bool, rates: choice.Rates) -> Fp8Layers:
    return Fp8Layers(recipe, always=always, rates=rates)
