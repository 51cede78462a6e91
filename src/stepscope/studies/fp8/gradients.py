"""The gradient of all parameters with FP8 in some layers against float32, at fixed weights and a
fixed batch: which layers should stay in bfloat16. Loads without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from stepscope.kernels.fp8.recipe import DEFAULT
from stepscope.studies.fp8.cases import (
    ENDS,
    ONLY,
    WITHOUT,
    GradientError,
    GradientPass,
    GradientProbe,
    LayerGroup,
)
from stepscope.studies.fp8.layers import EMULATED, Linears, use_fp8
from stepscope.training.subject import TrainingStep, run_in_order
from stepscope.views.builders import grouped

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST = 8
"""Groups of layers that are examined one by one; the smallest ones beyond are one group."""

_LEAST = 1e-6
"""Norm of the gradient of a kind of parameter over that of all, from which on it is compared."""

Layers = Mapping[str, "nn.Linear"]


class Group(NamedTuple):
    """Layers of all blocks that `accelerate` runs in one dtype."""

    name: str
    patterns: tuple[str, ...]
    layers: dict[str, nn.Linear]


class Sums(NamedTuple):
    """Squared norms of the difference and of the exact gradient, and the product of both
    gradients."""

    difference: float
    size: float
    product: float


def pattern_of(name: str) -> str:
    """Replace the indices in a name: the pattern that the names of all blocks match."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def groups_of(linears: Linears) -> list[Group]:
    """Group the eligible layers by their names without indices. Layers of one module that read the
    same tensor, as Q, K and V do, and the layers of an MLP are one group: their GEMMs are fused,
    and in FP8 together."""
    kinds = grouped(linears.reads, pattern_of)
    joined: list[list[str]] = []
    for pattern, (first, *_) in kinds.items():
        if joined and _continues([kinds[other][0] for other in joined[-1]], first, linears):
            joined[-1].append(pattern)
        else:
            joined.append([pattern])
    short = grouped(joined, _short_name)
    groups = [
        Group(
            _short_name(patterns)
            if len(short[_short_name(patterns)]) == 1
            else " + ".join(patterns),
            tuple(patterns),
            {name: linears.eligible[name] for pattern in patterns for name in kinds[pattern]},
        )
        for patterns in joined
    ]
    if len(groups) <= _MOST:
        return groups
    groups.sort(key=lambda group: -_weights(group.layers))
    rest = groups[_MOST - 1 :]
    return [
        *groups[: _MOST - 1],
        Group(
            f"{len(rest)} smaller groups",
            tuple(pattern for group in rest for pattern in group.patterns),
            {name: layer for group in rest for name, layer in group.layers.items()},
        ),
    ]


def _weights(layers: Layers) -> int:
    return sum(layer.weight.numel() for layer in layers.values())


def _continues(members: list[str], name: str, linears: Linears) -> bool:
    """Return whether a layer reads the same tensor as these, or is the last one of an MLP."""
    if {other.rpartition(".")[0] for other in members} != {name.rpartition(".")[0]}:
        return False
    if linears.reads[members[-1]] == linears.reads[name]:
        return True
    hidden = {linears.eligible[other].out_features for other in members}
    return (
        len(members) <= 2
        and len({linears.reads[other] for other in members}) == 1
        and hidden == {linears.eligible[name].in_features}
        and max(hidden) > linears.eligible[members[0]].in_features
    )


def _short_name(patterns: Iterable[str]) -> str:
    """Return the names within a block: attention.query+key+value."""
    within = [pattern.rpartition("*.")[2] for pattern in patterns]
    parent = within[0].rpartition(".")[0]
    return ".".join(filter(None, [parent, "+".join(name.rpartition(".")[2] for name in within)]))


def without_ends(linears: Linears) -> dict[str, nn.Linear]:
    """Return the layers without those of the first and the last block; empty if the model does not
    have three blocks."""
    blocks = dict.fromkeys(filter(None, map(_block_of, linears.reads)))
    if len(blocks) < 3:
        return {}
    ends = {next(iter(blocks)), next(reversed(blocks))}
    return {name: layer for name, layer in linears.eligible.items() if _block_of(name) not in ends}


def _block_of(name: str) -> str:
    parts = name.split(".")
    index = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def gradient_probe(
    step: TrainingStep, linears: Linears, at: int, progress: Callable[[int, int, str], None]
) -> GradientProbe | None:
    """Compare the gradients of the step's batch with those of float32; None if these are zero or
    not finite. Weights, buffers, gradients and random numbers stay as they were."""
    groups = groups_of(linears)
    passes: list[GradientPass] = []
    arithmetic = EMULATED
    with _unchanged(step), _without_dropout(step):
        with _forwards_restored(linears.eligible), step.computing_in("float32"):
            for layer in linears.eligible.values():
                vars(layer).pop("forward", None)
            exact_loss, exact = _gradients(step)
        if not math.isfinite(exact_loss) or _errors(exact, exact)[0].error is None:
            return None
        chosen = list(_choices(linears, groups))
        for fp8, name, layers in chosen:
            with _forwards_restored(layers):
                arithmetic = use_fp8(layers, DEFAULT, step.device.torch_device)
                loss, gradients = _gradients(step)
            error, kinds = _errors(gradients, exact)
            passes.append(
                GradientPass(
                    fp8=fp8,
                    layers=name,
                    weights=_weights(layers),
                    loss=loss if math.isfinite(loss) else None,
                    total=error,
                    kinds=kinds,
                )
            )
            progress(len(passes), len(chosen), "gradients against float32")
    return GradientProbe(
        step=at,
        arithmetic=arithmetic,
        loss=exact_loss,
        groups=tuple(LayerGroup(name=group.name, patterns=group.patterns) for group in groups),
        passes=tuple(passes),
    )


def _choices(linears: Linears, groups: Sequence[Group]) -> Iterator[tuple[str, str, Layers]]:
    """Yield where FP8 is, the name of the group, and the layers in FP8."""
    yield "none", "", {}
    yield "all", "", linears.eligible
    if len(groups) > 1:
        for group in groups:
            yield ONLY, group.name, group.layers
        for group in groups:
            others = {n: m for n, m in linears.eligible.items() if n not in group.layers}
            yield WITHOUT, group.name, others
    if inner := without_ends(linears):
        yield WITHOUT, ENDS, inner


def _gradients(step: TrainingStep) -> tuple[float, dict[str, Tensor]]:
    """Run the passes of a step, and take its loss and the gradients of the parameters."""
    import torch

    torch.manual_seed(0)
    step.reset()
    run_in_order(step.passes())
    assert step.loss is not None
    loss = float(step.loss.detach())
    taken = {}
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            taken[name], parameter.grad = parameter.grad, None
    step.reset()
    return loss, taken


def _errors(
    gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> tuple[GradientError, dict[str, GradientError]]:
    """Return the error of all gradients together, and by name without indices."""
    import torch

    def sums(name: str) -> Tensor:
        right = exact[name].float()
        left = gradients[name].float() if name in gradients else torch.zeros_like(right)
        products = ((left - right).square(), right.square(), left * right)
        return torch.stack([product.sum(dtype=torch.float64) for product in products])

    of_each = dict(zip(exact, torch.stack([sums(name) for name in exact]).tolist(), strict=True))
    total = _sum(of_each.values())
    of_kinds = {
        kind.removesuffix(".weight"): _sum(of_each[name] for name in names)
        for kind, names in grouped(exact, pattern_of).items()
    }
    return _error(total), {
        kind: _error(sums)
        for kind, sums in of_kinds.items()
        # Others are zero but for rounding, as the gradients of biases of keys.
        if sums.size > _LEAST**2 * total.size
    }


def _sum(sums: Iterable[Sequence[float]]) -> Sums:
    return Sums(*map(math.fsum, zip(*sums, strict=True)))


def _error(sums: Sums) -> GradientError:
    if not sums.size or not all(map(math.isfinite, sums)):
        return GradientError(error=None, slope=None)
    return GradientError(
        error=math.sqrt(sums.difference / sums.size), slope=sums.product / sums.size
    )


@contextmanager
def _forwards_restored(layers: Layers) -> Iterator[None]:
    """Restore the forwards of these layers, which are attributes of a layer where it emulates."""
    before = {
        name: {key: value for key, value in vars(layer).items() if key == "forward"}
        for name, layer in layers.items()
    }
    try:
        yield
    finally:
        for name, layer in layers.items():
            vars(layer).pop("forward", None)
            vars(layer).update(before[name])


@contextmanager
def _unchanged(step: TrainingStep) -> Iterator[None]:
    """Restore gradients, buffers and random numbers. The passes do not write weights."""
    import torch

    device = step.device.torch_device
    gradients = [(parameter, parameter.grad) for parameter in step.model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in step.model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _without_dropout(step: TrainingStep) -> Iterator[None]:
    """Turn dropout off if the loss depends on random numbers: dtypes draw different ones."""
    import torch
    from torch import nn

    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        step.reset()
        run_in_order(phase for phase in step.passes() if phase.name != "backward")
        assert step.loss is not None
        losses.append(float(step.loss.detach()))
    step.reset()
    before = [(module, module.training) for module in step.model.modules()]
    with ExitStack() as restored:
        if losses[0] != losses[1]:
            for module, training in before:
                # cuDNN computes gradients of recurrent layers in training only.
                if not isinstance(module, nn.RNNBase):
                    restored.callback(setattr, module, "training", training)
                    module.training = False
        yield
