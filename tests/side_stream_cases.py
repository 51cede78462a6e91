"""Readers of gradients that an optimizer-in-backward computes on its side stream: a block whose
parameters all have such gradients, and hooks and modes that read these during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from stepscope.acceleration.train_step import TrainStep
from stepscope.kernels.feed_forward import mlp
from stepscope.kernels.norm import normed_sum
from stepscope.kernels.qkv import projected_heads
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import InBackwardAdamW

EPS, HEADS = 1e-5, 2
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
"""Gradients that are nearly zero change little with this eps."""
Seen = dict[str, Tensor]


class Net(nn.Module):
    """One block, applied `uses` times: LayerNorm, heads, MLP with biases, add and LayerNorm.
    Everything is a kernel if `fused`, else torch's own operators."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.width, self.fused = width, fused
        self.uses, self.penalty, self.checkpointed = 1, 0.0, False
        generator = torch.Generator().manual_seed(0)
        shapes = {
            **dict.fromkeys(("query", "key", "value"), (width, width)),
            "first": (2 * width, width),
            "second": (width, 2 * width),
            **{f"{name}_bias": (width,) for name in ("query", "key", "value", "second")},
            "first_bias": (2 * width,),
            **dict.fromkeys(("scale", "shift", "last_scale", "last_shift"), (width,)),
        }
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator) / width**0.5
            self.register_parameter(name, nn.Parameter(drawn + ("scale" in name)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            if self.checkpointed:
                x = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self.block(x)
        loss = (x * torch.sin(3 * x)).sum(-1).mean()
        for _, parameter in self.summed() if self.penalty else ():
            loss = loss + self.penalty * parameter.square().sum()
        return loss

    def block(self, x: Tensor) -> Tensor:
        names = ("query", "key", "value")
        weights = tuple(getattr(self, name) for name in names)
        biases = tuple(getattr(self, f"{name}_bias") for name in names)
        if not self.fused:
            normed = functional.layer_norm(x, (self.width,), self.scale, self.shift, EPS)
            q, k, v = (
                functional.linear(normed, w, b) for w, b in zip(weights, biases, strict=True)
            )
            mixed = x + torch.tanh(q) * k + v
            hidden = functional.gelu(functional.linear(mixed, self.first, self.first_bias))
            total = mixed + functional.linear(hidden, self.second, self.second_bias)
            return functional.layer_norm(
                total, (self.width,), self.last_scale, self.last_shift, EPS
            )
        copies = WeightCopies()
        _, of_x = normed_sum(x, None, self.scale, EPS, bias=self.shift, centered=True)
        heads = projected_heads(of_x.value, weights, copies, biases, heads=HEADS)
        q, k, v = (one.transpose(1, 2).flatten(2) for one in heads)
        mixed = x + torch.tanh(q) * k + v
        branch = mlp(
            mixed, (self.first,), self.second, copies,
            activation="gelu", biases=(self.first_bias,), out_bias=self.second_bias,
        )  # fmt: skip
        _, of_sum = normed_sum(
            mixed, branch, self.last_scale, EPS, bias=self.last_shift, centered=True
        )
        return of_sum.value

    def summed(self) -> list[tuple[str, Tensor]]:
        """Return the parameters whose gradients are sums over all tokens."""
        return [(name, one) for name, one in self.named_parameters() if one.dim() == 1]


@contextmanager
def unread(_: Net, __: Seen) -> Iterator[None]:
    yield


@contextmanager
def used_twice(net: Net, _: Seen) -> Iterator[None]:
    net.uses = 2
    yield


@contextmanager
def used_by_a_penalty(net: Net, _: Seen) -> Iterator[None]:
    net.penalty = 0.1
    yield


@contextmanager
def checkpointed(net: Net, _: Seen) -> Iterator[None]:
    net.uses, net.checkpointed = 2, True
    yield


@contextmanager
def hooked_after(net: Net, seen: Seen) -> Iterator[None]:
    def copied(out: Tensor) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            out.copy_(parameter.grad)

        return hook

    for name, one in net.summed():
        seen[name] = torch.zeros_like(one, requires_grad=False)
        one.register_post_accumulate_grad_hook(copied(seen[name]))  # type: ignore[no-untyped-call]
    yield


@contextmanager
def hooked_before(net: Net, _: Seen) -> Iterator[None]:
    for _, one in net.summed():
        one.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
    yield


@contextmanager
def hooked_node(net: Net, seen: Seen) -> Iterator[None]:
    """Hooks that a tensor does not show, such as those of data-parallel wrappers."""

    def copied(out: Tensor) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(grads: tuple[Tensor, ...]) -> None:
            out.copy_(grads[0])

        return hook

    nodes = []
    for name, one in net.summed():
        seen[name] = torch.zeros_like(one, requires_grad=False)
        nodes.append(get_gradient_edge(one).node)
        nodes[-1].register_prehook(copied(seen[name]))  # type: ignore[arg-type]
    yield


@contextmanager
def checked_for_nan(_: Net, __: Seen) -> Iterator[None]:
    with torch.autograd.detect_anomaly():
        yield


READERS = (
    unread, used_twice, used_by_a_penalty, checkpointed, hooked_after, hooked_before, hooked_node,
    checked_for_nan,
)  # fmt: skip
Reader = Callable[[Net, Seen], Any]


def batch(number: int, shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(device)


def trained(
    reader: Reader,
    optimizer: Callable[[Net], torch.optim.Optimizer],
    shape: tuple[int, ...],  # (batch, tokens, width)
    device: str,
    steps: int,
    *,
    fused: bool = True,
    graph: Any = "off",
) -> tuple[Net, list[Tensor], Seen]:
    """Train; return the model, its losses and the gradients that were seen in the last step."""
    net, seen = Net(shape[-1], fused).to(device), Seen()
    with reader(net, seen):
        step = TrainStep(net, optimizer(net), graph=graph, warmup=2)
        losses = [step(batch(number, shape, device)).clone() for number in range(steps)]
    return net, losses, seen


def torch_adamw(net: Net) -> AdamW:
    return AdamW(net.parameters(), **SETTINGS)


def in_backward(net: Net, **options: Any) -> InBackwardAdamW:
    return InBackwardAdamW(net.parameters(), attach=False, **SETTINGS, **options)
