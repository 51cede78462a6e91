"""The linear layers of a model: which can use FP8, what their tensors lose, FP8 in their place.
Loads without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.kernels.fp8.recipe import DELAYED, E4M3, Recipe, shape_refused
from stepscope.studies.fp8.cases import CURRENT, DTYPES, CastLoss, Casts, GemmLoss, LayerProbe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from stepscope.kernels.fp8.reference import DelayedScales, Scales
    from stepscope.kernels.weight_copies import WeightCopies

EMULATED, KERNELS = "emulated", "kernels"
_SAMPLED = 256
"""Rows of a GEMM's result that are compared with float64; casts and sums cover all values."""


class Linears(NamedTuple):
    """The linear layers of a model by name."""

    eligible: dict[str, nn.Linear]
    left_out: dict[str, str]
    """The others, with the reason."""


def linears_of(model: nn.Module, forward: Callable[[], object]) -> Linears:
    """Find the layers that can use FP8 GEMMs. A forward pass shows the order of the calls, the
    number of tokens, and so the head: the last linear layer, whose errors go into the loss
    directly."""
    from torch import nn

    calls: dict[str, int] = {}

    def called(name: str, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        calls.pop(name, None)
        calls[name] = output.numel() // output.shape[-1]

    named = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_hook(partial(called, n)) for n, m in named.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    last = next(reversed(calls), "")
    eligible, left_out = {}, {}
    for name, layer in named.items():
        if name not in calls:
            reason = "not called as a module in the forward pass"
        elif name == last:
            reason = "the head: the last linear layer, read by the loss"
        elif type(layer).forward is not nn.Linear.forward:
            reason = f"{type(layer).__name__} has a forward of its own"
        elif id(layer.weight) in embeddings:
            reason = "shares its weight with an embedding"
        elif not layer.weight.requires_grad:
            reason = "frozen: it has no weight gradient"
        else:
            reason = shape_refused(calls[name], layer.in_features, layer.out_features) or ""
        if reason:
            left_out[name] = reason
        else:
            eligible[name] = layer
    return Linears(eligible, left_out)


def use_fp8(layers: Mapping[str, nn.Linear], recipe: Recipe, device: torch.device) -> str:
    """Let each layer compute in FP8: with the kernels of the device, else emulated. Return which.
    The kernels keep the histories of delayed scaling for fused layers only."""
    from stepscope.kernels.fp8 import recipe as recipes
    from stepscope.kernels.weight_copies import WeightCopies

    if recipe.scaling == DELAYED or recipes.unavailable(device, recipe) is not None:
        emulate_fp8(layers, recipe)
        return EMULATED
    copies = WeightCopies()
    for layer in layers.values():
        layer.forward = partial(_by_kernel, layer, recipe, copies)  # type: ignore[method-assign]
    return KERNELS


def _by_kernel(layer: nn.Linear, recipe: Recipe, copies: WeightCopies, x: Tensor) -> Tensor:
    from stepscope.kernels.fp8.linear import fp8_linear

    return fp8_linear(x, layer.weight, layer.bias, recipe=recipe, copies=copies)


def emulate_fp8(layers: Mapping[str, nn.Linear], recipe: Recipe) -> None:
    """Let each layer compute with the rounding of FP8, in plain PyTorch."""
    from stepscope.kernels.fp8.reference import DelayedScales

    for layer in layers.values():
        scales = DelayedScales.of(recipe) if recipe.scaling == DELAYED else None
        layer.forward = partial(_in_fp8, layer, recipe, scales)  # type: ignore[method-assign]


def _in_fp8(layer: nn.Linear, recipe: Recipe, scales: DelayedScales | None, x: Tensor) -> Tensor:
    import torch

    from stepscope.kernels.fp8.reference import fp8_linear_reference

    # Autocast would round the products of values and scales once more.
    with torch.autocast(x.device.type, enabled=False):
        out = fp8_linear_reference(
            x.bfloat16(), layer.weight, layer.bias, recipe=recipe, scales=scales
        )
    return out.to(_output_dtype(x))


def emulate_bf16(layers: Mapping[str, nn.Linear]) -> None:
    """Let each layer of a float32 model compute with the rounding of bfloat16, in float32, where
    the device multiplies bfloat16 hundreds of times as slowly. Casts round gradients too."""
    for layer in layers.values():
        layer.forward = partial(_in_bf16, layer)  # type: ignore[method-assign]


def _in_bf16(layer: nn.Linear, x: Tensor) -> Tensor:
    from torch import nn

    bias = None if layer.bias is None else _rounded(layer.bias)
    return _rounded(nn.functional.linear(_rounded(x), _rounded(layer.weight), bias))


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _output_dtype(x: Tensor) -> torch.dtype:
    import torch

    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Observer:
    """Examines the tensors of linear layers during forward and backward passes."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        from stepscope.kernels.fp8.reference import Scales

        self._layers = layers
        self._delayed = {
            name: {role: Scales(Recipe(DELAYED)) for role in ("input", "gradient")}
            for name in layers
        }
        self._saturated = {name: {"input": 0.0, "gradient": 0.0} for name in layers}
        self._step, self._examines = 0, False
        self.probes: list[LayerProbe] = []

    @contextmanager
    def step(self, step: int, *, examine: bool) -> Iterator[None]:
        """Follow the ranges of one training step; with `examine`, add a probe of each layer."""
        self._step, self._examines = step, examine
        handles = [
            layer.register_forward_hook(partial(self._called, name))
            for name, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, name: str, _: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            reached = partial(self._reached, name, arguments[0].detach())
            output.register_hook(reached)  # type: ignore[no-untyped-call]

    def _reached(self, name: str, x: Tensor, gradient: Tensor) -> None:
        """Take the tensors when the backward pass has the gradient of the output."""
        import torch

        with torch.no_grad():
            tensors = {
                "input": _rows(x),
                "weight": self._layers[name].weight.detach().float(),
                "gradient": _rows(gradient),
            }
            most = self._saturated[name]
            for role, scales in self._delayed[name].items():
                most[role] = max(most[role], _saturated(tensors[role], scales))
            if self._examines:
                self.probes.append(self._probe(name, tensors))
                self._saturated[name] = dict.fromkeys(most, 0.0)

    def _probe(self, name: str, tensors: Mapping[str, Tensor]) -> LayerProbe:
        from stepscope.kernels.fp8.reference import amax_of

        x, weight, gradient = tensors.values()
        return LayerProbe(
            layer=name,
            step=self._step,
            amax={role: float(amax_of(tensor)) for role, tensor in tensors.items()},
            casts=cast_losses(tensors),
            saturated=self._saturated[name],
            gemms=gemm_losses(x, weight, gradient),
            noise=_noise(x, gradient),
        )


def _rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1]).float()


def _saturated(tensor: Tensor, scales: Scales) -> float:
    from stepscope.kernels.fp8.reference import cast, counts

    result = cast(tensor, E4M3, DELAYED, scale=scales.scale(tensor, E4M3))
    return counts(tensor, result, E4M3).saturated / max(1, tensor.numel())


def cast_losses(tensors: Mapping[str, Tensor]) -> Casts:
    """What casts of each tensor lose, along the dimension that its first GEMM contracts."""
    return {
        role: {
            dtype: {scaling: _cast_loss(tensor, dtype, scaling) for scaling in CURRENT}
            for dtype in DTYPES
        }
        for role, tensor in tensors.items()
    }


def _cast_loss(tensor: Tensor, dtype: str, scaling: str) -> CastLoss:
    from stepscope.kernels.fp8.reference import cast, counts

    result = cast(tensor, dtype, scaling, 1)
    lost = counts(tensor, result, dtype).underflowed / max(1, int((tensor != 0).sum()))
    return CastLoss(error=_distance(result.dequantized(), tensor), underflow=lost)


def gemm_losses(x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, GemmLoss]:
    """Errors of the three GEMMs of a layer in bfloat16 and FP8."""
    gemms = {
        "forward": (x, 1, weight, 1),
        "dX": (gradient, 1, weight, 0),
        "dW": (gradient, 0, x, 0),
    }
    kernels = _by_kernels(x, weight, gradient)
    return {
        name: _gemm_loss(name, *operands, kernels.get(name)) for name, operands in gemms.items()
    }


def _by_kernels(x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Results of the three GEMMs with the kernels of the device; empty if it has none."""
    import torch

    from stepscope.kernels.fp8 import recipe as recipes
    from stepscope.kernels.fp8.linear import fp8_linear

    if recipes.unavailable(x.device) is not None:
        return {}
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        narrow = x.bfloat16().requires_grad_()
        learned = weight.detach().clone().requires_grad_()
        out = fp8_linear(narrow, learned)
        of_x, of_weight = torch.autograd.grad(out, (narrow, learned), gradient.bfloat16())
    return {"forward": out.detach(), "dX": of_x, "dW": of_weight}


def _gemm_loss(
    name: str, a: Tensor, dim_a: int, b: Tensor, dim_b: int, by_kernel: Tensor | None
) -> GemmLoss:
    """Compare a GEMM that contracts these dimensions of its operands."""
    from stepscope.kernels.fp8.reference import cast

    chosen = slice(0, a.shape[1 - dim_a], max(1, a.shape[1 - dim_a] // _SAMPLED))

    def multiplied(left: Tensor, right: Tensor) -> Tensor:
        left = left[chosen] if dim_a == 1 else left[:, chosen].T
        return left @ (right.T if dim_b == 1 else right)

    exact = multiplied(a.double(), b.double())
    on_gpu = a.device.type == "cuda"
    narrow = (
        multiplied(a.bfloat16(), b.bfloat16())
        if on_gpu
        else multiplied(_rounded(a), _rounded(b)).bfloat16()
    )
    fp8: dict[str, dict[str, float]] = {}
    for dtype in (E4M3,) if name == "forward" else DTYPES:
        fp8[dtype] = {}
        for scaling in CURRENT:
            left = cast(a, dtype, scaling, dim_a).dequantized()
            right = cast(b, E4M3, scaling, dim_b).dequantized()
            fp8[dtype][scaling] = _distance(multiplied(left, right).bfloat16(), exact)
    kernel = None if by_kernel is None else _distance(by_kernel[chosen], exact)
    return GemmLoss(bf16=_distance(narrow, exact), fp8=fp8, kernel=kernel)


def _noise(x: Tensor, gradient: Tensor) -> float | None:
    half = len(x) // 2
    columns = slice(0, gradient.shape[1], max(1, gradient.shape[1] // _SAMPLED))
    first = gradient[:half, columns].T @ x[:half]
    second = gradient[half : 2 * half, columns].T @ x[half : 2 * half]
    return _distance(first, second, of=first + second) if half else None


def _distance(value: Tensor, exact: Tensor, of: Tensor | None = None) -> float:
    """Norm of the difference over the norm of the exact tensor, or of `of`."""
    size = (exact if of is None else of).double().norm()
    return float((value.double() - exact.double()).norm() / size) if size > 0 else 0.0
